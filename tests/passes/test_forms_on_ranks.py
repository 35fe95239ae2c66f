"""Forms between collective and matmul on real ranks with the CPU engine, each against eager code in fp64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from flux_inductor.runtime.engine import executions
from tests.passes.programs import gather, scatter
from tests.passes.tracing import prepared
from tests.support.ranks import run_ranks

SIZE = 16
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Form = Callable[[dist.ProcessGroup, Tensor, Tensor, Tensor], Tensor]

# Each of a group, x [4, 8, SIZE], w [SIZE, SIZE], b [SIZE].
FORMS: dict[str, Form] = {
    "einsum nk": lambda g, x, w, b: torch.einsum("btk,nk->btn", gather(x, 1, g), w),
    "einsum heads": lambda g, x, w, b: torch.einsum("btk,khd->bhtd", gather(x, 1, g), w.view(SIZE, 4, 4)),
    "heads merged": lambda g, x, w, b: gather(x.unflatten(2, (4, 4)), 1, g).flatten(2) @ w,
    "heads first": lambda g, x, w, b: gather(_heads(x).transpose(1, 2), 2, g).transpose(1, 2).flatten(2) @ w,
    "features first": lambda g, x, w, b: gather(x[0].t(), 1, g).t() @ w,
    "trim by cat": lambda g, x, w, b: torch.cat([(y := gather(x[0], 0, g))[:7], y[8:]]) @ w,
    "weight of batch 1": lambda g, x, w, b: gather(x, 1, g) @ w[None],
    "gathered * 0.3": lambda g, x, w, b: F.linear(gather(x, 1, g) * 0.3, w, b),
    "gathered * scalar": lambda g, x, w, b: (gather(x, 1, g) * b[0]) @ w,
    "gathered * column": lambda g, x, w, b: (gather(x, 1, g) * b) @ w,
    "gathered * row": lambda g, x, w, b: (gather(x, 1, g) * b[:, None]) @ w,
    "gathered, padded": lambda g, x, w, b: F.linear(F.pad(gather(x, 1, g), (0, 0, 1, 0)), w, b),
    "scatter of einsum": lambda g, x, w, b: scatter(
        torch.einsum("bthd,hdk->btk", _heads(x), _heads(w, 0)), 1, g
    ),
    "scatter of heads": lambda g, x, w, b: scatter((x @ w).unflatten(2, (4, 4)), 2, g),
    "scatter of rows of heads": lambda g, x, w, b: scatter(
        (x @ w).unflatten(2, (4, 4)).transpose(1, 2), 2, g
    ),
    "transposed": lambda g, x, w, b: scatter((x[0] @ w).t(), 0, g),
    "channels first": lambda g, x, w, b: scatter((x @ w).mT, 2, g),
    "padded": lambda g, x, w, b: scatter(F.pad(F.linear(x[:, :7], w, b), (0, 0, 0, 1)), 1, g),
    "negated sums": lambda g, x, w, b: scatter(b - x @ w - x.relu() * 2 + 1.0, 1, g),
    "product * 0.3": lambda g, x, w, b: scatter(-(x @ w) * 0.3, 1, g),
    "product * scalar": lambda g, x, w, b: scatter((x @ w) * b[0], 1, g),
    "product / scalar": lambda g, x, w, b: scatter((x @ w) / (b[0].abs() + 1), 1, g),
    "product * column": lambda g, x, w, b: scatter(F.linear(x, w, b) * b, 1, g),
    "product * row": lambda g, x, w, b: scatter(F.linear(x, w, b) * x[..., :1], 1, g),
}


def _heads(value: Tensor, dim: int = -1) -> Tensor:
    heads: Tensor = value.unflatten(dim, (4, 4))  # type: ignore[no-untyped-call, unused-ignore]
    return heads


def inputs(rank: int, dtype: torch.dtype) -> list[Tensor]:
    """For each form tensors of its own, which differ between ranks: else Inductor would share the gathers."""
    rng = torch.Generator().manual_seed(rank)
    shapes = [(4, 8, SIZE), (SIZE, SIZE), (SIZE,)] * len(FORMS)
    return [torch.randn(shape, generator=rng).bfloat16().to(dtype) for shape in shapes]


def program(*args: Tensor) -> tuple[Tensor, ...]:
    group = dist.group.WORLD
    assert group is not None
    return tuple(
        form(group, *args[3 * number : 3 * number + 3]) for number, form in enumerate(FORMS.values())
    )


def on_rank(rank: int, _: int) -> dict[str, Any]:
    """For each dtype and form: errors of compiled and of eager code relative to fp64; what was not fused."""
    exact = program(*inputs(rank, torch.float64))
    errors: dict[tuple[str, str], tuple[float, float]] = {}
    left: list[str] = []
    for name, dtype in DTYPES.items():
        traced = prepared(program, pretend=False)
        eager, compiled = program(*inputs(rank, dtype)), traced.call(*inputs(rank, dtype))
        for form, *values in zip(FORMS, compiled, eager, exact, strict=True):
            fused, plain, reference = values
            errors[name, form] = _error(fused, reference), _error(plain, reference)
        left += [record.reason for record in traced.records if not record.fused]
    return {"errors": errors, "left": left, "engines": {engine for _, engine in executions()}}


def _error(value: Tensor, reference: Tensor) -> float:
    assert value.shape == reference.shape
    return float((value.double() - reference).norm() / reference.norm())


@pytest.fixture(scope="module")
def replies() -> list[dict[str, Any]]:
    return run_ranks(on_rank, 2, timeout=240)


def test_every_form_is_fused(replies: list[dict[str, Any]]) -> None:
    assert [(reply["left"], reply["engines"]) for reply in replies] == [([], {"cpu"})] * 2


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_error(replies: list[dict[str, Any]], dtype: str, form: str) -> None:
    for reply in replies:
        fused, eager = reply["errors"][dtype, form]
        assert fused <= max(2 * eager, 1e-6)
