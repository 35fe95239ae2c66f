"""Where every chunk of a call lies on this rank and at its peers, computed once for each shape and plan.

Buffers hold chunks without gaps: for each peer a shard's chunks one after the other, each [strips, rows, K],
so that a chunk is one matrix to multiply and one run of bytes to move.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from flux_inductor._core import SignalLayout, Transfers
from flux_inductor.planning.ops import ALL_GATHER_MATMUL, MATMUL_REDUCE_SCATTER
from flux_inductor.planning.plan import Plan
from flux_inductor.planning.schedule import Chunk, cut, rank_schedule

NOTHING = -1  # Transfer::kNothing
KEPT = 1024  # layouts; dynamic shapes bring many


@dataclass(frozen=True)
class Strides:
    """How a shard [strips, rows, K] with unit stride along K lies in memory; elements."""

    strip: int
    row: int


@dataclass(frozen=True)
class Layout:
    """One rank's view of one call.

    Args:
        steps: chunks in the order of multiplication.
        own: this rank's chunks.
        offsets: for (peer, chunk index) where the chunk lies in the memory that holds the peers' chunks here;
            elements.
        size: of one shard (or one part of the result); elements.
        signals: their places.
        transfers: this rank's.
    """

    steps: tuple[Chunk, ...]
    own: tuple[Chunk, ...]
    offsets: dict[tuple[int, int], int]
    size: int
    signals: SignalLayout
    transfers: Transfers


def slot(peer: int, rank: int, world: int) -> int:
    """Which of the world - 1 shards in a rank's memory belongs to a peer."""
    return (peer - rank - 1) % world


@lru_cache(maxsize=KEPT)
def gather_layout(
    world: int,
    rank: int,
    strips: int,
    rows: int,
    depth: int,
    itemsize: int,
    plan: Plan,
    shard: Strides,
    whole: bool,
) -> Layout:
    """For all_gather_matmul.

    Args:
        shard: of this rank's input, from where it pushes.
        whole: a pull puts chunks in their places of the gathered tensor [strips, world * rows, K]; otherwise
            into memory for world - 1 shards.
    """
    orders = rank_schedule(ALL_GATHER_MATMUL, world, rank, rows, plan)
    signals = SignalLayout(world, len(cut(0, rows, plan.chunk)))
    size = strips * rows * depth

    def packed(peer: int, at: int, chunk: Chunk) -> int:
        return slot(peer, at, world) * size + strips * chunk.start * depth

    items = []
    for transfer in orders.transfers:
        chunk = transfer.chunk
        width = (chunk.stop - chunk.start) * depth
        if plan.direction == "push":
            peer = transfer.target
            local = _shard_block(chunk, strips, depth, shard)
            remote = (packed(rank, peer, chunk), local[1])
            waits, raises = NOTHING, signals.arrived(rank, chunk.index)
        else:
            peer = transfer.source
            if whole:
                local = (strips, width, (peer * rows + chunk.start) * depth, world * rows * depth)
            else:
                local = (strips, width, packed(peer, rank, chunk), width)
            remote = (strips * chunk.start * depth, width)
            waits, raises = signals.ready(peer, chunk.index), signals.arrived(peer, chunk.index)
        count, *lengths = (*local, *remote)
        items.append(
            [peer, chunk.owner, chunk.index, count, *(length * itemsize for length in lengths), waits, raises]
        )
    return Layout(
        steps=orders.steps,
        own=cut(rank, rows, plan.chunk),
        offsets={
            (chunk.owner, chunk.index): packed(chunk.owner, rank, chunk)
            for chunk in orders.steps
            if chunk.owner != rank
        },
        size=size,
        signals=signals,
        transfers=Transfers(plan.direction == "push", items),
    )


def _shard_block(chunk: Chunk, strips: int, depth: int, shard: Strides) -> tuple[int, int, int, int]:
    """(count, width, offset, pitch) of a chunk in the input; elements."""
    rows = chunk.stop - chunk.start
    if shard.row == depth:
        return strips, rows * depth, chunk.start * depth, shard.strip
    assert strips == 1, shard
    return rows, depth, chunk.start * shard.row, shard.row


@lru_cache(maxsize=KEPT)
def scatter_layout(world: int, rank: int, extent: int, across: int, itemsize: int, plan: Plan) -> Layout:
    """For matmul_reduce_scatter.

    Args:
        extent: rows of a part in one strip, or its columns if the product is scattered along columns.
        across: elements of the part for each of them: strips * N, or all rows.
    """
    orders = rank_schedule(MATMUL_REDUCE_SCATTER, world, rank, extent, plan)
    signals = SignalLayout(world, len(cut(0, extent, plan.chunk)))
    size = extent * across
    push = plan.direction == "push"
    items = []
    for transfer in orders.transfers:
        chunk = transfer.chunk
        peer = transfer.target if push else transfer.source
        width = (chunk.stop - chunk.start) * across
        local = slot(peer, rank, world) * size + chunk.start * across
        remote = slot(rank, peer, world) * size + chunk.start * across
        raiser = rank if push else peer
        waits, raises = signals.ready(chunk.owner, chunk.index), signals.arrived(raiser, chunk.index)
        lengths = (length * itemsize for length in (width, local, width, remote, width))
        items.append([peer, chunk.owner, chunk.index, 1, *lengths, waits, raises])
    return Layout(
        steps=orders.steps,
        own=cut(rank, extent, plan.chunk),
        offsets={
            (peer, chunk.index): slot(peer, rank, world) * size + chunk.start * across
            for peer in range(world)
            if peer != rank
            for chunk in cut(peer, extent, plan.chunk)
        },
        size=size,
        signals=signals,
        transfers=Transfers(push, items),
    )
