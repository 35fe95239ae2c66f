"""Whether an order of the all_gather_matmul kernels is whole, and comes to its end."""

from __future__ import annotations

from collections.abc import Sequence

from flux_inductor.planning.plan import Plan
from flux_inductor.planning.problem import Problem
from flux_inductor.planning.progress import deadlock
from flux_inductor.planning.sm90.coverage import covers, overlap, tiles_fault
from flux_inductor.planning.sm90.kernel_queues import (
    Copy,
    GatherRank,
    GatherTile,
    gather_queues,
    name_of,
    workers_of,
)
from flux_inductor.planning.sm90.tiles import known


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
            tiles_fault(problem, plan, [tile[:4] for tile in tiles]),
            *(_unwaited(problem, plan, rank, tile, incoming[tile[0]]) for tile in tiles),
        )
        for fault in filter(None, faults):
            return f"rank {rank}: {fault}"
    return deadlock(gather_queues(orders, at_once), workers_of(len(orders), resident))


def _copies_fault(problem: Problem, order: GatherRank) -> str | None:
    """Whether every peer gets the whole shard, once, and a signal of its own with each copy."""
    for peer in {copy[0] for copy in order.copies}:
        to_peer = [copy for copy in order.copies if copy[0] == peer]
        if not covers([copy[1:5] for copy in to_peer], known(problem.rows), known(problem.depth)):
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
    height, rows = plan.kernel_tile.m, known(problem.rows)
    first_row, end_row = tile[2] * height, min((tile[2] + 1) * height, rows)
    waited: set[int] = set()
    begin = 0
    for first, last, end in tile[4]:
        waited.update(range(first, last + 1))
        read = (first_row, end_row, begin, end)
        missing = [copy for copy in copies if overlap(read, copy[1:5]) and copy[5] not in waited]
        if missing:
            return f"{name_of(tile)} reads columns {begin} to {end} of K, but has not waited for {missing[0]}"
        begin = end
    if begin != known(problem.depth):
        return f"{name_of(tile)} reads {begin} columns of K"
    strangers = waited - {copy[5] for copy in copies}
    return f"{name_of(tile)} waits for signals that nobody raises: {strangers}" if strangers else None
