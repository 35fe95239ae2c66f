"""CUDA plans of gathers with a last chunk of its own size, in slices, where the link is the bound.

Every copy has a fixed cost, so a link that is the bound wants few and large ones. But all tiles that wait for
the last one are multiplied after it: its rows should be one round of tiles, and come in slices along K, so
that most of them is multiplied before the last byte is there. A few sizes about a round are tried; the
timeline chooses.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from flux_inductor.planning.plan import Plan
from flux_inductor.planning.problem import Problem
from flux_inductor.planning.sm90.fit import KERNELS, fitted, op_us, product_us
from flux_inductor.planning.sm90.tiles import Grid, Menu, grid, known

# Of the time without any wait: what is nearer to it has little to gain.
LINK_BOUND = 1.06
# Least predicted gain over even chunks, which are better understood, as a share.
GAIN = 0.02
# Pieces of what lies before the last chunk.
PIECES = (1, 2, 3, 4)
SLICES = (2, 4, 6)
# Elements of K in a slice, at least: rows of 2 KB still travel at the link's full rate.
SLICE_DEPTH = 1024
# Tiles that are looked at closely, of those that one plan of each suggests.
TILES = 2


def uneven(problem: Problem, even: Plan, menu: Menu, sms: int) -> tuple[Plan, ...]:
    """The best plan with an uneven chunk, if it is predicted faster than the best one with even chunks.

    All sizes must be known. Tables by M keep even chunks: uneven ones fit the rounds of one size.
    """
    # Shards in strips: the first strip waits for all chunks, so that the others have none to wait for.
    if not KERNELS[problem.op].last_chunk or problem.strips != 1:
        return ()
    # In a pingpong kernel two tiles of a block are in turn, and slices serve the first: measured no gain.
    tiles = tuple(tile for tile in menu if not tile.pingpong)
    even_us = op_us(problem, even, sms)
    if not tiles or even_us < LINK_BOUND * product_us(problem, even.reserve, menu, sms):
        return ()
    grids = [grid(tile, problem, max(map(known, problem.columns)), sms) for tile in tiles]
    bare = Plan("mesh", "push", 1, reserve=even.reserve)

    def plans(tiles: Grid) -> Iterator[Plan]:
        return (fitted(problem, plan, menu, sms) for plan in _with_last_chunk(problem, bare, tiles))

    def first_us(tiles: Grid) -> float:
        return op_us(problem, next(plans(tiles)), sms)

    near = [plan for tiles in sorted(grids, key=first_us)[:TILES] for plan in plans(tiles)]
    best = min(near, key=lambda plan: op_us(problem, plan, sms))
    return (best,) if op_us(problem, best, sms) < (1 - GAIN) * even_us else ()


def _with_last_chunk(problem: Problem, bare: Plan, tiles: Grid) -> Iterator[Plan]:
    """Last chunks of one round and of less, in slices."""
    extent = known(problem.extent)
    one = min(max(tiles.at_once(bare.reserve) // tiles.columns, 1), tiles.rows)  # rows of a round
    slices = [count for count in SLICES if count * SLICE_DEPTH <= known(problem.depth)]
    for rows in sorted({one, -(-3 * one // 4), -(-one // 2)}, reverse=True):
        # It begins with a cluster: whatever lies before one would hold a cluster of its own.
        last = extent - max(tiles.rows - rows, 0) * tiles.height
        # Other shards than the last are cut by `chunk` alone.
        # A kept tensor's stores would all follow the last slice (measured 1.10, even chunks take 1.06).
        counts = slices if last < extent or not problem.return_gathered else []
        for chunk in _before(extent - last, tiles.height) if last < extent else [extent]:
            for count in (*reversed(counts), 0):
                yield replace(bare, chunk=chunk, last=last, slices=count, tile=tiles.tile)


def _before(rows: int, granule: int) -> list[int]:
    """Sizes of chunks that cut so many rows into a few pieces, of whole granules."""
    return list(dict.fromkeys(max(-(-rows // (pieces * granule)), 1) * granule for pieces in PIECES))
