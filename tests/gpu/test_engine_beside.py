"""The CUDA engine and what goes on around it: other communication, the end of a group, old signals."""

from __future__ import annotations

import ctypes
import os
import random
import time

import pytest
import torch
import torch.distributed as dist

import flux_inductor
from flux_inductor.runtime.cuda_group import CudaGroup
from flux_inductor.runtime.cuda_memory import CudaMemory
from flux_inductor.runtime.groups import state_of
from flux_inductor.runtime.torch_private import process_group
from tests.gpu.engine_calls import Case, Gather, Scatter, make
from tests.support.gpu_ranks import nccl_group, needs_two_gpus, run_gpu_ranks

pytestmark = needs_two_gpus

ITERATIONS = 500


def _beside_nccl(rank: int, world: int, reserve: str) -> None:
    """Another group's collectives on another stream, as FSDP's beside tensor parallelism, in both orders."""
    group, other = nccl_group(world), dist.new_group(list(range(world)), backend="nccl")
    cases: list[Case] = [
        Gather((2048, 2048), (4096,), plan=f"mesh push chunk=512{reserve}"),
        Scatter((4096, 2048), 4096, plan=f"mesh push chunk=1024{reserve}"),
        Gather((1024, 2048), (2048, 1024), keep=True, plan=f"mesh push chunk=512{reserve}"),
        Scatter((2048, 2048), 2048, plan=f"mesh store chunk=512{reserve}"),
    ]
    calls = [make(case, group) for case in cases]
    expected = [call() for call in calls]
    beside = torch.cuda.Stream()
    shard = torch.full((4 << 20,), float(rank + 1), device="cuda")
    whole, part = torch.zeros(world * shard.numel(), device="cuda"), torch.zeros_like(shard)
    dist.all_gather_into_tensor(whole, shard, group=other)  # NCCL's own set-up, before anything waits
    dist.reduce_scatter_tensor(part, whole, group=other)
    torch.cuda.synchronize()
    wrong = torch.zeros((), device="cuda", dtype=torch.int64)
    for turn in range(ITERATIONS):
        with torch.cuda.stream(beside):
            # Ranks see the two streams in different orders: one has the collective first, the other second.
            if (turn + rank) % 2:
                torch.cuda._sleep(100_000)
            dist.all_gather_into_tensor(whole, shard, group=other)
            dist.reduce_scatter_tensor(part, whole, group=other)
        index = turn % len(calls)
        for result, known in zip(calls[index](), expected[index], strict=True):
            wrong += (result != known).any()
    torch.cuda.synchronize()
    assert wrong.item() == 0
    assert torch.equal(part, torch.full_like(part, world * (rank + 1.0)))


@pytest.mark.parametrize("reserve", ["", " reserve=8"])
def test_beside_collectives_of_another_group(reserve: str) -> None:
    run_gpu_ranks(_beside_nccl, reserve, timeout=90)


def _destroyed(rank: int, world: int) -> None:
    """A group may be destroyed while its last call runs: its memory is freed when that has ended."""
    for case in (Gather((2048, 1024), (2048,)), Scatter((2048, 1024), 1024, plan="mesh store chunk=512")):
        group = dist.new_group(list(range(world)), backend="nccl")
        assert isinstance(group, dist.ProcessGroup)
        call = make(case, group.group_name)
        expected = call()
        torch.cuda.synchronize()
        torch.cuda._sleep(20_000_000 * rank)
        results = call()
        dist.destroy_process_group(group)
        del group
        taken = [torch.full((8 << 20,), torch.nan, device="cuda") for _ in range(8)]
        torch.cuda.synchronize()
        assert all(map(torch.equal, results, expected)), len(taken)
        dist.barrier()


def test_a_group_destroyed_during_a_call() -> None:
    run_gpu_ranks(_destroyed)


def _old_signals(rank: int, world: int) -> None:
    """Signals that no call has used for billions of calls do not look like the future.

    The small calls use the first signals alone; between, now and then, a large one whose chunks come late
    must not take the signals of its predecessor for its own.
    """
    name = nccl_group(world)
    small = make(Gather((64, 256), (256,), plan="mesh push chunk=64"), name)
    large = make(Gather((2048, 1024), (512,), plan="mesh push chunk=64"), name)
    expected = small(), large(), large()
    values = large.x.clone()
    memory = state_of(name, CudaGroup)._memory
    assert memory is not None
    for jump in range(1, 10):
        torch.cuda.synchronize()
        dist.barrier()
        for epoch in epochs(memory):
            epoch += 1 << 29
        torch.cuda.synchronize()
        dist.barrier()
        for _ in range(3):
            assert all(map(torch.equal, small(), expected[0]))
        if jump in (5, 9):
            for _ in range(2):  # both sets
                large.x.neg_()
                if rank == 1:
                    time.sleep(0.02)
                    torch.cuda._sleep(20_000_000)
                (result,) = large()
                sign = 1 if torch.equal(large.x, values) else -1
                assert torch.equal(result, sign * expected[1][0]), (jump, sign)


def epochs(memory: CudaMemory) -> list[torch.Tensor]:
    """Those of a workspace's two sets of words (csrc/cuda/host/workspace.h), which agree with each other."""
    line = 32  # words
    per_set = (memory.own_words.numel() - line) // 2
    found = [memory.own_words[line + turn * per_set :][:2].view(torch.int64) for turn in (0, 1)]
    assert abs(int(found[0]) - int(found[1])) == 1, found
    return found


def test_old_signals_do_not_look_like_the_future() -> None:
    run_gpu_ranks(_old_signals)


