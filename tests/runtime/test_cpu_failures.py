"""Every wait ends: ranks that die, come late, differ or run out of memory give errors, never a hang."""

from __future__ import annotations

import os
import re
import resource
import signal
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from flux_inductor.planning.plan import Plan
from flux_inductor.runtime import cpu_group, errors, rendezvous
from flux_inductor.runtime.cpu import CpuEngine
from flux_inductor.runtime.groups import name_of
from tests.support.engines import all_gather_matmul, matmul_reduce_scatter
from tests.support.ranks import run_ranks

GROUP = "0"
PUSH, PULL = Plan("mesh", "push", 4), Plan("mesh", "pull", 4)
QUICK_S = 5.0  # far below the timeout of the groups here


def gather(rows: int = 8, plan: Plan = PUSH, group: str = GROUP) -> None:
    all_gather_matmul(CpuEngine(), torch.ones(rows, 4), [torch.ones(4, 4)], [], group, plan, 0, False)


def scatter(rows: int = 12, plan: Plan = PUSH, group: str = GROUP) -> None:
    x, weight = torch.ones(rows, 4), torch.ones(4, 4)
    matmul_reduce_scatter(CpuEngine(), x, weight, None, None, group, plan, 0, "sum", 1.0)


def failure(
    op: Callable[..., None], rows: int = 8, plan: Plan = PUSH, group: str = GROUP, calls: int = 1
) -> tuple[str, str, float]:
    """(class, message, seconds) of the error that one of the calls raises."""
    start = time.monotonic()
    for _ in range(calls):
        try:
            op(rows, plan, group)
        except errors.FusedOpError as error:
            return type(error).__name__, str(error), time.monotonic() - start
    raise AssertionError(f"{op.__name__} raised no error")


def fresh_group(limit_s: float = 30) -> str:
    """A new group of all ranks: one failure after the other in one set of processes."""
    group = dist.new_group(timeout=timedelta(seconds=limit_s))
    return name_of(group)


