"""Calls that fail on one rank before they begin, and what the others make of it: rules R4 and R7 on CUDA."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from flux_inductor import ops  # noqa: F401  (registers the ops)
from flux_inductor.runtime import (
    cuda_group,
    cuda_memory,
    cuda_operands,
    cuda_order,
    cuda_watchdog,
    torch_private,
)
from flux_inductor.runtime.bound import BoundCalls
from flux_inductor.runtime.cuda_memory import Need, Place
from flux_inductor.runtime.cuda_order import Notice, Order, notices_of
from flux_inductor.runtime.errors import DeadGroupError, PeerLostError, WorkspaceError
from flux_inductor.runtime.groups import state_of
from tests.runtime import cuda_stub
from tests.runtime.cuda_stub import StubGroup, StubNotices, stubbed
from tests.support.ranks import run_ranks

fused = torch.ops.flux_inductor
GROUP, PLAN = "0", "mesh push chunk=64"


@pytest.fixture
def group() -> Iterator[StubGroup]:
    with stubbed():
        yield state_of(GROUP, StubGroup)


def gather() -> None:
    fused.all_gather_matmul(torch.ones(4, 16), [torch.ones(16, 8)], [], GROUP, PLAN, 0, False)


def scatter(x: Tensor | None = None) -> None:
    x = torch.ones(4, 16) if x is None else x
    addend = torch.ones(4, 8)
    fused.matmul_reduce_scatter(x, torch.ones(16, 8), None, addend, GROUP, PLAN, 0, "avg", 1.0)


def without_memory(patch: pytest.MonkeyPatch, call: Callable[[], None]) -> None:
    def refuse(*arguments: Any) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with patch.context() as refusing:
        refusing.setattr(cuda_stub, "allocate", refuse)
        refusing.setattr(cuda_operands, "_copy", refuse)
        with pytest.raises(torch.OutOfMemoryError):
            call()


def told(group: StubGroup) -> list[Notice]:
    assert isinstance(group._notices, StubNotices)
    return group._notices.told


def hear(group: StubGroup, *notices: Notice) -> None:
    assert isinstance(group._notices, StubNotices)
    group._notices.coming += notices
    group.look()


def left_out(call: int, count: int = 1) -> Notice:
    return Notice(1, call, count, False, "it could not begin there (OutOfMemoryError)")


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The error records in which waits were ended."""
    records: list[int] = []

    class Kernels:
        end_waits = staticmethod(records.append)

    monkeypatch.setattr(cuda_group, "kernels", Kernels)
    return records


