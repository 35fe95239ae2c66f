"""What the CUDA kernels and copy engines of all ranks do and wait for, as queues of jobs (progress.py).

all_gather_matmul      Clusters have fixed shares of the tiles: the i-th takes i, i + clusters, ... One
                       that is not resident begins when another has ended. A tile waits for the signals
                       of its rows, which copy engines raise behind their copies.
matmul_reduce_scatter  Clusters claim tiles, each one ahead. A chunk is complete when all of its tiles are
                       stored; then it moves (push), or is where it belongs (store). An own tile waits
                       until its chunk has come from every peer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from flux_inductor.planning.progress import Event, Queue, Step, Wait

# Tiles, copies and chunks as in _core.pyi.
GatherTile: TypeAlias = tuple[int, int, int, int, list[tuple[int, int, int]]]
ScatterTile: TypeAlias = tuple[int, int, int, int, int]
Copy: TypeAlias = tuple[int, int, int, int, int, int]
Block: TypeAlias = tuple[int, int, int, int, int, int, int]
Blocks: TypeAlias = dict[tuple[int, int], Block]  # by part and index


@dataclass(frozen=True)
class GatherRank:
    """One rank's order: tiles of each cluster, and copies; see _core.GatherSchedule."""

    clusters: list[list[GatherTile]]
    copies: list[Copy]


@dataclass(frozen=True)
class ScatterRank:
    """One rank's order: tiles of each claim, and chunks; see _core.ScatterSchedule."""

    clusters: list[list[ScatterTile]]
    chunks: list[Block]


def gather_queues(orders: Sequence[GatherRank], at_once: Sequence[int]) -> list[Queue]:
    """Of each rank: the shares of its clusters, and its copies."""
    queues = []
    for rank, (order, launched) in enumerate(zip(orders, at_once, strict=True)):
        steps = [_gather_step(rank, cluster) for cluster in order.clusters]
        jobs = tuple(tuple(steps[first::launched]) for first in range(min(launched, len(steps))))
        queues.append(Queue(f"rank {rank}", jobs, several=True))
        sends = (Step(f"a copy to rank {copy[0]}", (), (_signal(copy[0], copy[5]),)) for copy in order.copies)
        queues.append(Queue(f"rank {rank}'s copy engine", tuple((send,) for send in sends)))
    return queues


def scatter_queues(orders: Sequence[ScatterRank], stores: bool) -> list[Queue]:
    """Of each rank: its claims, and its copies, if stores of the kernel are not the transport."""
    blocks, queues = blocks_of(orders), []
    for rank, order in enumerate(orders):
        jobs = tuple((_scatter_step(rank, cluster, blocks, stores),) for cluster in order.clusters)
        queues.append(Queue(f"rank {rank}", jobs, several=True, ahead=1))
        moves = () if stores else tuple((_move(rank, chunk),) for chunk in order.chunks)
        queues.append(Queue(f"rank {rank}'s copy engine", moves))
    return queues


def workers_of(world: int, resident: Sequence[int] | None) -> list[int]:
    """Of each queue, as they come above."""
    return [count for clusters in resident or [1] * world for count in (clusters, 1)]


def blocks_of(orders: Sequence[ScatterRank]) -> list[Blocks]:
    return [{chunk[:2]: chunk for chunk in order.chunks} for order in orders]


def _signal(rank: int, signal: int) -> Event:
    return "signal", rank, signal


def _gather_step(rank: int, cluster: list[GatherTile]) -> Step:
    """A cluster's tiles, once all of their signals are there."""
    signals = {
        signal: part
        for part, _, _, _, waits in cluster
        for first, last, _ in waits
        for signal in range(first, last + 1)
    }
    waits = (Wait(_signal(rank, signal), f"data of rank {part}") for signal, part in signals.items())
    return Step(name_of(cluster[0]), tuple(waits))


def _scatter_step(
    rank: int,
    cluster: list[ScatterTile],
    blocks: list[Blocks],
    stores: bool,
) -> Step:
    """A cluster's tiles: of a peer's part they are stored, of the own one they wait for the peers."""
    own = sorted({chunk for part, _, _, _, chunk in cluster if part == rank})
    waits = []
    for peer in (peer for peer in range(len(blocks)) if peer != rank):
        for chunk in own:
            event: Event = ("stored", peer, rank, chunk) if stores else ("arrived", peer, rank, chunk)
            waits.append(Wait(event, f"data of rank {peer}", blocks[peer][rank, chunk][6] if stores else 1))
    counts = tuple(("stored", rank, part, chunk) for part, _, _, _, chunk in cluster if part != rank)
    return Step(name_of(cluster[0]), tuple(waits), counts)


def _move(rank: int, chunk: Block) -> Step:
    part, index, tiles = chunk[0], chunk[1], chunk[6]
    wait = Wait(("stored", rank, part, index), "its tiles to be stored", tiles)
    return Step(f"chunk {index} of rank {part}", (wait,), (("arrived", rank, part, index),))


def name_of(tile: GatherTile | ScatterTile) -> str:
    return f"tile {tile[1:4]} of rank {tile[0]}"