def shared_files() -> set[str]:
    """Names in /dev/shm but for the locks of Python's multiprocessing, which runs the ranks."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}


# ---------------------------------------------------------------- ranks that differ


def differing(rank: int, world: int) -> None:
    last = world - 1
    if world == 4:
        cpu_group.INLINE_BYTES = 0  # the transfer thread waits, too

    def expect(words: list[str], op: Callable[..., None], plan: Plan, group: str, rows: int = 8) -> None:
        kind, message, seconds = failure(op, rows, plan, group)
        assert kind == "MismatchError", message
        assert seconds < QUICK_S
        assert f"rank {rank}" in message
        for word in words:
            assert word in message, (word, message)

    for warm in (False, True):  # before and after the group has met
        for plan in (PUSH, PULL):
            group = fresh_group()
            if warm:
                gather(plan=plan, group=group)
            two = [
                "all_gather_matmul of torch.float32 [1, 8, 4]",
                "matmul_reduce_scatter (sum) of torch.float32 [1, 8, 4]",
            ]
            expect(two, scatter if rank == last else gather, plan, group)
            kind, message, _ = failure(gather, group=group)
            assert kind == "DeadGroupError"
            assert "failed before: MismatchError" in message
            assert "make it anew" in message

            group = fresh_group()
            if warm:
                scatter(plan=plan, group=group)
            rows = 4096 if rank == last else 8  # one rank's workspace must grow, the others' need not
            expect(["[1, 8, 4]", "[1, 4096, 4]"], scatter, plan, group, rows)

        group = fresh_group()
        if warm:
            gather(group=group)
        plan = Plan("mesh", "pull", 2) if rank == last else PULL
        expect(["mesh pull chunk=4", "mesh pull chunk=2"], gather, plan, group)


@pytest.mark.parametrize("world", [2, 4])
def test_another_op_shape_or_plan_on_one_rank_is_an_error_on_all(world: int) -> None:
    run_ranks(differing, world, timeout=120)


# ---------------------------------------------------------------- ranks that are late


def late(rank: int, world: int) -> None:
    for warm, inline_bytes in ((False, 0), (True, 0), (True, 1 << 16)):
        cpu_group.INLINE_BYTES = inline_bytes
        group = fresh_group(limit_s=1)
        if warm:
            scatter(plan=PULL, group=group)
        if rank == 1:
            time.sleep(3)
        kind, message, seconds = failure(scatter, plan=PULL, group=group)
        assert kind == "PeerTimeoutError", message
        assert f"matmul_reduce_scatter on rank {rank} of group '{group}'" in message
        if rank == 0:
            assert 0.9 < seconds < 2.5
            if warm:
                assert "for chunk 0 of rank 0's shard from rank 1" in message
                assert re.search(r"shows epoch [01], expected 2", message), message
                assert "raise the timeout of the process group" in message
            else:
                assert "waited 1 s for ranks [1]" in message
        else:
            assert "rank 0 failed: PeerTimeoutError" in message
            assert seconds < 1
        dist.barrier()


def test_a_late_rank_is_waited_for_up_to_the_time_out() -> None:
    run_ranks(late, 2)


# ---------------------------------------------------------------- ranks that die


def killed_at_rest(rank: int, world: int) -> tuple[str, str, float]:
    gather()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return failure(gather, calls=3)  # what it pushed before its end may serve the first


def killed_at_work(rank: int, world: int) -> tuple[str, str, float]:
    cpu_group.INLINE_BYTES = 0
    scatter(plan=PULL)
    if rank == 1:
        torch.mm = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    return failure(scatter, 12, PULL)


@pytest.mark.parametrize("victim", [killed_at_rest, killed_at_work])
def test_the_death_of_a_rank_is_noticed_at_once(victim: Callable[..., object]) -> None:
    before = shared_files()
    results = run_ranks(victim, 3, dying=[1])
    assert results[1] is None
    for rank in (0, 2):
        kind, message, seconds = results[rank]
        assert kind == "PeerLostError", message
        assert "rank 1 has ended" in message
        assert "expected" in message
        assert seconds < QUICK_S
    assert shared_files() == before


def told(rank: int, world: int) -> None:
    """What a peer tells of its failure while ranks meet, of whatever class, names this rank and its op."""
    for kind in ("MismatchError", "PeerLostError"):
        group = fresh_group()
        with pytest.MonkeyPatch.context() as patch:

            def exchange(*_: object, kind: str = kind) -> None:
                raise errors.peer_failure(1 - rank, f"{kind}: it did something else")

            patch.setattr(rendezvous, "exchange", exchange)
            found, message, _ = failure(gather, group=group)
        assert found == kind
        assert message.startswith(f"all_gather_matmul on rank {rank} of group {group!r}: rank {1 - rank} "), (
            message
        )
        assert "it did something else" in message


def test_a_failure_that_a_peer_tells_names_the_own_rank_and_op() -> None:
    run_ranks(told, 2)


def failing(rank: int, world: int) -> None:
    """An error in the middle of a rank's call ends the peers' calls with its text."""
    gather()
    if rank == 0:
        kind, message, seconds = failure(gather, calls=2)  # the first has all it needs of rank 1
        assert kind == "FusedOpError"
        assert "rank 1 failed: RuntimeError: it cannot be multiplied" in message
        assert seconds < QUICK_S
    else:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "mm", _refuse)
            with pytest.raises(RuntimeError, match="cannot be multiplied"):
                gather()


def _refuse(*_: object, **__: object) -> None:
    raise RuntimeError("it cannot be multiplied")


def interrupted(rank: int, world: int) -> None:
    """Ctrl-C ends a wait."""
    group = fresh_group()
    gather(group=group)
    if rank == 0:
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            gather(group=group)
        assert time.monotonic() - start < QUICK_S
    else:
        time.sleep(1)
        kind, message, _ = failure(gather, group=group)
        assert kind == "FusedOpError"
        assert "rank 0 failed: KeyboardInterrupt" in message


def no_memory(rank: int, world: int) -> None:
    """Too little memory on one rank is an error with the remedy on all, at the first call and at growth."""
    for warm in (False, True):
        group = fresh_group()
        if warm:
            gather(group=group)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
        kind, message, seconds = failure(gather, 1 << 14, group=group)
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert kind == "WorkspaceError", message
        assert "bytes" in message
        assert "raise the memory limit" in message
        assert "FLUX_INDUCTOR_ENGINE=reference" in message
        assert seconds < QUICK_S


def in_trouble(rank: int, world: int) -> None:
    failing(rank, world)
    interrupted(rank, world)
    no_memory(rank, world)


def test_errors_interrupts_and_lack_of_memory_on_one_rank_reach_the_other() -> None:
    run_ranks(in_trouble, 2)
