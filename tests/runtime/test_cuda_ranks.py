"""What real ranks on the CUDA engine tell each other on the host; on CPU tensors, without kernels."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from flux_inductor import ops  # noqa: F401  (registers the ops)
from flux_inductor.runtime import cuda_group, cuda_watchdog, torch_private
from flux_inductor.runtime.cuda_group import CudaGroup
from flux_inductor.runtime.engine import standing_in
from flux_inductor.runtime.errors import DeadGroupError, FusedOpError
from flux_inductor.runtime.generation import Generation
from flux_inductor.runtime.groups import name_of, state_of
from tests.runtime import cuda_stub
from tests.runtime.cuda_stub import StubGroup, stub_engine
from tests.support.ranks import run_ranks

fused = torch.ops.flux_inductor
SOON_S = 2.0
ended: list[int] = []  # records in which waits were ended


class MeetingGroup(StubGroup):
    """Ranks that meet indeed."""

    def __init__(self, name: str, group: dist.ProcessGroup) -> None:
        super().__init__(name, group)
        self.limit_s = torch_private.timeout(group, "cpu").total_seconds()
        self._generation = Generation("cuda", torch_private.store(group), self.rank, self.world)
        self._notices = None
        cuda_watchdog.watch(self)

    def _compare(self, descriptor: str) -> None:
        CudaGroup._compare(self, descriptor)

    def close(self) -> None:
        self._over = True
        self._generation.leave()


def gather(group: str, rows: int = 4) -> None:
    fused.all_gather_matmul(
        torch.ones(rows, 16), [torch.ones(16, 8)], [], group, "mesh push chunk=64", 0, False
    )


def without_memory(call: Callable[[], None]) -> None:
    def refuse(*arguments: object) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_stub, "allocate", refuse)
        with pytest.raises(torch.OutOfMemoryError):
            call()


def wait_until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SOON_S
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def one_leaves_out(rank: int, group: str) -> None:
    """Rank 1 is in the call, on the device, that rank 0 leaves out."""
    gather(group)
    dist.barrier()
    start = time.monotonic()
    if rank == 0:
        without_memory(lambda: gather(group))
        with pytest.raises(DeadGroupError):
            gather(group)
        assert not ended
    else:
        gather(group)
        wait_until(lambda: bool(ended))
    with pytest.raises(DeadGroupError, match="OutOfMemoryError"):
        gather(group)
    assert time.monotonic() - start < SOON_S


def one_leaves_out_early(rank: int, group: str) -> None:
    """Rank 1 hears of it before its call, or meets rank 0 in another one: nothing of it is begun."""
    for rows in (4, 8):
        name = name_of(dist.new_group()) if rows == 8 else group
        gather(name)
        dist.barrier()
        if rank == 0:
            without_memory(lambda: gather(name, rows))  # noqa: B023
        if rows == 4:
            dist.barrier()
            time.sleep(3 * cuda_watchdog.PERIOD_S)
        start = time.monotonic()
        with pytest.raises(FusedOpError, match=r"does not run call 2|after 1 that failed|before it began"):
            gather(name, rows)
        assert time.monotonic() - start < SOON_S
        assert state_of(name, MeetingGroup)._order.begun == 1
    assert not ended


def all_leave_out(rank: int, group: str) -> None:
    gather(group)
    for _ in range(3):
        without_memory(lambda: gather(group))
        time.sleep(0.3 * rank)
        for _ in range(2):
            gather(group)
        time.sleep(2 * cuda_watchdog.PERIOD_S)
    assert state_of(group, MeetingGroup)._order.counts()[:2] == [7, 3]
    assert not ended


def one_fails_alone(rank: int, group: str) -> None:
    """A rank that waited in vain makes the group anew with the others, under its name and in its store."""
    store = dist.distributed_c10d._get_default_store()  # type: ignore[attr-defined]
    for limit_s in (1, 20):
        local = dist.new_group([0, 1], timeout=timedelta(seconds=limit_s), use_local_synchronization=True)
        assert isinstance(local, dist.ProcessGroup)
        name = local.group_name
        if limit_s == 1 and rank == 0:
            with pytest.raises(FusedOpError, match=r"ranks \[1\]"):
                gather(name)
        dist.barrier()
        if limit_s == 20:
            for _ in range(3):
                gather(name)
        dist.barrier()
        dist.destroy_process_group(local)
        del local
        gc.collect()
        dist.barrier()
        store.delete_key(f"{name}//cpu//0/{rank}")  # gloo would connect to the peer's old address
        dist.barrier()


def _run(rank: int, world: int, body: Callable[[int, str], None]) -> None:
    with standing_in("cpu", stub_engine(MeetingGroup)), pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_group, "kernels", SimpleNamespace(end_waits=ended.append))
        body(rank, name_of(None))
        dist.barrier()


@pytest.mark.parametrize("body", [one_leaves_out, one_leaves_out_early, all_leave_out, one_fails_alone])
def test_ranks_that_fail_before_a_call(body: Callable[[int, str], None]) -> None:
    run_ranks(_run, 2, body, timeout=60)
