"""CUDA plans whose first and last chunks have sizes of their own, where the link is the bound.

Every copy has a fixed cost, so a link that is the bound wants few and large ones. But it idles before the
first chunk of a reduce_scatter, and what the last one makes possible comes after it: those should be small.
How small, the kernel's rounds say. A few sizes about a round are tried; the timeline chooses.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from flux_inductor.planning.fit import fitted, op_us, product_us
from flux_inductor.planning.plan import Plan
from flux_inductor.planning.problem import Problem
from flux_inductor.planning.tiles import Grid, Menu, at_once, grid, known

# Of the time without any wait: what is nearer to it has little to gain.
LINK_BOUND = 1.06
# Least predicted gain over even chunks, which are better understood, as a share.
GAIN = 0.02
# Pieces of what lies between the ends.
PIECES = (1, 2, 3, 4)
SLICES = (2, 4, 6)
# Elements of K in a slice, at least: rows of 2 KB still travel at the link's full rate.
SLICE_DEPTH = 1024
# Tiles that are looked at closely, of those that one plan of each suggests.
TILES = 2


def uneven(problem: Problem, even: Plan, menu: Menu) -> tuple[Plan, ...]:
    """The best plan with uneven chunks, if it is predicted faster than the best one with even chunks.

    All sizes must be known. Tables by M keep even chunks: uneven ones fit the rounds of one size.
    """
    even_us = op_us(problem, even)
    # In a pingpong kernel two tiles of a block are in turn, and slices serve the first: measured no gain.
    tiles = tuple(tile for tile in menu if not tile.pingpong)
    if not tiles or even_us < LINK_BOUND * product_us(problem, even.reserve, menu):
        return ()
    # Shards in strips: the first strip waits for all chunks, so that the others have none to wait for.
    if problem.kind == "all_gather_matmul" and problem.strips != 1:
        return ()
    grids = [grid(tile, problem, max(map(known, problem.columns))) for tile in tiles]
    bare = Plan("mesh", "push", 1, reserve=even.reserve)

    def plans(tiles: Grid) -> Iterator[Plan]:
        of_kind = _gathers if problem.kind == "all_gather_matmul" else _scatters
        return (fitted(problem, plan, menu) for plan in of_kind(problem, bare, tiles))

    def first_us(tiles: Grid) -> float:
        return op_us(problem, next(plans(tiles)))

    # Slices serve a single row of clusters, too; the ends of a scatter's part are at least one.
    long = [each for each in grids if each.rows > 1 or problem.kind == "all_gather_matmul"]
    near = [plan for tiles in sorted(long, key=first_us)[:TILES] for plan in plans(tiles)]
    best = min(near, key=lambda plan: op_us(problem, plan), default=even)
    return (best,) if op_us(problem, best) < (1 - GAIN) * even_us else ()


def _round(tiles: Grid, reserve: int) -> int:
    """Rows of clusters that the device multiplies at once."""
    return min(max(at_once(tiles.tile, reserve) // tiles.columns, 1), tiles.rows)


def _gathers(problem: Problem, bare: Plan, tiles: Grid) -> Iterator[Plan]:
    """Last chunks of one round and of less, in slices."""
    extent, one = known(problem.extent), _round(tiles, bare.reserve)
    slices = [count for count in SLICES if count * SLICE_DEPTH <= known(problem.depth)]
    for rows in sorted({one, -(-3 * one // 4), -(-one // 2)}, reverse=True):
        # It begins with a cluster: whatever lies before one would hold a cluster of its own.
        last = extent - max(tiles.rows - rows, 0) * tiles.height
        # Other shards than the last are cut by `chunk` alone.
        # A kept tensor's stores would all follow the last slice (measured 1.10, even chunks take 1.06).
        counts = slices if last < extent or not problem.return_gathered else []
        for chunk in _between(extent - last, tiles.height) if last < extent else [extent]:
            for count in (*reversed(counts), 0):
                yield replace(bare, chunk=chunk, last=last, slices=count, tile=str(tiles.tile))


def _scatters(problem: Problem, bare: Plan, tiles: Grid) -> Iterator[Plan]:
    """First and last chunks of one round, and of half of one. All are whole rows of the product."""
    total, one = known(problem.strips) * known(problem.rows), _round(tiles, bare.reserve)
    half = -(-one // 2)
    for first, last in dict.fromkeys([(one, one), (half, one), (half, half)]):
        sweep = first if last % first == 0 else 1
        begin = min(first * tiles.height, total)
        end = min(last * tiles.height, total - begin)
        for chunk in _between(total - begin - end, sweep * tiles.height):
            yield replace(
                bare,
                chunk=chunk,
                first=begin,
                last=end,
                width=known(problem.columns[0]),
                tile=str(tiles.tile),
                sweep=sweep,
            )


def _between(rows: int, granule: int) -> list[int]:
    """Sizes of chunks that cut so many rows into a few pieces, of whole granules."""
    return list(dict.fromkeys(max(-(-rows // (pieces * granule)), 1) * granule for pieces in PIECES))
