"""Sums in fp32 of bf16 and fp16 products: the CPU engine, the unfused one and gradients against float64."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

import flux_inductor
from flux_inductor.planning.plan import Plan
from flux_inductor.runtime import cpu_group
from flux_inductor.runtime.cpu import CpuEngine
from flux_inductor.runtime.errors import FusedOpError
from flux_inductor.runtime.reference import ReferenceEngine
from tests.support.engines import matmul_reduce_scatter
from tests.support.ranks import run_ranks

GROUP = "0"
DTYPES = (torch.bfloat16, torch.float16)
ENGINES = CpuEngine(), ReferenceEngine("unfused")
PLANS = tuple(Plan("mesh", direction, chunk) for direction, chunk in product(("push", "pull"), (3, 64)))  # type: ignore[arg-type]


def of_all_ranks(world: int, dtype: torch.dtype, *shape: int) -> list[Tensor]:
    return [torch.randn(shape).to(dtype) for _ in range(world)]


def scatter(rank: int, world: int) -> None:
    """Along the first, an inner and the last dim, with terms of both dtypes, as sum and mean."""
    columns = 2 * world
    shapes = (((3 * world, 24), 0), ((3, 2 * world, 24), 1), ((2, 3, 24), 2))
    terms = (None, torch.float32), (torch.float32, None), (None, None)
    cases = product(shapes, PLANS, DTYPES, terms)
    for number, ((shape, dim), plan, dtype, (bias_dtype, addend_dtype)) in enumerate(cases):
        torch.manual_seed(number)
        inputs = of_all_ranks(world, dtype, *shape)
        weight = torch.randn(columns, 24).to(dtype).t()
        bias = torch.randn(columns).to(bias_dtype or dtype) if number % 5 else None
        addends = of_all_ranks(world, addend_dtype or dtype, *shape[:-1], columns) if number % 7 else None
        reduce_op, scale = ("sum", 1.0) if number % 3 else ("avg", 0.3)
        addend = None if addends is None else addends[rank]
        exact = torch.zeros(*shape[:-1], columns, dtype=torch.double)
        program = torch.zeros(*shape[:-1], columns)
        for peer in range(world):
            exact += scale * (inputs[peer].double() @ weight.double())
            program += scale * (inputs[peer] @ weight).float()
            for term in (bias, None if addends is None else addends[peer]):
                exact += 0 if term is None else term.double()
                program += 0 if term is None else term.float()
        if reduce_op == "avg":
            exact, program = exact / world, program / world
        exact, program = (whole.chunk(world, dim)[rank] for whole in (exact, program))
        allowed = 2 * (program.double() - exact).abs().max()
        for engine in ENGINES:
            x = inputs[rank]
            result = matmul_reduce_scatter(
                engine, x, weight, bias, addend, GROUP, plan, dim, reduce_op, scale, torch.float32
            )
            assert result.dtype == torch.float32
            assert result.is_contiguous()
            assert (result.double() - exact).abs().max() <= allowed, (engine.name, number)


def large_sums(rank: int, world: int) -> None:
    """What fp16 cannot hold, or not precisely, fp32 does."""
    x = torch.full((world, 8), 64.0).half()
    weight = torch.full((8, 4), 100.0).half()
    for engine in ENGINES:
        addend = torch.full((world, 4), 1.0 / 128)
        result = matmul_reduce_scatter(
            engine, x, weight, None, addend, GROUP, PLANS[0], 0, "sum", 1.0, torch.float32
        )
        assert torch.equal(result, torch.full((1, 4), world * (51200.0 + 1.0 / 128)))
        assert (
            matmul_reduce_scatter(engine, x, weight, None, None, GROUP, PLANS[0], 0, "sum", 1.0).isinf().all()
        )


def gradients(rank: int, world: int) -> None:
    """Of the function called by name, with and without fp32 terms that need a gradient."""
    torch.manual_seed(0)
    shapes = (2 * world, 8), (8, 2 * world), (2 * world,), (2 * world, 2 * world)
    whole = [[torch.randn(shape) for shape in shapes] for _ in range(world)]
    grads = [torch.randn(2, 2 * world) for _ in range(world)]
    for (
        dim,
        dtypes,
    ) in product((0, 1), ((1, 1, 0, 0), (1, 1, 1, 1))):
        leaves = [
            value.to(torch.bfloat16 if low else torch.float32).requires_grad_()
            for value, low in zip(whole[rank], dtypes, strict=True)
        ]
        x, weight, bias, addend = leaves
        result = flux_inductor.matmul_reduce_scatter(
            x, weight, bias=bias, addend=addend, scatter_dim=dim, scale=0.5, out_dtype=torch.float32
        )
        grad = grads[rank] if dim == 0 else grads[rank].t().contiguous()
        found = torch.autograd.grad(result, leaves, grad)
        upstream = torch.cat(grads) if dim == 0 else torch.cat([one.t() for one in grads], 1)
        exact = (
            0.5 * upstream.double() @ weight.double().t(),
            0.5 * x.double().t() @ upstream.double(),
            upstream.double().sum(0),
            upstream.double(),
        )
        for one, leaf, reference in zip(found, leaves, exact, strict=True):
            assert one.dtype == leaf.dtype
            rounding = 1e-6 if leaf.dtype == torch.float32 else 1e-2
            assert (one.double() - reference).norm() <= rounding * reference.norm(), (dim, dtypes)


def bad_input(rank: int, world: int) -> None:
    x, weight = torch.randn(2 * world, 8).bfloat16(), torch.randn(8, 4).bfloat16()
    for out_dtype in (torch.float16, torch.float64, torch.int32):
        with pytest.raises(ValueError, match=rf"out_dtype is {out_dtype}, x is torch\.bfloat16; .*float32"):
            flux_inductor.matmul_reduce_scatter(x, weight, out_dtype=out_dtype)
    with pytest.raises(ValueError, match=r"addend is .*float32 on cpu, x is .*bfloat16"):
        flux_inductor.matmul_reduce_scatter(x, weight, addend=torch.randn(2 * world, 4))
    with pytest.raises(ValueError, match=r"a bias is torch\.float16 on cpu"):
        flux_inductor.matmul_reduce_scatter(x, weight, bias=torch.randn(4).half(), out_dtype=torch.float32)


def different_dtypes(rank: int, world: int) -> None:
    """Ranks that sum in different dtypes are told, and take no wrong numbers."""
    x, weight = torch.randn(2 * world, 8).bfloat16(), torch.randn(8, 4).bfloat16()
    out_dtype = torch.float32 if rank == 0 else None
    with pytest.raises(FusedOpError, match=r"bfloat16 as torch\.float32"):
        flux_inductor.matmul_reduce_scatter(x, weight, out_dtype=out_dtype, plan="mesh push chunk=2")


def run_checks(rank: int, world: int) -> None:
    if world == 4:
        cpu_group.INLINE_BYTES = 0  # chunks are moved by the transfer thread
    for check in (scatter, large_sums, gradients, bad_input, different_dtypes):
        check(rank, world)


@pytest.mark.parametrize("world", [2, 4])
def test_numerics(world: int) -> None:
    run_ranks(run_checks, world, timeout=150)
