"""Ranks agree on which making of a group they meet in, whatever one did before. Ranks are threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch.distributed as dist

from flux_inductor.runtime.errors import FusedOpError, MismatchError, PeerLostError, PeerTimeoutError
from flux_inductor.runtime.generation import Generation

QUICK_S = 1.0  # far below LIMIT_S
LIMIT_S = 20.0


def nothing() -> None: ...


class Makings:
    """Makings of one group, whose keys are the same each time."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.store = dist.HashStore()  # type: ignore[attr-defined]
        self.threads = ThreadPoolExecutor(world)

    def make(self, rank: int) -> Generation:
        return Generation("cpu", self.store, rank, self.world)

    def make_all(self) -> list[Generation]:
        return [self.make(rank) for rank in range(self.world)]

    def meet(self, rank: Generation, text: str, limit_s: float = LIMIT_S) -> Future[list[str]]:
        return self.threads.submit(rank.meet, text, limit_s, nothing)

    def meet_all(self, ranks: list[Generation], word: str) -> None:
        """All meet, and each reads the texts of these ranks."""
        texts = [f"{word} of {rank.rank}" for rank in ranks]
        meetings = [self.meet(rank, text) for rank, text in zip(ranks, texts, strict=True)]
        assert all(meeting.result() == texts for meeting in meetings)


def fails_alone(rank: Generation, how: str = "PeerTimeoutError: nobody came") -> None:
    """It waits in vain, as its peers do something else, and its group is dead."""
    with pytest.raises(PeerTimeoutError):
        rank.meet("alone", 0.02, nothing)
    rank.fail(how)


@pytest.mark.parametrize("world", [1, 2, 5])
def test_makings_and_meetings_are_told_apart(world: int) -> None:
    group = Makings(world)
    for making in range(3):
        ranks = group.make_all()
        for meeting in range(3):
            group.meet_all(ranks, f"making {making} meeting {meeting}")
        for rank in ranks:
            rank.leave()


@pytest.mark.parametrize("failed", [0, 1, 2])
def test_a_making_that_one_rank_alone_has_used_is_over(failed: int) -> None:
    group = Makings(3)
    old = group.make(failed)
    fails_alone(old)
    old.leave()
    for first in range(3):  # whoever comes first waits for the others
        ranks = group.make_all()
        early = group.meet(ranks[first], f"early {first}")
        time.sleep(0.02)
        assert not early.done()
        others = [group.meet(rank, f"{rank.rank}") for rank in ranks if rank.rank != first]
        assert len({tuple(meeting.result()) for meeting in (early, *others)}) == 1
        for rank in ranks:
            rank.leave()


def seconds(call: Callable[[], object]) -> float:
    start = time.monotonic()
    call()
    return time.monotonic() - start


def test_who_is_late_in_a_making_that_failed_hears_so_at_once() -> None:
    group = Makings(2)
    fails_alone(group.make(0), "MismatchError: two ops")
    late = group.make(1)

    def meet() -> None:
        with pytest.raises(MismatchError, match="rank 0 failed: MismatchError: two ops"):
            late.meet("late", LIMIT_S, nothing)

    assert seconds(meet) < QUICK_S


@pytest.mark.parametrize("met", [False, True])
@pytest.mark.parametrize("leaves", [False, True])
def test_who_waits_hears_of_a_failure(met: bool, leaves: bool) -> None:
    group = Makings(3)
    ranks = group.make_all()
    if met:
        group.meet_all(ranks, "before")
    waiting = group.meet(ranks[1], "now")
    time.sleep(0.05)
    ranks[2].fail("ValueError: no such thing")
    if leaves and met:  # one that had not met, and leaves at once, may be of an older making
        ranks[2].leave()
    with pytest.raises(FusedOpError, match="rank 2 failed: ValueError: no such thing"):
        waiting.result(QUICK_S)


def test_who_waits_in_a_meeting_hears_that_a_rank_has_left() -> None:
    group = Makings(3)
    ranks = group.make_all()
    group.meet_all(ranks, "before")
    waiting = group.meet(ranks[0], "now")
    ranks[1].leave()
    with pytest.raises(PeerLostError, match="rank 1 has destroyed the group"):
        waiting.result(QUICK_S)


def test_a_rank_that_has_met_for_the_last_time_may_leave() -> None:
    group = Makings(2)
    ranks = group.make_all()
    group.meet_all(ranks, "before")
    last = group.meet(ranks[0], "last")
    assert group.meet(ranks[1], "last too").result() == ["last", "last too"]
    ranks[1].leave()
    assert last.result() == ["last", "last too"]


@pytest.mark.parametrize("fails", [False, True])
def test_a_rank_may_be_in_the_new_making_while_another_is_in_the_old(fails: bool) -> None:
    group = Makings(2)
    old = group.make_all()
    group.meet_all(old, "old")
    old[0].leave()
    new = group.make(0)
    early = group.meet(new, "new 0")
    time.sleep(0.02)
    if fails:
        old[1].fail("RuntimeError: late")
        time.sleep(0.05)
    old[1].leave()
    assert group.meet(group.make(1), "new 1").result() == early.result() == ["new 0", "new 1"]


def test_waiting_can_be_given_up() -> None:
    given_up = threading.Event()

    def check() -> None:
        if given_up.is_set():
            raise KeyboardInterrupt

    waiting = Makings(2)
    meeting = waiting.threads.submit(waiting.make(0).meet, "", LIMIT_S, check)
    given_up.set()
    with pytest.raises(KeyboardInterrupt):
        meeting.result(QUICK_S)
