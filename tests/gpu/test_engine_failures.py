"""The CUDA engine where one rank fails, or uses another device: what the others see, and how soon."""

from __future__ import annotations

import gc
import os
import time
from contextlib import suppress
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from flux_inductor.runtime.errors import DeadGroupError, FusedOpError
from tests.gpu.engine_calls import Gather, GatherCall, Scatter, make
from tests.support.gpu_ranks import nccl_group, needs_two_gpus, run_gpu_ranks

pytestmark = needs_two_gpus

SOON_S = 3.0  # for a notice to reach the other ranks: far below the limit of the groups
LIMIT_S = 30.0
LARGE = Gather((65536, 256), (8192,), plan="mesh push chunk=16384")  # a product of 2 GiB


def _no_memory(call: GatherCall) -> None:
    """The call on a device that has room for half of its product."""
    torch.cuda.empty_cache()
    room = torch.cuda.memory_reserved() + (1 << 30)
    torch.cuda.set_per_process_memory_fraction(room / torch.cuda.mem_get_info()[1])
    with pytest.raises(torch.OutOfMemoryError):
        call()
    torch.cuda.set_per_process_memory_fraction(1.0)


def _memory_of_one_rank(rank: int, world: int) -> None:
    """Its next call must not meet the one that it has left out, which has the same sizes and other data."""
    group = nccl_group(world, seconds=LIMIT_S)
    first, second = GatherCall(LARGE, group), GatherCall(LARGE, group)
    first()
    torch.cuda.synchronize()
    dist.barrier()
    start = time.monotonic()
    if rank == 0:
        _no_memory(first)
        with pytest.raises(DeadGroupError):
            second()
        with pytest.raises(DeadGroupError, match="failed before"):
            second()
    else:
        first()
        with pytest.raises(RuntimeError, match="CUDA"):
            torch.cuda.synchronize()
        with pytest.raises(DeadGroupError, match="OutOfMemoryError"):
            second()
    assert time.monotonic() - start < SOON_S
    dist.barrier()


def test_a_rank_without_memory_ends_the_call_of_the_others() -> None:
    run_gpu_ranks(_memory_of_one_rank)


def _memory_of_all_ranks(rank: int, world: int) -> None:
    """All leave out the same call, as programs do that try a smaller batch: the group lives on."""
    group = nccl_group(world, seconds=LIMIT_S)
    large, small = GatherCall(LARGE, group), make(Scatter((512, 256), 768), group)
    (expected,), (part,) = large(), small()
    for _ in range(3):
        _no_memory(large)
        assert torch.equal(small()[0], part)
    time.sleep(0.6)  # the watchdogs have heard of it
    assert torch.equal(large()[0], expected)


def test_ranks_without_memory_alike_go_on() -> None:
    run_gpu_ranks(_memory_of_all_ranks)


def _not_begun(rank: int, world: int) -> None:
    """Rank 1 hears of it before its call: no wait of a kernel has to end, and no context is lost."""
    group = nccl_group(world, seconds=LIMIT_S)
    call = GatherCall(LARGE, group)
    call()
    torch.cuda.synchronize()
    dist.barrier()
    if rank == 0:
        _no_memory(call)
    dist.barrier()
    time.sleep(0.6)
    if rank == 0:
        with pytest.raises(DeadGroupError):
            call()
    else:
        with pytest.raises(FusedOpError, match=r"does not run call 2|after 1 that failed"):
            call()
    other = make(Gather((256, 512), (768,)), nccl_group(world))
    other()
    torch.cuda.synchronize()


def test_a_call_that_a_peer_left_out_is_not_begun() -> None:
    run_gpu_ranks(_not_begun)


def _made_anew(rank: int, world: int) -> None:
    """Rank 1 never uses the first making of the group."""
    for seconds in (3, 30):
        group = dist.new_group(
            list(range(world)),
            timeout=timedelta(seconds=seconds),
            backend="nccl",
            use_local_synchronization=True,
        )
        assert isinstance(group, dist.ProcessGroup)
        name = group.group_name
        dist.barrier()
        call = make(Gather((256, 512), (768,)), name)
        if seconds == 3 and rank == 0:
            with pytest.raises(RuntimeError, match=r"rank(s|) \[?1"):
                call()
        if seconds != 3:
            call()
            torch.cuda.synchronize()
        dist.barrier()
        dist.destroy_process_group(group)
        del group
        gc.collect()


def test_a_group_that_failed_on_one_rank_is_made_anew() -> None:
    run_gpu_ranks(_made_anew)


def _other_device(rank: int, world: int) -> None:
    """The current device at the first call is another one than that of the tensors."""
    calls = [make(case, nccl_group(world)) for case in (Gather((256, 512), (768,)), Scatter((512, 256), 768))]
    torch.cuda.set_device(0)
    first = [call() for call in calls]
    torch.cuda.set_device(rank)
    for call, results in zip(calls, first, strict=True):
        assert results[0].device.index == rank
        assert all(map(torch.equal, call(), results))


def test_the_device_is_that_of_the_tensors() -> None:
    run_gpu_ranks(_other_device)


def _stale_error(rank: int, world: int) -> None:
    """An error of somebody else's earlier call is not taken for that of a fused op, nor left to others."""
    call = make(Gather((256, 512), (768,)), nccl_group(world))
    expected = call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()  # later eager calls begin with a small kernel
    torch.cuda.synchronize()
    cudart = torch.cuda.cudart()
    assert cudart.cudaHostUnregister(12345) != cudart.cudaError.success
    results = call()
    with suppress(RuntimeError):  # torch, at its own next kernel
        torch.zeros(1, device="cuda")
    assert all(map(torch.equal, results, expected))
    graph.replay()
    assert all(map(torch.equal, captured, expected))


def test_errors_of_others_are_not_those_of_a_call() -> None:
    run_gpu_ranks(_stale_error)


def _many_groups(rank: int, world: int, turns: int) -> None:
    left = []
    for turn in range(turns):
        group = dist.new_group(list(range(world)), backend="nccl")
        assert isinstance(group, dist.ProcessGroup)
        make(Gather((64, 256), (256,), plan="mesh push chunk=64"), group.group_name)()
        torch.cuda.synchronize()
        dist.barrier()
        dist.destroy_process_group(group)
        del group
        gc.collect()
        torch.cuda.empty_cache()
        if turn >= 4:
            left.append(torch.cuda.mem_get_info()[0])
    dist.barrier()
    assert left[0] - left[-1] < (4 << 20), (left[0] - left[-1]) / len(left)


def test_groups_that_come_and_go_leave_no_memory() -> None:
    run_gpu_ranks(_many_groups, int(os.environ.get("FLUX_INDUCTOR_TEST_GROUPS", "40")), timeout=600)