def _overwritten(rank: int, world: int) -> None:
    """What a call reads may be overwritten by whatever follows it on the stream (rule R8).

    Rank 1 comes late, so that all that it waits for is there; its kernel has little to do, and its own copies
    take far longer.
    """
    name = nccl_group(world)
    for case in (Gather((8192, 4096), (8,)), Scatter((2 * 4096, 64), 8192)):
        call = make(case, name)
        values = call.x.clone()
        expected = call()
        for _ in range(5):
            if rank == 1:
                torch.cuda._sleep(2_000_000)
            results = call()
            # Also in the place of a scatter's partials, which were freed when the call returned.
            others = [torch.full((4096, 8192), torch.nan, device="cuda").bfloat16() for _ in range(2)]
            call.x.fill_(torch.nan)
            torch.cuda.synchronize()
            assert all(map(torch.equal, results, expected)), (case, len(others))
            call.x.copy_(values)
            del others


def test_operands_may_be_overwritten_after_the_call() -> None:
    run_gpu_ranks(_overwritten)


def _destroyed_stream(rank: int, world: int) -> None:
    """Calls on streams of another library, which destroys each after the call, perhaps while it runs."""
    call = make(Gather((512, 1024), (768,)), nccl_group(world, seconds=20))
    expected = call()
    torch.cuda.synchronize()
    cudart, handle = torch.cuda.cudart(), ctypes.c_void_p()
    for turn in range(6):
        assert cudart.cudaStreamCreate(ctypes.addressof(handle)) == cudart.cudaError.success
        with torch.cuda.stream(torch.cuda.ExternalStream(handle.value)):
            torch.cuda._sleep(2_000_000)
            results = [call(), call()]
        if turn % 2:
            torch.cuda.synchronize()
        assert cudart.cudaStreamDestroy(handle.value) == cudart.cudaError.success
        if turn % 3:
            results.append(call())
        torch.cuda.synchronize()
        for result in results:
            assert all(map(torch.equal, result, expected))


def test_a_stream_may_be_destroyed_after_the_call() -> None:
    run_gpu_ranks(_destroyed_stream)


def _wait_position(rank: int, world: int) -> None:
    """Rank 0 waits for an all_reduce of the same group behind a fused op, rank 1 before it (rule R2)."""
    name = nccl_group(world, seconds=20)
    group, values = process_group(name), torch.ones(1 << 20, device="cuda")
    x = torch.randn(4096, 4096, device="cuda").bfloat16()
    w = (torch.randn(8192, 4096, device="cuda") / 64).bfloat16().t()
    dist.all_reduce(values, group=group)

    def product() -> torch.Tensor:
        result = flux_inductor.all_gather_matmul(x, w, name)
        assert isinstance(result, torch.Tensor)
        return result

    expected = product()
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    for _ in range(20):
        dist.barrier()
        with torch.cuda.stream(side):
            if rank == 0:
                torch.cuda._sleep(17_000_000)  # so that the fused kernel is first here
            work = dist.all_reduce(values, group=group, async_op=True)
        if rank == 1:
            work.wait()
        result = product()
        if rank == 0:
            work.wait()
        torch.cuda.synchronize()
        assert torch.equal(result, expected)


def test_a_collective_of_the_group_in_flight() -> None:
    run_gpu_ranks(_wait_position)


def _stress(rank: int, world: int, calls: int) -> None:
    """Two groups, asynchronous plain collectives of both in flight, ranks and hosts delayed at random."""
    names = [nccl_group(world, seconds=60) for _ in range(2)]
    cases: list[Case] = [
        Gather((1024, 1024), (2048,), plan="mesh push chunk=256 reserve=16"),
        Scatter((2048, 1024), 2048, plan="mesh push chunk=512 reserve=16"),
        Scatter((2048, 1024), 2048, plan="mesh store chunk=512 reserve=16"),
    ]
    prepared = [[make(case, name) for case in cases] for name in names]
    expected = [[call() for call in calls_of] for calls_of in prepared]
    values = [torch.zeros(1 << 18, device="cuda") for _ in names]
    for name, value in zip(names, values, strict=True):
        dist.all_reduce(value, group=process_group(name))
    torch.cuda.synchronize()
    wrong = torch.zeros((), device="cuda", dtype=torch.int64)
    order, mine = random.Random(5), random.Random(rank)
    side = [torch.cuda.Stream() for _ in names]
    flying: list[dist.Work | None] = [None, None]
    for _ in range(calls):
        which, index = order.randrange(2), order.randrange(len(cases))
        if order.random() < 0.4:  # ranks wait for the last one in different places
            other = order.randrange(2)
            if (last := flying[other]) is not None:
                last.wait()
            with torch.cuda.stream(side[other]):
                if mine.random() < 0.2:
                    torch.cuda._sleep(mine.randrange(500_000))
                work = dist.all_reduce(values[other], group=process_group(names[other]), async_op=True)
            flying[other] = work
            if mine.random() < 0.5:
                work.wait()
        if mine.random() < 0.05:
            torch.cuda._sleep(mine.randrange(500_000))
        for result, known in zip(prepared[which][index](), expected[which][index], strict=True):
            wrong += (result != known).any()
        if mine.random() < 0.01:
            time.sleep(mine.random() * 0.005)
    torch.cuda.synchronize()
    assert wrong.item() == 0


def test_two_groups_beside_collectives_of_both() -> None:
    run_gpu_ranks(_stress, int(os.environ.get("FLUX_INDUCTOR_TEST_CALLS", "2000")), timeout=600)
