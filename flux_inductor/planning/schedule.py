"""Which chunk moves when, and which is multiplied when, on every rank of the group.

Contract
    A schedule is a pure function of (kind, world, extent, plan), so every rank knows its peers' without
    asking. It says two orders a rank: `transfers`, in which the rank's one transfer engine moves chunks, and
    `steps`, in which its blocks claim them for multiplication. An engine adds the waits, which follow from
    the kind alone:
      all_gather_matmul      a step of a peer's chunk waits until that chunk has arrived: all of its slices.
      matmul_reduce_scatter  a transfer waits until its source has multiplied the chunk; a step of an own
                             chunk, which adds the partials up, waits until every peer's has arrived.
    A transfer starts only once both sides have entered the call. With direction "store" a transfer is the
    stores of the blocks that multiply the chunk, done when the last of them is: nothing stands in its way,
    and nothing queues it. So there the own chunks take turns with the last peer's, each behind the one that
    the peers compute for it: the link is in use nearly all the time.

Timeline: four ranks, one chunk a shard, seen from rank 0 (r3 = the shard of rank 3)
    all_gather_matmul       link in        r1   r2   r3
                            multiply  r0   r1   r2   r3
    matmul_reduce_scatter   multiply  r1   r2   r3   r0
                            link out       r1   r2   r3
                            link in        r0   r0   r0     (from ranks 3, 2, 1)
    of two ranks and three chunks, with direction "store"
                            multiply  r1.0  r0.0  r1.1  r0.1  r1.2  r0.2

Physics
    In phase k (of world - 1) rank r sends to r - k in an all_gather, to r + k in a reduce_scatter: a
    permutation. So no two ranks write to the same one at a time, each port carries one stream in and one
    out, and a transfer gets the whole bandwidth of its link. Arrival order equals multiply order on every
    rank, so the blocks wait for at most one chunk before they can start on peers' data.
    In an all_gather the own shard is multiplied while the first chunk travels. In a reduce_scatter own
    chunks come last, but for "store": they are the only ones that wait, and the last partial travels while
    they compute.

An uneven chunk, where the link is the bound and the fixed cost of a transfer forbids many
    After the last byte of an all_gather the tiles that waited for it remain to be multiplied. So the shard
    that a rank needs last ends with a chunk of `last` rows, few enough for one round of tiles, sent in slices
    along K: tiles multiply one while the next is on its way. What follows other shards hides their ends:
    their cut is even.

Rejected
    Chunk by chunk over all peers (r1.0, r2.0, r3.0, r1.1, ...): the same throughput, but a rank would
    stop in the first round for whichever peer entered the call last, while peer by peer the k-th neighbour
    has k - 1 shards' time to come; and consecutive steps would jump between shards, where a contiguous
    run of rows keeps tiles whole and caches warm.
    All ranks in the order r0, r1, r2, ...: every rank would read from (or write to) the same one at a time.
    Own chunks first in a reduce_scatter: dead-locks when blocks are few (see checker.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, pairwise

from flux_inductor.planning.plan import Plan
from flux_inductor.planning.problem import Kind


@dataclass(frozen=True)
class Chunk:
    """Rows (or columns) [start, stop) of the owner's shard, in every strip; the index-th of that shard.

    Args:
        slices: transfers in which it travels, one after another.
    """

    owner: int
    index: int
    start: int
    stop: int
    slices: int = 1


@dataclass(frozen=True)
class Transfer:
    """A chunk's way from `source` to `target`: the gathered input itself, or the source's partial of it.

    Args:
        slice: which of the chunk's slices.
    """

    source: int
    target: int
    chunk: Chunk
    slice: int = 0


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

    kind: Kind
    world: int
    extent: int
    ranks: tuple[RankSchedule, ...]


def cut(owner: int, extent: int, chunk: int, last: int = 0, slices: int = 1) -> tuple[Chunk, ...]:
    """The chunks of one shard: `chunk` rows (or columns) each, the last of them what remains.

    A last one of another size comes behind these, and is the whole if it is longer; chunks of nothing do not
    exist. The twin of csrc/cuda/cut.h.

    Args:
        last: rows of the last chunk; 0: as any other.
        slices: of the last chunk.
    """
    assert extent >= 0, extent
    assert chunk >= 1, chunk
    tail = max(extent - last, 0)
    edges = [*range(0, tail, chunk), tail, extent]
    pieces = [(start, stop) for start, stop in pairwise(edges) if start < stop]
    return tuple(
        Chunk(owner, index, start, stop, slices if stop == extent else 1)
        for index, (start, stop) in enumerate(pieces)
    )


def cut_for(kind: Kind, world: int, owner: int, receiver: int, extent: int, plan: Plan) -> tuple[Chunk, ...]:
    """The chunks of a shard for one of its receivers; of an all_gather, uneven for who needs it last."""
    if kind == "all_gather_matmul" and owner == (receiver - 1) % world:
        return cut(owner, extent, plan.chunk, plan.last, max(plan.slices, 1))
    return cut(owner, extent, plan.chunk)


@lru_cache(maxsize=1024)
def rank_schedule(kind: Kind, world: int, rank: int, extent: int, plan: Plan) -> RankSchedule:
    """The orders of one rank.

    Args:
        extent: rows of a shard in one strip, or its columns when the product is scattered along columns.
        plan: a fused plan; `chunk` may exceed `extent`.
    """
    assert plan.route == "mesh", plan
    assert 0 <= rank < world, (rank, world)
    owners = [(rank + offset) % world for offset in range(world)]
    parts = [cut_for(kind, world, owner, rank, extent, plan) for owner in owners]
    if kind == "all_gather_matmul":
        assert plan.direction != "store", plan
        transfers = _all_gather_transfers(rank, world, plan.direction == "push")
    else:
        parts = parts[1:] + parts[:1]
        if plan.direction == "store" and world > 1:
            parts = [*parts[:-2], tuple(chain(*zip(*parts[-2:], strict=True)))]
        transfers = _reduce_scatter_transfers(rank, world, plan.direction != "pull")
    return RankSchedule(
        transfers=tuple(
            Transfer(source, target, chunk, piece)
            for source, target, owner in transfers
            for chunk in cut_for(kind, world, owner, target, extent, plan)
            for piece in range(chunk.slices)
        ),
        steps=tuple(chain(*parts)),
    )


def _all_gather_transfers(rank: int, world: int, push: bool) -> list[tuple[int, int, int]]:
    """(source, target, owner) by phase: to the left-hand neighbours, from the right-hand ones."""
    if push:
        return [(rank, (rank - phase) % world, rank) for phase in range(1, world)]
    sources = [(rank + phase) % world for phase in range(1, world)]
    return [(source, rank, source) for source in sources]


def _reduce_scatter_transfers(rank: int, world: int, push: bool) -> list[tuple[int, int, int]]:
    """(source, target, owner) by phase: to the right-hand neighbours, from the left-hand ones."""
    if push:
        targets = [(rank + phase) % world for phase in range(1, world)]
        return [(rank, target, target) for target in targets]
    return [((rank - phase) % world, rank, rank) for phase in range(1, world)]


def schedule(kind: Kind, world: int, extent: int, plan: Plan) -> Schedule:
    """The orders of all ranks; arguments as for `rank_schedule`."""
    return Schedule(
        kind=kind,
        world=world,
        extent=extent,
        ranks=tuple(rank_schedule(kind, world, rank, extent, plan) for rank in range(world)),
    )
