"""Rewritten graphs on real ranks with the CPU engine, outputs and gradients against eager code in fp64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from flux_inductor.runtime.engine import executions
from tests.passes.programs import gather, gather_list, scatter
from tests.passes.tracing import prepared
from tests.support.ranks import run_ranks

Program = Callable[..., Tensor | tuple[Tensor, ...]]


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def shared_gather(x: Tensor, q: Tensor, k: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    whole = gather(x, 1, world())
    return F.linear(whole, q, b), F.linear(whole, k), whole.sum(-1)


def layer(x: Tensor, up: Tensor, down: Tensor, b: Tensor) -> Tensor:
    hidden = F.silu(F.linear(gather(x, 1, world()), up, b))
    return scatter(F.linear(hidden, down, b / 2), 1, world())


def trimmed_and_permuted(x: Tensor, w: Tensor, _: Tensor, b: Tensor) -> Tensor:
    return F.linear(torch.cat(gather_list(x, world()), 1)[:, :-1].transpose(0, 1), w, b)


def sums(x: Tensor, w: Tensor, v: Tensor, b: Tensor) -> Tensor:
    return scatter((F.linear(x, w, b) * 0.5 + x.relu() + F.linear(x, v)), 1, world(), "avg")


def columns(x: Tensor, w: Tensor, v: Tensor, b: Tensor) -> Tensor:
    return scatter(F.linear(x, w) + b, 2, world())


def fp32_sums(x: Tensor, w: Tensor, v: Tensor, b: Tensor) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    return scatter((F.linear(x, w, b) * 0.3).to(wide) + F.linear(x, v), 1, world(), "avg")


def autocast(x: Tensor, up: Tensor, down: Tensor, b: Tensor) -> Tensor:
    """fp32 parameters and residual stream, bf16 products."""
    wide = torch.promote_types(x.dtype, torch.float32)
    x, up, down, b = x.to(wide), up.to(wide), down.to(wide), b.detach().to(wide)
    with torch.autocast("cpu", torch.bfloat16):
        hidden = F.silu(F.linear(gather(x, 1, world()), up))
        return scatter(F.linear(hidden, down) + b, 1, world())


PROGRAMS: dict[str, tuple[Program, bool, int]] = {
    # program, whether it has a backward, collectives that are fused
    "shared_gather": (shared_gather, True, 2),
    "layer": (layer, True, 4),
    "trimmed_and_permuted": (trimmed_and_permuted, False, 1),
    "sums": (sums, False, 1),
    "columns": (columns, False, 1),
    "fp32_sums": (fp32_sums, False, 1),
    "autocast": (autocast, True, 4),
}
SIZE = 24


def inputs(rank: int, dtype: torch.dtype, with_gradients: bool) -> list[Tensor]:
    rng = torch.Generator().manual_seed(rank)
    shapes = (3, 16, SIZE), (SIZE, SIZE), (SIZE, SIZE), (SIZE,)
    values = [torch.randn(shape, generator=rng).bfloat16().to(dtype) for shape in shapes]
    return [value.requires_grad_(with_gradients) for value in values]


def results(program: Callable[..., Any], rank: int, dtype: torch.dtype, with_gradients: bool) -> list[Tensor]:
    """Outputs, then gradients of all inputs that have any."""
    args = inputs(rank, dtype, with_gradients)
    outputs = program(*args)
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    if with_gradients:
        torch.autograd.backward(outputs, [torch.ones_like(one) for one in outputs])
    return [*(one.detach() for one in outputs), *(one.grad for one in args if one.grad is not None)]


def on_rank(rank: int, _: int) -> dict[str, Any]:
    """For each program: worst error of compiled and of eager bf16 relative to fp64, and fused collectives."""
    found = {}
    for name, (program, with_gradients, _) in PROGRAMS.items():
        traced = prepared(program, pretend=False)
        exact = results(program, rank, torch.float64, with_gradients)
        eager = results(program, rank, torch.bfloat16, with_gradients)
        compiled = results(traced.call, rank, torch.bfloat16, with_gradients)
        errors = [
            max(_error(one, reference) for one, reference in zip(some, exact, strict=True))
            for some in (compiled, eager)
        ]
        found[name] = (*errors, sum(record.fused for record in traced.records))
    return {"programs": found, "engines": {engine for _, engine in executions()}}


def _error(value: Tensor, reference: Tensor) -> float:
    assert value.shape == reference.shape
    return float((value.double() - reference).norm() / reference.norm())


@pytest.fixture(scope="module")
def replies() -> list[dict[str, Any]]:
    return run_ranks(on_rank, 2, timeout=120)


@pytest.mark.parametrize("name", PROGRAMS)
def test_program(replies: list[dict[str, Any]], name: str) -> None:
    for reply in replies:
        compiled, eager, fused = reply["programs"][name]
        assert fused == PROGRAMS[name][2]
        assert compiled <= 2 * eager


def test_only_the_cpu_engine_ran(replies: list[dict[str, Any]]) -> None:
    assert [reply["engines"] for reply in replies] == [{"cpu"}, {"cpu"}]
