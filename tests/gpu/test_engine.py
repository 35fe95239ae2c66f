"""The CUDA engine on two real ranks: results, order, delays, errors."""

from __future__ import annotations

import os
import random
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from flux_inductor.planning.ops import MATMUL_REDUCE_SCATTER, OPS
from flux_inductor.planning.problem import Problem
from flux_inductor.planning.sm90 import all_gather_matmul, matmul_reduce_scatter
from flux_inductor.planning.sm90.fit import menu_of
from flux_inductor.runtime.cuda_kernels import compiled_variants, menu
from flux_inductor.runtime.errors import DeadGroupError, MismatchError, PeerTimeoutError
from tests.gpu.engine_calls import Case, Gather, GatherCall, Scatter, error, make
from tests.support.gpu_ranks import nccl_group, needs_two_gpus, run_gpu_ranks

pytestmark = needs_two_gpus

TALL = "mesh push chunk=4096"
STORE = "mesh store chunk=512"
CASES: list[Case] = [
    Gather((512, 1024), (768,)),
    Gather((500, 1032), (392, 1288), bias=True),
    Gather((3, 200, 512), (640,), dim=1),
    Gather((3, 200, 512), (640, 320), dim=1, keep=True),
    Gather((1024, 2048), (1024,), keep=True, bias=True),
    Gather((1, 64), (8,)),
    Gather((2048, 512), (4096,), plan=TALL),
    Gather((2, 300, 512), (640, 1288, 320), dim=1, keep=True, bias=True),
    Gather((1000, 1032), (392, 400), keep=True, plan="mesh push chunk=256 reserve=8"),
    Scatter((1024, 512), 768),
    Scatter((1000, 520), 1288, bias=True, addend=True, scale=0.5),
    Scatter((3, 400, 512), 640, dim=1, addend=True),
    Scatter((1024, 512), 768, mean=True),
    Scatter((1024, 512), 768, mean=True, bias=True),
    Scatter((2, 64), 8),
    Scatter((4096, 1024), 2048, plan=TALL),
    Scatter((1024, 512), 768, plan="mesh push chunk=256 reserve=8"),
    Scatter((1024, 512), 768, plan=STORE),
    Scatter((1000, 520), 1288, bias=True, addend=True, scale=0.5, plan=STORE),
    Scatter((3, 400, 512), 640, dim=1, addend=True, plan=STORE + " reserve=8"),
    Scatter((1024, 512), 768, mean=True, bias=True, plan=STORE),
    Scatter((2, 64), 8, plan=STORE),
    Scatter((4096, 1024), 2048, plan="mesh store chunk=4096"),
    Scatter((4096, 264), 8192, addend=True, plan=STORE),  # so large that own tiles take turns with the peer's
    Scatter((1024, 512), 768, result=torch.float32),
    Scatter((1000, 520), 1288, result=torch.float32, bias=True, addend=True, scale=0.5, plan=STORE),
    Scatter((3, 400, 512), 640, dim=1, result=torch.float32, addend=True, mean=True),
    Scatter((4096, 264), 8192, result=torch.float32, wide_terms=True, bias=True, addend=True, plan=STORE),
]


def test_every_tile_that_plans_may_name_was_compiled() -> None:
    for dtype, _ in compiled_variants():
        for op in OPS:
            for result in ("", "fp32") if op == MATMUL_REDUCE_SCATTER else ("",):
                problem = Problem(op, 2, 1, 64, (64,), 64, dtype, result=result)
                assert menu(problem) == menu_of(problem)


def variants() -> list[Case]:
    """Every case for each dtype and layout that was compiled."""
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return [
        replace(case, dtype=dtypes[dtype], transposed=layout == "k_major")
        for dtype, layout in compiled_variants()
        for case in CASES
    ]


