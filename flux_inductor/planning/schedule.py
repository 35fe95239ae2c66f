"""The CPU engine's schedule: which chunk moves when, and which is multiplied when, on every rank.

Contract
    A schedule is a pure function of (op, world, extent, plan), so every rank knows its peers' without
    asking. It says two orders a rank: `transfers`, in which the rank's one transfer engine moves chunks, and
    `steps`, in which they are multiplied. An engine adds the waits, which follow from the op alone:
      all_gather_matmul      a step of a peer's chunk waits until that chunk has arrived.
      matmul_reduce_scatter  a transfer waits until its source has multiplied the chunk; a step of an own
                             chunk, which adds the partials up, waits until every peer's has arrived.
    A transfer starts only once both sides have entered the call.

    Both orders are those of the CUDA kernels (csrc/core), for tiles as large as a chunk. Kernels have more to
    them, tiles that are smaller than chunks, chunks that travel in slices, stores in the place of transfers:
    see kernel_order.py.

Timeline: four ranks, one chunk a shard, seen from rank 0 (r3 = the shard of rank 3)
    all_gather_matmul       link in        r1   r2   r3
                            multiply  r0   r1   r2   r3
    matmul_reduce_scatter   multiply  r1   r2   r3   r0
                            link out       r1   r2   r3
                            link in        r0   r0   r0     (from ranks 3, 2, 1)

Physics
    In phase k (of world - 1) rank r sends to r - k in an all_gather, to r + k in a reduce_scatter: a
    permutation. So no two ranks write to the same one at a time, each port carries one stream in and one
    out, and a transfer gets the whole bandwidth of its link. Arrival order equals multiply order on every
    rank, so at most one chunk is waited for before peers' data can be multiplied.
    In an all_gather the own shard is multiplied while the first chunk travels. In a reduce_scatter own
    chunks come last: they are the only ones that wait, and the last partial travels while they compute.

Rejected
    Chunk by chunk over all peers (r1.0, r2.0, r3.0, r1.1, ...): the same throughput, but a rank would
    stop in the first round for whichever peer entered the call last, while peer by peer the k-th neighbour
    has k - 1 shards' time to come; and consecutive steps would jump between shards, where a contiguous
    run of rows keeps tiles whole and caches warm.
    All ranks in the order r0, r1, r2, ...: every rank would read from (or write to) the same one at a time.
    Own chunks first in a reduce_scatter: deadlocks when workers are few (see checker.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from flux_inductor._core import cut_rows
from flux_inductor.planning.ops.op import Op
from flux_inductor.planning.plan import Plan


@dataclass(frozen=True)
class Chunk:
    """Rows (or columns) [start, stop) of the owner's shard, in every strip; the index-th of that shard."""

    owner: int
    index: int
    start: int
    stop: int


@dataclass(frozen=True)
class Transfer:
    """A chunk's way from `source` to `target`: the gathered input itself, or the source's partial of it."""

    source: int
    target: int
    chunk: Chunk


@dataclass(frozen=True)
class RankSchedule:
    """Orders of one rank: of its transfer engine, and of its multiplications."""

    transfers: tuple[Transfer, ...]
    steps: tuple[Chunk, ...]


@dataclass(frozen=True)
class Schedule:
    """The orders of all ranks.

    Args:
        extent: of a shard, which its chunks cover.
    """

    op: Op
    world: int
    extent: int
    ranks: tuple[RankSchedule, ...]


def cut(owner: int, extent: int, chunk: int) -> tuple[Chunk, ...]:
    """The chunks of one shard: `chunk` rows (or columns) each, the last of them what remains."""
    assert extent >= 0, extent
    edges = cut_rows(extent, min(chunk, max(extent, 1)))
    return tuple(Chunk(owner, index, start, stop) for index, (start, stop) in enumerate(edges))


@lru_cache(maxsize=1024)
def rank_schedule(op: Op, world: int, rank: int, extent: int, plan: Plan) -> RankSchedule:
    """The orders of one rank.

    Args:
        extent: rows of a shard in one strip, or its columns when the product is scattered along columns.
        plan: a fused plan; `chunk` may exceed `extent`.
    """
    assert plan.route == "mesh", plan
    assert plan.direction in ("push", "pull"), plan
    assert 0 <= rank < world, (rank, world)
    if extent == 0:
        return RankSchedule((), ())
    chunk = min(plan.chunk, extent)
    places, targets = op.orders(world, rank, extent, chunk)
    shards = [cut(owner, extent, chunk) for owner in range(world)]
    steps = tuple(shards[part][index] for part, index in places)
    transfers = [
        Transfer(source, target, each)
        for source, target in _ways(world, rank, list(dict.fromkeys(targets)), plan.direction == "push")
        for each in shards[op.owner(source, target)]
    ]
    return RankSchedule(tuple(transfers), steps)


def _ways(world: int, rank: int, targets: list[int], push: bool) -> list[tuple[int, int]]:
    """(source, target) by phase.

    Args:
        targets: to whom the rank pushes, in this order. Whoever pulls has the other half of the same phases:
            who would push to it in each.
    """
    if push:
        return [(rank, target) for target in targets]
    return [((2 * rank - target) % world, rank) for target in targets]


def schedule(op: Op, world: int, extent: int, plan: Plan) -> Schedule:
    """The orders of all ranks; arguments as for `rank_schedule`."""
    return Schedule(
        op=op,
        world=world,
        extent=extent,
        ranks=tuple(rank_schedule(op, world, rank, extent, plan) for rank in range(world)),
    )
