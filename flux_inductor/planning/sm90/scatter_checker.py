"""Whether an order of the matmul_reduce_scatter kernels is whole, and comes to its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from flux_inductor.planning.plan import Plan
from flux_inductor.planning.problem import Problem
from flux_inductor.planning.progress import deadlock
from flux_inductor.planning.sm90.coverage import covers, tiles_fault
from flux_inductor.planning.sm90.kernel_queues import (
    Blocks,
    ScatterRank,
    ScatterTile,
    blocks_of,
    name_of,
    scatter_queues,
    workers_of,
)
from flux_inductor.planning.sm90.tiles import known


def scatter_fault(
    problem: Problem, plan: Plan, orders: Sequence[ScatterRank], resident: Sequence[int] | None = None
) -> str | None:
    """What is wrong with these orders of a matmul_reduce_scatter."""
    blocks = blocks_of(orders)
    for rank, order in enumerate(orders):
        places = [tile[:4] for cluster in order.clusters for tile in cluster]
        fault = tiles_fault(problem, plan, places) or _chunks_fault(problem, rank, order)
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


def _chunks_fault(problem: Problem, rank: int, order: ScatterRank) -> str | None:
    """Whether chunks make up the peers' parts, and count their tiles."""
    rows, columns = known(problem.strips) * known(problem.rows), known(problem.columns[0])
    for part in range(problem.world):
        chunks = [chunk for chunk in order.chunks if chunk[0] == part]
        if part == rank and chunks:
            return "a chunk of the own part moves"
        if part != rank and not covers([chunk[2:6] for chunk in chunks], rows, columns):
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
    shape, rows = plan.kernel_tile, known(problem.rows)
    part, strip, m, n, index = tile
    first, end = strip * rows + m * shape.m, strip * rows + min((m + 1) * shape.m, rows)
    left, right = n * shape.n, min((n + 1) * shape.n, known(problem.columns[0]))
    chunk = blocks.get((part, index))
    if chunk is not None and chunk[2] <= first and end <= chunk[3] and chunk[4] <= left and right <= chunk[5]:
        return None
    return f"{name_of(tile)} does not lie in chunk {index} of rank {part}: {chunk}"
