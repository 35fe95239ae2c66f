"""The differentiable functions against one process that plays all ranks, in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ranks import run_ranks

Leaves = list[Tensor]
Outputs = list[Tensor]


def _random(rank: int, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def _with_gradients(
    inputs: Sequence[list[Tensor]],
    cotangents: Sequence[list[Tensor]],
    ranks: Callable[[list[Leaves]], list[Outputs]],
    rank: int,
    dtype: torch.dtype,
) -> list[Tensor]:
    """Outputs and input gradients of `rank`, when one process computes what all ranks do."""
    leaves = [[value.to(dtype).requires_grad_(True) for value in values] for values in inputs]
    outputs = ranks(leaves)
    flat = [output for mine in outputs for output in mine]
    grads = [cotangent.to(dtype) for mine in cotangents for cotangent in mine]
    return [*outputs[rank], *torch.autograd.grad(flat, leaves[rank], grads[: len(flat)])]


def _compare(fused: Sequence[Tensor], eager: Sequence[Tensor], exact: Sequence[Tensor]) -> None:
    """Errors of at most twice those of plain operations in the same dtype."""

    def error(value: Tensor, reference: Tensor) -> float:
        assert value.shape == reference.shape
        return float((value.double() - reference).norm() / reference.norm().clamp_min(1e-30))

    for ours, plain, reference in zip(fused, eager, exact, strict=True):
        assert error(ours, reference) <= max(2 * error(plain, reference), 1e-6)


def _gather(rank: int, world: int, dim: int, returned: bool) -> None:
    import flux_inductor

    lead = (4 * world, 6) if dim == 0 else (4, 6 * world)
    columns = (8, 12, 16) if returned else (8, 12)
    inputs = [_random(r, [(4, 6, 16), (16, 8), (16, 12), (8,)]) for r in range(world)]
    cotangents = [_random(100 + r, [(*lead, n) for n in columns]) for r in range(world)]

    def all_ranks(leaves: list[Leaves]) -> list[Outputs]:
        whole = torch.cat([mine[0] for mine in leaves], dim)
        outputs = [[whole @ w1 + b, whole @ w2, whole] for _, w1, w2, b in leaves]
        return [mine[: len(columns)] for mine in outputs]

    exact = _with_gradients(inputs, cotangents, all_ranks, rank, torch.float64)
    plain = _with_gradients(inputs, cotangents, all_ranks, rank, torch.float32)
    x, w1, w2, b = mine = [value.requires_grad_(True) for value in inputs[rank]]
    outputs: Any = flux_inductor.all_gather_matmul(
        x, [w1, w2], biases=[b, None], gather_dim=dim, return_gathered=returned, plan="mesh push chunk=3"
    )
    gradients = torch.autograd.grad(list(outputs), mine, cotangents[rank])
    _compare([*outputs, *gradients], plain, exact)


@pytest.mark.parametrize(("dim", "returned"), [(0, True), (1, False)])
def test_all_gather_matmul_gradients(dim: int, returned: bool) -> None:
    run_ranks(_gather, 2, dim, returned)


def _scatter(rank: int, world: int, dim: int, reduce_op: str) -> None:
    import flux_inductor

    inputs = [_random(r, [(4, 6, 16), (16, 8), (8,), (4, 6, 8)]) for r in range(world)]
    shape = [4, 6, 8]
    shape[dim] //= world
    cotangents = [_random(100 + r, [(shape[0], shape[1], shape[2])]) for r in range(world)]

    def all_ranks(leaves: list[Leaves]) -> list[Outputs]:
        total = torch.stack([0.5 * (x @ w) + b + c for x, w, b, c in leaves]).sum(0)
        if reduce_op == "avg":
            total = total / world
        return [[part] for part in total.chunk(world, dim)]

    exact = _with_gradients(inputs, cotangents, all_ranks, rank, torch.float64)
    plain = _with_gradients(inputs, cotangents, all_ranks, rank, torch.float32)
    x, w, b, c = mine = [value.requires_grad_(True) for value in inputs[rank]]
    output = flux_inductor.matmul_reduce_scatter(
        x, w, bias=b, addend=c, scatter_dim=dim, reduce_op=reduce_op, scale=0.5, plan="mesh pull chunk=2"
    )
    _compare([output, *torch.autograd.grad(output, mine, cotangents[rank])], plain, exact)


@pytest.mark.parametrize(("dim", "reduce_op"), [(0, "sum"), (1, "avg"), (2, "sum")])
def test_matmul_reduce_scatter_gradients(dim: int, reduce_op: str) -> None:
    run_ranks(_scatter, 2, dim, reduce_op)


def _strategy_chooses(rank: int, world: int) -> None:
    import flux_inductor

    inputs = [_random(r, [(64, 32), (32, 48)]) for r in range(world)]
    x, weight = inputs[rank]
    fused = flux_inductor.all_gather_matmul(x, weight)
    assert isinstance(fused, Tensor)
    torch.testing.assert_close(fused, torch.cat([mine[0] for mine in inputs]) @ inputs[rank][1])


def test_without_a_plan_the_strategy_chooses() -> None:
    run_ranks(_strategy_chooses, 2)
