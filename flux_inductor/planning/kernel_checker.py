"""Proof that the CUDA kernels' own order cannot deadlock (rule R1) and computes every result exactly once.

The orders of all ranks come from the compiled core (kernel_order.py), tile by tile, copy by copy: what the
kernels and the copy engine run. First they must be whole: every tile is multiplied once, every byte moved
once, and a tile waits for all that it reads. Then they must come to their ends, by what waits for what
(kernel_queues.py) and a simulation (progress.py).

Two ranks that a wrong order stops (each is a test)
    Own tiles before what the peers wait for: each rank holds an own tile and has not begun the other's.
    Fixed shares in a reduce_scatter: a rank's second cluster is not resident, and its share of the tiles for
    the peer is what the peer's first cluster waits for; likewise on the other rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from flux_inductor.planning.checker import difference
from flux_inductor.planning.kernel_order import gather_order, scatter_order
from flux_inductor.planning.kernel_queues import (
    Blocks,
    Copy,
    GatherRank,
    GatherTile,
    ScatterRank,
    ScatterTile,
    blocks_of,
    gather_queues,
    name_of,
    scatter_queues,
    workers_of,
)
from flux_inductor.planning.plan import Plan
from flux_inductor.planning.problem import Problem
from flux_inductor.planning.progress import deadlock
from flux_inductor.planning.tiles import Tile, known


def counter_example(
    problem: Problem, plan: Plan, at_once: Sequence[int], resident: Sequence[int] | None = None
) -> str | None:
    """What is wrong with the kernels' order, naming ranks and tiles; None when it is right.

    Args:
        plan: that `fitted` has completed.
        at_once: clusters with which each rank's kernel is launched.
        resident: of these, how many each rank's device holds; None means one each, which proves all others.
    """
    ranks = range(problem.world)
    if problem.kind == "all_gather_matmul":
        gathers = []
        for rank in ranks:
            orders = [gather_order(problem, plan, rank, known(columns)) for columns in problem.columns]
            clusters = [cluster for order in orders for cluster in order.clusters()]
            gathers.append(GatherRank(clusters, orders[0].copies()))
        return gather_fault(problem, plan, gathers, at_once, resident)
    scatters = []
    for rank, clusters_at_once in zip(ranks, at_once, strict=True):
        scatter = scatter_order(problem, plan, rank)
        scatters.append(ScatterRank(scatter.clusters(clusters_at_once), scatter.chunks()))
    return scatter_fault(problem, plan, scatters, resident)


def gather_fault(
    problem: Problem,
    plan: Plan,
    orders: Sequence[GatherRank],
    at_once: Sequence[int],
    resident: Sequence[int] | None = None,
) -> str | None:
    """What is wrong with these orders of an all_gather_matmul."""
    for rank, order in enumerate(orders):
        fault = _copies_fault(problem, order)
        if fault is not None:
            return f"rank {rank}: {fault}"
    for rank, order in enumerate(orders):
        tiles = [tile for cluster in order.clusters for tile in cluster]
        incoming = [[copy for copy in peer.copies if copy[0] == rank] for peer in orders]
        faults = (
            _tiles_fault(problem, plan, [tile[:4] for tile in tiles]),
            *(_unwaited(problem, plan, rank, tile, incoming[tile[0]]) for tile in tiles),
        )
        for fault in filter(None, faults):
            return f"rank {rank}: {fault}"
    return deadlock(gather_queues(orders, at_once), workers_of(len(orders), resident))


def scatter_fault(
    problem: Problem, plan: Plan, orders: Sequence[ScatterRank], resident: Sequence[int] | None = None
) -> str | None:
    """What is wrong with these orders of a matmul_reduce_scatter."""
    blocks = blocks_of(orders)
    for rank, order in enumerate(orders):
        places = [tile[:4] for cluster in order.clusters for tile in cluster]
        fault = _tiles_fault(problem, plan, places) or _chunks_fault(problem, rank, order)
        if fault is not None:
            return f"rank {rank}: {fault}"
    for rank, order in enumerate(orders):
        tiles = [tile for cluster in order.clusters for tile in cluster]
        peers = [peer for peer in range(len(orders)) if peer != rank]
        faults = (
            _misplaced(problem, plan, tile, blocks[sender])
            for tile in tiles
            for sender in (peers if tile[0] == rank else [rank])
        )
        for fault in filter(None, faults):
            return f"rank {rank}: {fault}"
    queues = scatter_queues(orders, plan.direction == "store")
    return deadlock(queues, workers_of(len(orders), resident))


def _tiles_fault(problem: Problem, plan: Plan, tiles: list[tuple[int, int, int, int]]) -> str | None:
    """The first tile that is missing, not there, or multiplied twice; several weights have their own each."""
    tile, strips = Tile.parse(plan.tile), known(problem.strips)
    down = -(-known(problem.rows) // tile.m)
    done = 0
    for columns in map(known, problem.columns):
        across = -(-columns // tile.n)
        count = problem.world * strips * down * across
        every = {
            (part, strip, m, n)
            for part in range(problem.world)
            for strip in range(strips)
            for m in range(down)
            for n in range(across)
        }
        fault = difference(every, tiles[done : done + count])
        if fault is not None:
            return f"tiles (part, strip, m, n): {fault}"
        done += count
    return None if done == len(tiles) else f"{len(tiles) - done} tiles too many"


def _covers(blocks: Sequence[tuple[int, int, int, int]], rows: int, columns: int) -> bool:
    """Whether blocks (first and last row, first and last column) make up the whole, without overlap."""
    inside = all(0 <= a < b <= rows and 0 <= c < d <= columns for a, b, c, d in blocks)
    area = sum((b - a) * (d - c) for a, b, c, d in blocks)
    apart = not any(_overlap(x, y) for i, x in enumerate(blocks) for y in blocks[:i])
    return inside and apart and area == rows * columns


def _overlap(x: Sequence[int], y: Sequence[int]) -> bool:
    return max(x[0], y[0]) < min(x[1], y[1]) and max(x[2], y[2]) < min(x[3], y[3])


def _copies_fault(problem: Problem, order: GatherRank) -> str | None:
    """Whether every peer gets the whole shard, once, and a signal of its own with each copy."""
    for peer in {copy[0] for copy in order.copies}:
        to_peer = [copy for copy in order.copies if copy[0] == peer]
        if not _covers([copy[1:5] for copy in to_peer], known(problem.rows), known(problem.depth)):
            return f"the copies to rank {peer} do not cover the shard once: {to_peer}"
        if len({copy[5] for copy in to_peer}) < len(to_peer):
            return f"two copies to rank {peer} have one signal: {to_peer}"
    return None


def _unwaited(problem: Problem, plan: Plan, rank: int, tile: GatherTile, copies: list[Copy]) -> str | None:
    """Whether a tile waits for all that it reads before it does.

    Args:
        copies: of the tile's shard to its rank.
    """
    if tile[0] == rank:
        return f"{name_of(tile)} of the own shard waits" if tile[4] else None
    height, rows = Tile.parse(plan.tile).m, known(problem.rows)
    first_row, end_row = tile[2] * height, min((tile[2] + 1) * height, rows)
    waited: set[int] = set()
    begin = 0
    for first, last, end in tile[4]:
        waited.update(range(first, last + 1))
        read = (first_row, end_row, begin, end)
        missing = [copy for copy in copies if _overlap(read, copy[1:5]) and copy[5] not in waited]
        if missing:
            return f"{name_of(tile)} reads columns {begin} to {end} of K, but has not waited for {missing[0]}"
        begin = end
    if begin != known(problem.depth):
        return f"{name_of(tile)} reads {begin} columns of K"
    strangers = waited - {copy[5] for copy in copies}
    return f"{name_of(tile)} waits for signals that nobody raises: {strangers}" if strangers else None


def _chunks_fault(problem: Problem, rank: int, order: ScatterRank) -> str | None:
    """Whether chunks make up the peers' parts, and count their tiles."""
    rows, columns = known(problem.strips) * known(problem.rows), known(problem.columns[0])
    for part in range(problem.world):
        chunks = [chunk for chunk in order.chunks if chunk[0] == part]
        if part == rank and chunks:
            return "a chunk of the own part moves"
        if part != rank and not _covers([chunk[2:6] for chunk in chunks], rows, columns):
            return f"the chunks of rank {part} do not cover its part once: {chunks}"
    stored = Counter((part, chunk) for cluster in order.clusters for part, _, _, _, chunk in cluster)
    for part, index, *_, tiles in order.chunks:
        if stored[part, index] != tiles:
            return f"chunk {index} of rank {part} has {stored[part, index]} tiles, but counts {tiles}"
    return None


def _misplaced(
    problem: Problem,
    plan: Plan,
    tile: ScatterTile,
    blocks: Blocks,
) -> str | None:
    """Whether a tile lies in its chunk, as who sends that has it."""
    shape, rows = Tile.parse(plan.tile), known(problem.rows)
    part, strip, m, n, index = tile
    first, end = strip * rows + m * shape.m, strip * rows + min((m + 1) * shape.m, rows)
    left, right = n * shape.n, min((n + 1) * shape.n, known(problem.columns[0]))
    chunk = blocks.get((part, index))
    if chunk is not None and chunk[2] <= first and end <= chunk[3] and chunk[4] <= left and right <= chunk[5]:
        return None
    return f"{name_of(tile)} does not lie in chunk {index} of rank {part}: {chunk}"