@pytest.mark.parametrize("call", [gather, scatter])
def test_after_a_call_without_memory_ranks_meet(
    call: Callable[[], None], group: StubGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that run out of memory alike may go on with less."""
    for _ in range(2):
        gather()
        scatter()
    assert len(group.compared) == 2  # both are new once
    counts = group._order.counts()
    without_memory(monkeypatch, call)
    assert group._order.counts() == [4, 1, counts[2]]  # unlike those of ranks that have begun it
    assert [(notice.call, notice.left_out, notice.dead) for notice in told(group)] == [(5, 1, False)]
    gather()
    assert len(group.compared) == 3
    gather()
    assert len(group.compared) == 3
    assert (group._order.begun, group._dead) == (6, "")


@pytest.mark.parametrize("looks", [False, True])
def test_a_call_that_is_refused_is_left_out(looks: bool, group: StubGroup) -> None:
    """Also if the rank makes no other one."""
    gather()
    state_of(GROUP, BoundCalls).refused += 2
    if looks:
        group.look()
        group.look()
    else:
        gather()
    assert [(notice.call, notice.left_out) for notice in told(group)] == [(2, 2)]
    assert (len(group.compared), group._order.counts()[:2]) == (1 + (not looks), [1 + (not looks), 2])


def test_a_copy_or_a_term_without_memory(group: StubGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(4, 17)[:, 1:]
    scatter(x)
    without_memory(monkeypatch, lambda: scatter(x))
    assert group._order.counts()[:2] == [1, 1]


def test_nothing_is_left_out_of_a_capture(group: StubGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever fails in it, nothing has run; and ranks may capture what the others do not."""
    gather()
    counts = group._order.counts()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    without_memory(monkeypatch, gather)
    run = group.workspace.all_gather_matmul
    monkeypatch.setattr(group.workspace, "all_gather_matmul", lambda *operands: 2 * run(*operands))
    gather()
    assert group._order.counts() == counts
    assert not told(group)


def test_a_capture_that_ranks_must_meet_for_records_nothing(
    group: StubGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    gather()
    without_memory(monkeypatch, gather)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(cuda_stub, "allocate", lambda *_: pytest.fail("memory was taken"))
    for call in (gather, scatter):
        with pytest.raises(ValueError, match="run the function once with the same shapes"):
            call()
    assert not group._dead


def test_a_call_that_a_peer_leaves_out_ends(
    group: StubGroup, ended: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """The peer's next call would meet this one, with other data."""
    gather()
    gather()
    with caplog.at_level(logging.ERROR, "flux_inductor"):
        hear(group, left_out(call=2))
    assert ended == [group._errors.data_ptr()]
    assert "rank 1 of group '0' does not run call 2" in caplog.text
    assert [(notice.call, notice.dead) for notice in told(group)] == [(2, True)]
    with pytest.raises(DeadGroupError, match="it could not begin there"):
        gather()


def test_a_call_that_a_peer_leaves_out_later_is_met_for(group: StubGroup, ended: list[int]) -> None:
    """Whichever comes first: the notice, or the count of the call that is being put on the device."""
    gather()
    hear(group, left_out(call=2))
    assert (ended, group._dead) == ([], "")
    group._order.begin(b"")
    group.look()
    assert len(ended) == 1


def test_ranks_that_left_out_alike_go_on(
    group: StubGroup, ended: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    gather()
    without_memory(monkeypatch, gather)
    hear(group, left_out(call=2))
    for _ in range(3):
        gather()
        group.look()
    assert (len(group.compared), ended, group._dead) == (2, [], "")
    hear(group, left_out(call=5, count=2))
    gather()
    assert len(group.compared) == 3


def test_a_meeting_ends_when_a_peer_leaves_out_what_this_rank_has_not(group: StubGroup) -> None:
    assert isinstance(group._notices, StubNotices)
    group._notices.coming.append(left_out(call=1))
    with pytest.raises(PeerLostError, match="does not run call 1"):
        group._check_peers()
    assert not group._dead  # by the meeting, which ends now


@pytest.mark.parametrize(("call", "waits"), [(1, 1), (2, 0)])
def test_a_peer_whose_group_is_dead(call: int, waits: int, group: StubGroup, ended: list[int]) -> None:
    """Waits end if they are for a call that it has not begun; those of earlier calls will be served."""
    gather()
    hear(group, Notice(1, call, 0, True, "MismatchError: other calls"))
    assert len(ended) == waits
    assert len(group._generation.failures) == 1  # type: ignore[attr-defined]
    with pytest.raises(DeadGroupError, match="MismatchError: other calls"):
        gather()


def test_waits_end_also_if_the_group_died_before_the_notice(group: StubGroup, ended: list[int]) -> None:
    gather()
    group.fail("PeerTimeoutError: ranks were missing", 2)
    hear(group, left_out(call=1))
    assert len(ended) == 1


def test_judgements() -> None:
    order = Order()
    for _ in range(3):
        order.begin(b"call")
    assert (order.in_doubt, order.judge()) == (False, ("none", None))
    order.hear([late := left_out(call=4)])
    assert (order.in_doubt, order.judge()) == (True, ("doubt", late))
    order.leave_out()
    order.settle()
    order.begin(b"call")
    assert (order.in_doubt, order.judge()) == (False, ("none", None))
    order.hear([early := left_out(call=2, count=2)])
    assert order.judge() == ("lost", early)


def _notices(rank: int, world: int) -> list[Notice]:
    """Those of every rank come in one order to all others, also while another thread waits for a key."""
    store = dist.distributed_c10d._get_default_store()  # type: ignore[attr-defined]
    notices = notices_of(store, "a", rank)
    waiting = threading.Thread(target=lambda: store.get("late"), daemon=True)
    waiting.start()
    for call in range(3):
        notices.tell(Notice(rank, call, 0, False, "why"))
    heard: list[Notice] = []
    while len(heard) < 3 * (world - 1):
        heard += notices.news()
    assert not notices.news()
    dist.barrier()
    assert cuda_order._connections
    store.set("late", "")
    waiting.join()
    return heard


def test_notices_reach_all_other_ranks() -> None:
    for rank, heard in enumerate(run_ranks(_notices, 2)):
        assert heard == [Notice(1 - rank, call, 0, False, "why") for call in range(3)]


def test_groups_may_come_while_the_watchdog_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A set that grows while it is iterated over raises, and the watchdog would be gone."""
    looks = []

    class Group:
        def look(self) -> None:
            looks.append(self)

    first, second = Group(), Group()
    adding = threading.Thread(target=cuda_watchdog.watch, args=(second,))

    class Slow(set[Group]):
        def __iter__(self) -> Iterator[Group]:
            adding.start()
            adding.join(0.05)
            yield from super().__iter__()

    monkeypatch.setattr(cuda_watchdog, "_groups", Slow([first]))
    monkeypatch.setattr(cuda_watchdog, "_thread", threading.current_thread())
    cuda_watchdog.look_at_all()
    adding.join()
    assert looks == [first]
    assert second in cuda_watchdog._groups


@pytest.mark.parametrize("signals", [0, 3, 8, 100])
def test_own_words_lie_behind_the_signals(signals: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On cache lines of their own, and all of them; everything is zero before the ranks meet again."""
    made: dict[str, Any] = {}

    class Kernels:
        allow_beside_captures = staticmethod(lambda: None)
        symmetric_signals = staticmethod(lambda count: 16 + 2 * count)
        own_words = staticmethod(lambda counters: 33 + counters)

        def Workspace(self, **arguments: Any) -> object:
            made.update(arguments)
            return self

    def empty(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.full((count,), 7, dtype=dtype)

    monkeypatch.setattr(cuda_memory, "kernels", Kernels())
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch_private, "symmetric_empty", empty)
    monkeypatch.setattr(torch_private, "symmetric_addresses", lambda tensor, group: [tensor.data_ptr()])
    met: list[str] = []

    def meet(text: str) -> list[str]:
        met.append(text)
        return [text]

    device = torch.device("cuda", 0)
    place = Place("0", 0, 1, device, torch.zeros(24, dtype=torch.uint8), 1, meet)
    memory = cuda_memory.make_memory(place, Need(64, signals, counters=5))
    assert met == ["", ""]
    offset = made["own_words"] - memory.signals.data_ptr()
    assert offset % 128 == 0
    assert offset >= 8 * (16 + 2 * signals)
    assert memory.own_words.data_ptr() == made["own_words"]
    assert memory.own_words.numel() == 38
    assert not memory.signals.any()


def test_a_workspace_that_does_not_come_up_on_one_rank_comes_up_on_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Kernels:
        allow_beside_captures = staticmethod(lambda: None)
        symmetric_signals = own_words = staticmethod(lambda count: 16)

        def Workspace(self, **arguments: Any) -> object:
            raise RuntimeError("copy stream: out of memory")

    monkeypatch.setattr(cuda_memory, "kernels", Kernels())
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(
        torch_private, "symmetric_empty", lambda count, dtype, device: torch.empty(count, dtype=dtype)
    )
    monkeypatch.setattr(torch_private, "symmetric_addresses", lambda tensor, group: [0])
    told: list[str] = []

    def meet(text: str) -> list[str]:
        told.append(text)
        return ["", text]

    device = torch.device("cuda", 0)
    place = Place("0", 0, 2, device, torch.zeros(24, dtype=torch.uint8), 1, meet)
    with pytest.raises(WorkspaceError, match="on rank 1: RuntimeError: copy stream: out of memory"):
        cuda_memory.make_memory(place, Need(64, 1, 1))
    assert told == ["", "RuntimeError: copy stream: out of memory"]  # the others wait for this


def test_memory_is_made_in_no_pool_and_no_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools belong to a thread or to its stream, modes to a thread."""
    here = threading.get_ident()

    class Kernels:
        allow_beside_captures = staticmethod(lambda: None)

    monkeypatch.setattr(cuda_memory, "kernels", Kernels)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    with torch.inference_mode():
        made, there = cuda_memory.outside_of_pools(
            torch.device("cuda", 0), lambda: (torch.zeros(1), threading.get_ident())
        )
    assert there != here
    assert not made.is_inference()

    def refuse() -> None:
        raise MemoryError("none left")

    with pytest.raises(MemoryError, match="none left"):
        cuda_memory.outside_of_pools(torch.device("cuda", 0), refuse)