def _results(rank: int, world: int) -> None:
    group = nccl_group(world)
    for case in variants():
        call = make(case, group)
        first, again = call(), call()
        for result, repeated, unfused, exact in zip(first, again, call.unfused(), call.exact(), strict=True):
            assert result.shape == exact.shape, case
            assert result.is_contiguous(), case
            assert torch.equal(result, repeated), f"{case}: results differ from run to run"
            ours, theirs = error(result, exact), error(unfused, exact)
            assert ours <= 2 * theirs + 1e-6, f"{case}: error {ours:.2e}, unfused {theirs:.2e}"


def test_results_against_fp64() -> None:
    run_gpu_ranks(_results)


def _mean_of_large_terms(rank: int, world: int) -> None:
    x = torch.zeros(256, 64, device="cuda", dtype=torch.float16)
    bias, addend = x.new_full((512,), 20000.0), x.new_full((256, 512), 30000.0)
    arguments = (nccl_group(world), "mesh push chunk=64", 0, "avg", 1.0)
    result = torch.ops.flux_inductor.matmul_reduce_scatter(x, x.new_zeros(64, 512), bias, addend, *arguments)
    assert result.eq(50000.0).all()


def test_a_mean_does_not_overflow_where_its_sum_would() -> None:
    run_gpu_ranks(_mean_of_large_terms)


def _one_order(rank: int, world: int, calls: int) -> None:
    """Thousands of calls of random shapes, back to back, with ranks and their hosts delayed at random."""
    groups = [nccl_group(world), nccl_group(world)]
    prepared = [make(case, groups[i % 2]) for i, case in enumerate(variants())]
    expected = [call() for call in prepared]
    wrong = torch.zeros((), device="cuda", dtype=torch.int64)
    order, mine = random.Random(7), random.Random(rank)
    for _ in range(calls):
        index = order.randrange(len(prepared))
        if mine.random() < 0.05:
            torch.cuda._sleep(mine.randrange(1_000_000))
        if mine.random() < 0.01:
            time.sleep(mine.random() * 0.005)
        for result, known in zip(prepared[index](), expected[index], strict=True):
            wrong += (result != known).any()
    assert wrong.item() == 0


def test_calls_back_to_back_with_delayed_ranks() -> None:
    calls = int(os.environ.get("FLUX_INDUCTOR_TEST_CALLS", "3000"))
    run_gpu_ranks(_one_order, calls)


def _streams(rank: int, world: int) -> None:
    """Calls of one group from several streams are serialised; other collectives run beside them."""
    group, other = nccl_group(world), dist.new_group(list(range(world)), backend="nccl")
    calls = [make(case, group) for case in CASES]
    expected = [call() for call in calls]
    streams = [torch.cuda.Stream() for _ in range(3)]
    beside = torch.cuda.Stream()
    values = torch.ones(8 << 20, device="cuda")
    torch.cuda.synchronize()
    results = []
    for turn in range(20):
        with torch.cuda.stream(beside):
            dist.all_reduce(values, group=other, async_op=True)
        for index, call in enumerate(calls):
            with torch.cuda.stream(streams[(turn + index) % 3]):
                results.append((index, call()))
    torch.cuda.synchronize()
    for index, result in results:
        assert all(map(torch.equal, result, expected[index])), CASES[index]
    assert torch.equal(values, torch.full_like(values, 2.0**20))


def test_several_streams_beside_other_collectives() -> None:
    run_gpu_ranks(_streams)


def _errors(rank: int, world: int) -> None:
    fp32 = make(Gather((64, 64), (64,), dtype=torch.float32), nccl_group(world))
    with pytest.raises(ValueError, match="fp32 stays unfused"):
        fp32()
    with pytest.raises(ValueError, match="multiples of 8; K is 60"):
        make(Gather((64, 60), (64,)), nccl_group(world))()
    with pytest.raises(ValueError, match="scatter along the last dim"):
        make(Scatter((64, 64), 64, dim=1), nccl_group(world))()

    group = nccl_group(world)
    with pytest.raises(MismatchError, match=r"\[64, 64\].*\n.*\[128, 64\]|\[128, 64\].*\n.*\[64, 64\]"):
        make(Gather((64 * (1 + rank), 64), (64,)), group)()
    with pytest.raises(DeadGroupError, match="does not match"):
        make(Gather((64, 64), (64,)), group)()


