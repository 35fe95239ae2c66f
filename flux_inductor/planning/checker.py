"""Proof, by simulation, that a schedule cannot dead-lock (rule R1) and computes every result exactly once.

What is simulated
    On each rank, resident blocks claim steps from one counter in schedule order, and hold what they claimed
    until it is done; other kernels may leave a rank any number >= 1 of blocks. Beside them the rank's
    transfer engine works through its transfers in order, each standing in the way of the next.
      all_gather_matmul      a step of a peer's chunk waits until that chunk has arrived, its last slice, too:
                             its block holds it from the first one on, and can do nothing else.
      matmul_reduce_scatter  a transfer waits until its source is done with the chunk; a step of an own chunk
                             waits until all peers' partials of it have arrived.

Why one interleaving proves all
    Every event (claim, done, arrive) happens at most once and waits for conditions that, once true, stay
    true: "arrived", "done", "fewer claimed steps than blocks are undone". So no event can disable another,
    any two enabled ones can happen in either order, and every maximal run performs the same set of events:
    if one run comes to its end, no run gets stuck. More blocks only weaken the conditions, so one block on
    each rank is the hardest case. The tests run others, and random interleavings, as a check on this
    argument.

Two ranks that a wrong schedule stops (each is a test)
    Own chunks first in a reduce_scatter, one block each: rank 0 waits for rank 1's partial, which comes after
    rank 1's own step, which waits for rank 0's partial. With enough blocks to hold all own steps it would
    pass, and dead-lock the day another kernel takes some of them.
    An own chunk before the peer's that others wait for likewise, as a swizzle block that straddles two shards
    would have it: rank 0's step order is r1.1 r0.0 r1.0 r0.1, rank 1's r0.1 r1.0 r0.0 r1.1. Each waits at its
    second step for what the other does in its third.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from flux_inductor.planning.schedule import Chunk, Schedule, Transfer


@dataclass
class _Block:
    """A resident block: the chunk it works on."""

    held: Chunk | None = None


@dataclass
class _Rank:
    blocks: list[_Block]
    next_step: int = 0
    next_transfer: int = 0
    done: set[Chunk] = field(default_factory=set)
    arrived: set[tuple[int, Chunk, int]] = field(default_factory=set)  # (source, chunk, slice)


class Simulation:
    """All ranks of one call. `moves` are its agents: each does one event if it can and says whether it did.

    Args:
        blocks: resident blocks of each rank, at least one each.
    """

    def __init__(self, schedule: Schedule, blocks: Sequence[int]) -> None:
        assert len(blocks) == schedule.world
        assert min(blocks) >= 1, blocks
        self._schedule = schedule
        self.ranks = [_Rank([_Block() for _ in range(count)]) for count in blocks]
        self.moves: list[Callable[[], bool]] = []
        for rank, state in enumerate(self.ranks):
            self.moves.append(partial(self._transfer, rank))
            for block in state.blocks:
                self.moves.append(partial(self._work, rank, block))

    def run(self) -> None:
        """Until nothing moves any more."""
        moved = True
        while moved:
            moved = False
            for move in self.moves:
                moved |= move()

    @property
    def finished(self) -> bool:
        return all(
            len(state.done) == len(orders.steps) and state.next_transfer == len(orders.transfers)
            for state, orders in zip(self.ranks, self._schedule.ranks, strict=True)
        )

    def _transfer(self, rank: int) -> bool:
        state, transfers = self.ranks[rank], self._schedule.ranks[rank].transfers
        if state.next_transfer == len(transfers):
            return False
        transfer = transfers[state.next_transfer]
        if self._transfer_waits(transfer):
            return False
        self.ranks[transfer.target].arrived.add((transfer.source, transfer.chunk, transfer.slice))
        state.next_transfer += 1
        return True

    def _transfer_waits(self, transfer: Transfer) -> bool:
        if self._schedule.kind == "all_gather_matmul":
            return False
        return transfer.chunk not in self.ranks[transfer.source].done

    def _work(self, rank: int, block: _Block) -> bool:
        state, steps = self.ranks[rank], self._schedule.ranks[rank].steps
        if block.held is None:
            if state.next_step == len(steps):
                return False
            block.held = steps[state.next_step]
            state.next_step += 1
            return True
        if self.missing(rank, block.held):
            return False
        state.done.add(block.held)
        block.held = None
        return True

    def missing(self, rank: int, chunk: Chunk) -> list[int]:
        """Ranks from which the step of `chunk` on `rank` still waits for data."""
        arrived, slices = self.ranks[rank].arrived, range(chunk.slices)
        return [
            source
            for source in _sources(self._schedule, rank, chunk)
            if any((source, chunk, piece) not in arrived for piece in slices)
        ]

    def stuck(self) -> str:
        """What every rank stands at, for people."""
        lines = []
        for rank, (state, orders) in enumerate(zip(self.ranks, self._schedule.ranks, strict=True)):
            for chunk in (block.held for block in state.blocks if block.held is not None):
                peers = ", ".join(str(peer) for peer in self.missing(rank, chunk))
                lines.append(f"rank {rank}: a block holds {_name(chunk)}, waits for data of rank {peers}")
            left = [_name(chunk) for chunk in orders.steps[state.next_step :]]
            if left:
                lines.append(f"rank {rank}: no block is free for {_some(left)}")
            if state.next_transfer < len(orders.transfers):
                transfer = orders.transfers[state.next_transfer]
                lines.append(
                    f"rank {rank}: its transfer engine waits for rank {transfer.source} to signal "
                    f"{_name(transfer.chunk)}"
                )
        return "\n".join(lines)


def counter_example(schedule: Schedule, blocks: Sequence[int] | None = None) -> str | None:
    """What is wrong with a schedule, naming ranks and chunks; None when it is right.

    Args:
        blocks: resident blocks of each rank; None means one each, the hardest case (see above).
    """
    fault = _incomplete(schedule)
    if fault is not None:
        return fault
    blocks = blocks or [1] * schedule.world
    simulation = Simulation(schedule, blocks)
    simulation.run()
    if simulation.finished:
        return None
    return f"dead-lock with {_some([str(count) for count in blocks])} resident blocks:\n{simulation.stuck()}"


def _sources(schedule: Schedule, rank: int, chunk: Chunk) -> Iterable[int]:
    """Whose data the step of a chunk on a rank needs beside its own."""
    if schedule.kind == "all_gather_matmul":
        return () if chunk.owner == rank else (chunk.owner,)
    if chunk.owner != rank:
        return ()
    return (peer for peer in range(schedule.world) if peer != rank)


def _incomplete(schedule: Schedule) -> str | None:
    """The first step or transfer that is missing, extra, or with the wrong rank."""
    for rank, orders in enumerate(schedule.ranks):
        for owner in range(schedule.world):
            own = sorted((c for c in orders.steps if c.owner == owner), key=lambda chunk: chunk.start)
            edges = [(chunk.start, chunk.stop) for chunk in own]
            if [0, *(stop for _, stop in edges)] != [*(start for start, _ in edges), schedule.extent]:
                return f"rank {rank}'s steps: the chunks of rank {owner} do not cover its shard once: {own}"
    every = {
        (source, target, chunk, piece)
        for target, orders in enumerate(schedule.ranks)
        for chunk in orders.steps
        for source in _sources(schedule, target, chunk)
        for piece in range(chunk.slices)
    }
    made = [(t.source, t.target, t.chunk, t.slice) for orders in schedule.ranks for t in orders.transfers]
    fault = _difference(every, made)
    if fault is not None:
        return f"transfers (source, target, chunk, slice): {fault}"
    for rank, orders in enumerate(schedule.ranks):
        for transfer in orders.transfers:
            if rank not in (transfer.source, transfer.target):
                return f"rank {rank} executes a transfer of others: {transfer}"
    return None


def _difference(wanted: Collection[object], found: Collection[object]) -> str | None:
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


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
