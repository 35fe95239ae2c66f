"""The CPU engine against float64 and against the unfused engine, on real processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

import pytest
import torch
from torch import Tensor

from flux_inductor.planning.plan import Plan
from flux_inductor.runtime import cpu_group
from flux_inductor.runtime.cpu import CpuEngine
from flux_inductor.runtime.reference import ReferenceEngine
from tests.support.engines import all_gather_matmul, matmul_reduce_scatter
from tests.support.ranks import run_ranks

GROUP = "0"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ALMOST = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}  # half a unit in the last place
CPU, UNFUSED = CpuEngine(), ReferenceEngine("unfused")


@dataclass(frozen=True)
class Case:
    """`shape` is of x on one rank; its dim `dim` is gathered, or that dim of the product is scattered."""

    shape: tuple[int, ...]
    dim: int
    plan: Plan
    dtype: torch.dtype


def plans() -> Iterator[Plan]:
    for direction, chunk in product(("push", "pull"), (1, 3, 64)):  # one row, a ragged rest, all rows
        yield Plan("mesh", direction, chunk)  # type: ignore[arg-type]


def cases(shapes: tuple[tuple[tuple[int, ...], int], ...]) -> Iterator[Case]:
    for (shape, dim), plan, dtype in product(shapes, plans(), DTYPES):
        yield Case(shape, dim, plan, dtype)


def check(fused: Tensor, unfused: Tensor, exact: Tensor, case: Case) -> None:
    """The fused error is at most twice the unfused one, or a rounding of the largest result."""
    assert fused.is_contiguous(), case
    assert fused.shape == exact.shape, case
    error, allowed = ((result.double() - exact).abs().max().item() for result in (fused, unfused))
    floor = ALMOST[case.dtype] * exact.abs().max().item()
    assert error <= max(2 * allowed, floor), (case, error, allowed)


def odd_strides(x: Tensor) -> Tensor:
    """The same numbers, each last dim in every second place of memory."""
    wide = torch.full([*x.shape[:-1], 2 * x.shape[-1]], torch.nan, dtype=x.dtype)
    wide[..., ::2] = x
    return wide[..., ::2]


def gather(rank: int, world: int) -> None:
    shapes = (((7, 24), 0), ((2, 5, 24), 0), ((3, 7, 24), 1), ((2, 3, 2, 24), 1), ((2, 40, 24), 1))
    for number, case in enumerate(cases(shapes)):
        torch.manual_seed(number)
        shards = [torch.randn(case.shape).to(case.dtype) for _ in range(world)]
        x = shards[rank]
        if number % 3 == 1:
            x = odd_strides(x)
        elif number % 3 == 2:
            x = torch.cat([x, x], -1)[..., : x.shape[-1]]  # rows with a gap
        weights = [torch.randn(24, 9).to(case.dtype), torch.randn(5, 24).to(case.dtype).t()]
        biases = [None, torch.randn(5).to(case.dtype)] if number % 2 else []
        for wanted in (False, True):
            arguments = (x, weights, biases, GROUP, case.plan, case.dim, wanted)
            fused, unfused = all_gather_matmul(CPU, *arguments), all_gather_matmul(UNFUSED, *arguments)
            whole = torch.cat(shards, case.dim)
            for index, weight in enumerate(weights):
                exact = whole.double() @ weight.double()
                bias = biases[index] if biases else None
                exact += 0 if bias is None else bias.double()
                check(fused[index], unfused[index], exact, case)
            if wanted:
                assert torch.equal(fused[2], whole), case
                assert fused[2].is_contiguous(), case
            assert len(fused) == 2 + wanted


def scatter(rank: int, world: int) -> None:
    shapes = (((7 * world, 24), 0), ((2 * world, 5, 24), 0), ((3, 7 * world, 24), 1), ((2, 3, world, 24), 2))
    columns = (((5, 24), 1), ((2, 3, 24), 2))
    for number, case in enumerate(cases(shapes + columns)):
        torch.manual_seed(number)
        inputs = [torch.randn(case.shape).to(case.dtype) for _ in range(world)]
        weight = torch.randn(7 * world, 24).to(case.dtype).t()
        bias = torch.randn(7 * world).to(case.dtype) if number % 2 else None
        addends = [torch.randn(*case.shape[:-1], 7 * world).to(case.dtype) for _ in range(world)]
        added = number % 4 < 2
        reduce_op, scale = ("sum", 1.0) if number % 5 < 3 else ("avg", 0.5)
        x = odd_strides(inputs[rank]) if number % 3 == 1 else inputs[rank]
        addend = addends[rank] if added else None
        arguments = (x, weight, bias, addend, GROUP, case.plan, case.dim, reduce_op, scale)
        fused, unfused = matmul_reduce_scatter(CPU, *arguments), matmul_reduce_scatter(UNFUSED, *arguments)
        exact = torch.zeros(*case.shape[:-1], 7 * world, dtype=torch.double)
        for peer in range(world):
            exact += scale * (inputs[peer].double() @ weight.double())
            exact += 0 if bias is None else bias.double()
            exact += addends[peer].double() if added else 0
        exact /= world if reduce_op == "avg" else 1
        check(fused, unfused, exact.chunk(world, case.dim)[rank], case)


def many_ranks(rank: int, world: int) -> None:
    """More ranks than cores."""
    torch.manual_seed(0)
    shards = [torch.randn(6, 16) for _ in range(world)]
    weight = torch.randn(16, 2 * world)
    for plan in plans():
        (whole,) = all_gather_matmul(CPU, shards[rank], [weight], [], GROUP, plan, 0, False)
        torch.testing.assert_close(whole, torch.cat(shards) @ weight)
        part = matmul_reduce_scatter(CPU, shards[rank], weight, None, None, GROUP, plan, 1, "sum", 1.0)
        torch.testing.assert_close(part, (torch.stack(shards).sum(0) @ weight).chunk(world, 1)[rank])


def repeated(rank: int, world: int) -> None:
    """Results do not change from run to run."""
    torch.manual_seed(rank)
    x, weight = torch.randn(30, 96).bfloat16(), torch.randn(96, 48).bfloat16()
    for plan in plans():
        runs = []
        for _ in range(5):
            results = all_gather_matmul(CPU, x, [weight], [], GROUP, plan, 0, True)
            part = matmul_reduce_scatter(CPU, x, weight, None, None, GROUP, plan, 0, "avg", 1.0)
            runs.append([*results, part])
        for again in runs[1:]:
            assert all(torch.equal(a, b) for a, b in zip(again, runs[0], strict=True)), plan


def special_values(rank: int, world: int) -> None:
    """NaN and Inf propagate."""
    x, weight = torch.ones(4, 8), torch.ones(8, 4)
    if rank == 1:
        x[0, 0], x[2, 3] = torch.nan, torch.inf
    for plan in plans():
        whole, gathered = all_gather_matmul(CPU, x, [weight], [], GROUP, plan, 0, True)
        assert whole[4].isnan().all(), plan
        assert whole[6].isposinf().all(), plan
        assert whole.isfinite().sum() == 6 * 4, plan
        assert gathered[4, 0].isnan(), plan
        part = matmul_reduce_scatter(CPU, x, weight, None, None, GROUP, plan, 0, "sum", 1.0)
        marks = part[0].isnan().all() and part[1].isfinite().all()
        assert marks if rank == 0 else part[0].isposinf().all(), plan


def kept_results(rank: int, world: int) -> None:
    """Results never alias the workspace, and inputs may be reused at once."""
    torch.manual_seed(rank)
    weight = torch.randn(8, 4)
    for plan in plans():
        x = torch.randn(6, 8)
        results = [*all_gather_matmul(CPU, x, [weight], [], GROUP, plan, 0, True)]
        results.append(matmul_reduce_scatter(CPU, x, weight, None, None, GROUP, plan, 0, "sum", 1.0))
        copies = [result.clone() for result in results]
        x.fill_(torch.nan)  # compiled code reuses an input's memory right after the call
        for _ in range(3):
            y = torch.randn(6, 8)
            all_gather_matmul(CPU, y, [weight], [], GROUP, plan, 0, True)
            matmul_reduce_scatter(CPU, y, weight, None, None, GROUP, plan, 0, "sum", 1.0)
        for result, copy in zip(results, copies, strict=True):
            assert torch.equal(result, copy), plan


def nothing(rank: int, world: int) -> None:
    """Sizes of zero."""
    plan = Plan("mesh", "push", 4)
    bias = torch.arange(3.0)
    product, whole = all_gather_matmul(
        CPU, torch.empty(2, 0, 5), [torch.ones(5, 3)], [], GROUP, plan, 1, True
    )
    assert product.shape == (2, 0, 3)
    assert whole.shape == (2, 0, 5)
    (product,) = all_gather_matmul(CPU, torch.empty(2, 0), [torch.ones(0, 3)], [bias], GROUP, plan, 0, False)
    assert torch.equal(product, bias.expand(2 * world, 3))
    part = matmul_reduce_scatter(
        CPU, torch.empty(0, 5), torch.ones(5, 3), None, None, GROUP, plan, 0, "sum", 1.0
    )
    assert part.shape == (0, 3)
    x = torch.empty(2 * world, 0)
    part = matmul_reduce_scatter(CPU, x, torch.ones(0, 3), bias, None, GROUP, plan, 0, "sum", 1.0)
    assert torch.equal(part, (world * bias).expand(2, 3))


CHECKS: dict[int, tuple[Callable[[int, int], None], ...]] = {
    2: (gather, scatter, special_values, kept_results, nothing),
    3: (gather, scatter, repeated),
    4: (gather, scatter),
    8: (many_ranks,),
}


def run_checks(rank: int, world: int) -> None:
    """Chunks are moved by the caller on 2 ranks, by the transfer thread on 3 and 8, on 4 by either."""
    if world in (3, 8) or (world == 4 and rank < 2):
        cpu_group.INLINE_BYTES = 0
    for one in CHECKS[world]:
        one(rank, world)


@pytest.mark.parametrize("world", CHECKS)
def test_numerics(world: int) -> None:
    run_ranks(run_checks, world, timeout=150)
