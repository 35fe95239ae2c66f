"""flux_inductor.explain: exactly one function's graphs, and no traces of the run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flux_inductor
from flux_inductor.backend import flux_inductor as backend
from flux_inductor.tools.report import Report
from tests.backend.programs import HIDDEN, INNER, broken_mlp, fake_ranks, inputs, mlp


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(HIDDEN, INNER))
        self.down = nn.Parameter(torch.randn(INNER, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        return mlp(x, self.up, self.down)


def _parts(report: Report) -> list[tuple[str, int]]:
    return [(graph.name.split()[0], sum(r.fused for r in graph.records)) for graph in report.graphs]


def _explain_always(fn: Any, *args: Tensor) -> list[tuple[str, int]]:
    with fake_ranks(2), flux_inductor.options(strategy="always"):
        return _parts(flux_inductor.explain(fn, *args))


def test_a_function_without_gradients_has_one_graph() -> None:
    assert _explain_always(mlp, *inputs()) == [("inference", 2)]


def test_a_function_with_gradients_has_two() -> None:
    assert _explain_always(mlp, *inputs(requires_grad=True)) == [("forward", 2), ("backward", 2)]


def test_a_module_keeps_its_gradients() -> None:
    module = Mlp()
    # x needs no gradient, so the backward gathers, but scatters nothing.
    assert _explain_always(module, inputs()[0]) == [("forward", 2), ("backward", 1)]
    assert all(parameter.grad is None for parameter in module.parameters())


def test_every_graph_of_a_broken_function_counts() -> None:
    parts = _explain_always(broken_mlp, *inputs(requires_grad=True))
    assert sorted(parts) == [("backward", 1), ("backward", 1), ("forward", 1), ("forward", 1)]


def test_the_history_of_an_argument_stays_usable() -> None:
    leaf = torch.ones(8, HIDDEN, requires_grad=True)
    x = leaf * 2
    assert _explain_always(mlp, x, *inputs()[1:]) == [("forward", 2), ("backward", 2)]
    x.sum().backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None


def test_an_argument_with_a_history_may_be_changed_in_place() -> None:
    def fn(x: Tensor, *weights: Tensor) -> Tensor:
        return mlp(x.mul_(2), *weights)

    x = torch.ones(8, HIDDEN, requires_grad=True) * 1
    assert _explain_always(fn, x, *inputs()[1:]) == [("forward", 2), ("backward", 2)]
    assert bool((x == 1).all())


def test_a_compiled_function_keeps_its_options_and_is_compiled_anew() -> None:
    with fake_ranks(2):
        compiled = torch.compile(mlp, backend=backend, options={"strategy": "always"})
        compiled(*inputs())
        for _ in range(2):
            assert _parts(flux_inductor.explain(compiled, *inputs())) == [("inference", 2)]
        assert _explain_never(mlp, *inputs()) == [("inference", 0)]


def _explain_never(fn: Any, *args: Tensor) -> list[tuple[str, int]]:
    with flux_inductor.options(strategy="never"):
        return _parts(flux_inductor.explain(fn, *args))


def test_a_module_compiled_in_place_keeps_its_options() -> None:
    module = Mlp().requires_grad_(False)
    module.compile(backend=backend, options={"strategy": "always"})
    with fake_ranks(2):
        assert _explain_never(module, inputs()[0]) == [("inference", 2)]


def test_a_function_compiled_with_another_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing of it with flux_inductor"):
        flux_inductor.explain(torch.compile(torch.square, backend="eager"), torch.ones(2))


def test_executions_are_those_of_the_one_run() -> None:
    with fake_ranks(2), flux_inductor.options(strategy="always"):
        torch.compile(mlp, backend=backend)(*inputs())
        report = flux_inductor.explain(mlp, *inputs(requires_grad=True))
    assert [(run.op, run.engine, run.calls) for run in report.executions] == [
        ("all_gather_matmul", "unfused", 2),
        ("matmul_reduce_scatter", "unfused", 2),
    ]
