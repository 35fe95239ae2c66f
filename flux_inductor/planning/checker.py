"""Proof that a schedule of the CPU engine cannot deadlock (rule R1) and computes every result exactly once.

On each rank one worker multiplies chunks in schedule order, and one moves them, each transfer standing in the
way of the next:
    all_gather_matmul      a step of a peer's chunk waits until that chunk has arrived.
    matmul_reduce_scatter  a transfer waits until its source is done with the chunk; a step of an own chunk
                           waits until all peers' partials of it have arrived.
progress.py has the simulation, and why it proves any number of workers. kernel_checker.py does the same for
the CUDA kernels, tile by tile.

Two ranks that a wrong schedule stops (each is a test)
    Own chunks first in a reduce_scatter: rank 0 waits for rank 1's partial, which comes after rank 1's own
    step, which waits for rank 0's partial. With enough workers to hold all own steps it would pass, and
    deadlock the day that there are fewer.
    An own chunk before the peer's that others wait for likewise, as a swizzle block that straddles two shards
    would have it: rank 0's step order is r1.1 r0.0 r1.0 r0.1, rank 1's r0.1 r1.0 r0.0 r1.1. Each waits at its
    second step for what the other does in its third.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from flux_inductor.planning.progress import Queue, Step, Wait, deadlock
from flux_inductor.planning.schedule import Chunk, Schedule, Transfer


def counter_example(schedule: Schedule, workers: Sequence[int] | None = None) -> str | None:
    """What is wrong with a schedule, naming ranks and chunks; None when it is right.

    Args:
        workers: that multiply on each rank; None means one each, which proves all others.
    """
    fault = _incomplete(schedule)
    if fault is not None:
        return fault
    multiply = workers or [1] * schedule.world
    return deadlock(queues(schedule), [count for each in multiply for count in (each, 1)])


def queues(schedule: Schedule) -> list[Queue]:
    """Of each rank, one after another: what it multiplies, and what it moves."""
    made = []
    for rank, orders in enumerate(schedule.ranks):
        steps = tuple((_multiply(schedule, rank, chunk),) for chunk in orders.steps)
        made.append(Queue(f"rank {rank}", steps, several=True))
        moves = tuple((_move(schedule, transfer),) for transfer in orders.transfers)
        made.append(Queue(f"rank {rank}'s transfer engine", moves))
    return made


def _multiply(schedule: Schedule, rank: int, chunk: Chunk) -> Step:
    waits = (
        Wait(("arrived", source, rank, chunk), f"data of rank {source}")
        for source in schedule.op.sources(schedule.world, rank, chunk.owner)
    )
    return Step(_name(chunk), tuple(waits), (("done", rank, chunk),))


def _move(schedule: Schedule, transfer: Transfer) -> Step:
    source, chunk = transfer.source, transfer.chunk
    waits: tuple[Wait, ...] = ()
    if not schedule.op.collective_first:
        waits = (Wait(("done", source, chunk), f"rank {source} to multiply it"),)
    return Step(_name(chunk), waits, (("arrived", source, transfer.target, chunk),))


def _incomplete(schedule: Schedule) -> str | None:
    """The first step or transfer that is missing, extra, or with the wrong rank."""
    for rank, orders in enumerate(schedule.ranks):
        for owner in range(schedule.world):
            own = sorted((c for c in orders.steps if c.owner == owner), key=lambda chunk: chunk.start)
            edges = [(chunk.start, chunk.stop) for chunk in own]
            if [0, *(stop for _, stop in edges)] != [*(start for start, _ in edges), schedule.extent]:
                return f"rank {rank}'s steps: the chunks of rank {owner} do not cover its shard once: {own}"
    every = {
        (source, target, chunk)
        for target, orders in enumerate(schedule.ranks)
        for chunk in orders.steps
        for source in schedule.op.sources(schedule.world, target, chunk.owner)
    }
    made = [(t.source, t.target, t.chunk) for orders in schedule.ranks for t in orders.transfers]
    fault = difference(every, made)
    if fault is not None:
        return f"transfers (source, target, chunk): {fault}"
    for rank, orders in enumerate(schedule.ranks):
        for transfer in orders.transfers:
            if rank not in (transfer.source, transfer.target):
                return f"rank {rank} executes a transfer of others: {transfer}"
    return None


def difference(wanted: Collection[object], found: Collection[object]) -> str | None:
    """The first item that is not wanted, found twice, or missing."""
    counts = Counter(found)
    for item, count in counts.items():
        if item not in wanted:
            return f"unexpected {item}"
        if count > 1:
            return f"{item} occurs {count} times"
    missing = [item for item in wanted if item not in counts]
    return f"{min(missing, key=str)} is missing" if missing else None


def _name(chunk: Chunk) -> str:
    return f"chunk {chunk.index} of rank {chunk.owner}"