def test_errors() -> None:
    run_gpu_ranks(_errors)


def _bits(rank: int, world: int) -> None:
    """Neither the gather nor the transport of partials changes a bit of what the tiles compute."""
    from tests.support.emulated_ranks import AllGatherMatmulCall, EmulatedGroup

    group = nccl_group(world)
    for tile in all_gather_matmul.MENU:
        case = Gather(
            (2, 300, 520), (768,), dim=1, bias=True, keep=True, plan=f"mesh push chunk=128 tile={tile}"
        )
        call = GatherCall(case, group)
        (product, kept), whole = call(), call.gathered()
        assert torch.equal(kept, whole), tile
        if rank == 0:  # the emulated rank is on the first GPU
            alone = AllGatherMatmulCall(
                EmulatedGroup(1), [whole], [call.weights], str(tile), whole.shape[1], [[call.biases[0]]]
            )
            assert torch.equal(product, alone.run()[0][0]), tile
    for tile in matmul_reduce_scatter.MENU:
        results = []
        for direction in ("push", "store"):
            plan = f"mesh {direction} chunk=256 width=768 tile={tile} sweep=2"
            torch.manual_seed(rank)
            results += make(Scatter((2, 1000, 520), 1288, dim=1, bias=True, addend=True, plan=plan), group)()
        assert torch.equal(*results), tile


def test_results_are_those_of_the_kernel_alone_to_the_bit() -> None:
    run_gpu_ranks(_bits)


def _refused(rank: int, world: int) -> None:
    group = nccl_group(world)
    with pytest.raises(ValueError, match="cannot 'pull'; valid: push"):
        make(Gather((64, 64), (64,), plan="mesh pull chunk=64"), group)()
    with pytest.raises(ValueError, match="cannot 'store'; valid: push"):
        make(Gather((64, 64), (64,), plan="mesh store chunk=64"), group)()
    with pytest.raises(ValueError, match=r"leaves 120 of 132 SMs to others; reserve at most 66"):
        make(Gather((64, 64), (64,), plan="mesh push chunk=64 reserve=120"), group)()


def test_plans_that_the_kernels_cannot_run() -> None:
    run_gpu_ranks(_refused)


MISSED: list[tuple[Case, str]] = [
    (Gather((256, 256), (256,)), r"all_gather_matmul on rank 0 .* waited 2 s for chunk 0 of rank 1's shard"),
    (Scatter((512, 256), 256), r"matmul_reduce_scatter on rank 0 .* 2 s for chunk \d+ of rank 1's partial"),
    (
        Scatter((512, 256), 256, plan=STORE),
        r"matmul_reduce_scatter on rank 0 .* 2 s for chunk \d+ of rank 1's partial",
    ),
]


def _missing_peer(rank: int, world: int, case: Case, message: str) -> None:
    """A rank that does not come to a call seen before: the kernel traps, and the next call says why."""
    call = make(case, nccl_group(world, seconds=2))
    call()
    torch.cuda.synchronize()
    dist.barrier()
    if rank == 0:
        call()
        with pytest.raises(RuntimeError, match="CUDA"):
            torch.cuda.synchronize()
        with pytest.raises(PeerTimeoutError, match=message):
            call()
        with pytest.raises(DeadGroupError, match="of rank 1's"):
            call()
    dist.barrier()


@pytest.mark.parametrize(("case", "message"), MISSED)
def test_a_missing_peer_is_named(case: Case, message: str) -> None:
    run_gpu_ranks(_missing_peer, case, message)
