"""The differentiable functions against the same program in plain eager collectives, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

from tests.ranks import run_ranks


def _reference_gather(
    x: Tensor, weights: list[Tensor], biases: list[Tensor | None], dim: int
) -> list[Tensor]:
    whole = funcol.wait_tensor(funcol.all_gather_tensor_autograd(x, dim, dist.group.WORLD))
    products = [whole @ w if b is None else whole @ w + b for w, b in zip(weights, biases, strict=True)]
    return [*products, whole]


def _error(value: Tensor, reference: Tensor) -> float:
    return ((value.double() - reference).norm() / reference.norm().clamp_min(1e-30)).item()


def _leaves(dtype: torch.dtype, *values: Tensor) -> list[Tensor]:
    return [value.to(dtype).requires_grad_(True) for value in values]


def _gather(rank: int, world: int, dim: int, returned: bool) -> None:
    import flux_inductor

    torch.manual_seed(rank)
    values = [torch.randn(s) for s in ((4, 6, 16), (16, 8), (16, 12), (8,))]
    grads = [torch.randn(*shape) for shape in _gathered_shapes(world, dim)]
    if not returned:
        grads.pop()

    def run(dtype: torch.dtype, fused: bool) -> list[Tensor]:
        x, w1, w2, b = leaves = _leaves(dtype, *values)
        if fused:
            outputs: Any = flux_inductor.all_gather_matmul(
                x,
                [w1, w2],
                biases=[b, None],
                gather_dim=dim,
                return_gathered=returned,
                plan="mesh push chunk=3",
            )
        else:
            outputs = _reference_gather(x, [w1, w2], [b, None], dim)
        outputs = list(outputs)[: len(grads)]
        gradients = torch.autograd.grad(outputs, leaves, [g.to(dtype) for g in grads])
        return [*outputs, *gradients]

    reference = run(torch.float64, fused=False)
    for fused, eager, exact in zip(
        run(torch.float32, fused=True), run(torch.float32, fused=False), reference, strict=True
    ):
        assert _error(fused, exact) <= max(2 * _error(eager, exact), 1e-6)


def _gathered_shapes(world: int, dim: int) -> list[tuple[int, ...]]:
    lead = (4 * world, 6) if dim == 0 else (4, 6 * world)
    return [(*lead, n) for n in (8, 12, 16)]


@pytest.mark.parametrize(("dim", "returned"), [(0, True), (1, False)])
def test_all_gather_matmul_gradients(dim: int, returned: bool) -> None:
    run_ranks(_gather, 2, dim, returned)


def _scatter(rank: int, world: int, dim: int, reduce_op: str) -> None:
    import flux_inductor

    torch.manual_seed(rank)
    values = [torch.randn(s) for s in ((4, 6, 16), (16, 8), (8,), (4, 6, 8))]
    shape = [4, 6, 8]
    shape[dim] //= world
    grad = torch.randn(*shape)

    def run(dtype: torch.dtype, fused: bool) -> list[Tensor]:
        x, w, b, c = leaves = _leaves(dtype, *values)
        if fused:
            output = flux_inductor.matmul_reduce_scatter(
                x,
                w,
                bias=b,
                addend=c,
                scatter_dim=dim,
                reduce_op=reduce_op,
                scale=0.5,
                plan="mesh pull chunk=2",
            )
        else:
            product = 0.5 * (x @ w) + b + c
            scattered = funcol.reduce_scatter_tensor_autograd(product, "sum", dim, dist.group.WORLD)
            output = funcol.wait_tensor(scattered) / (world if reduce_op == "avg" else 1)
        return [output, *torch.autograd.grad(output, leaves, grad.to(dtype))]

    reference = run(torch.float64, fused=False)
    for fused, eager, exact in zip(
        run(torch.float32, fused=True), run(torch.float32, fused=False), reference, strict=True
    ):
        assert _error(fused, exact) <= max(2 * _error(eager, exact), 1e-6)


@pytest.mark.parametrize(("dim", "reduce_op"), [(0, "sum"), (1, "avg"), (2, "sum")])
def test_matmul_reduce_scatter_gradients(dim: int, reduce_op: str) -> None:
    run_ranks(_scatter, 2, dim, reduce_op)


def _strategy_chooses(rank: int, world: int) -> None:
    import flux_inductor

    x, w = torch.randn(64, 32), torch.randn(32, 48)
    fused = flux_inductor.all_gather_matmul(x, w)
    whole = funcol.wait_tensor(funcol.all_gather_tensor(x, 0, dist.group.WORLD))
    torch.testing.assert_close(fused, whole @ w)


def test_without_a_plan_the_strategy_chooses() -> None:
    run_ranks(_strategy_chooses, 2)
