"""torch.compile with this backend, in all its ways, computes what eager code does. Two real ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import flux_inductor
from flux_inductor.backend import flux_inductor as backend
from tests.backend.programs import broken_mlp, inputs, mlp
from tests.support.ranks import run_ranks

CASES: dict[str, tuple[Callable[..., Tensor], dict[str, Any]]] = {
    "plain": (mlp, {}),
    "fullgraph": (mlp, {"fullgraph": True}),
    "dynamic": (mlp, {"dynamic": True}),
    "reduce-overhead": (mlp, {"mode": "reduce-overhead"}),
    "options of both kinds": (mlp, {"options": {"strategy": "always", "max_autotune": False}}),
    "graph break": (broken_mlp, {}),
}
ROWS = {"dynamic": (8, 12, 20)}


def _gradients(fn: Callable[..., Tensor], arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    result = fn(*arguments)
    return (result.detach(), *torch.autograd.grad(result.square().sum(), arguments))


def _run_cases(rank: int, world: int) -> dict[str, list[tuple[str, str, bool]]]:
    """Compares every case with eager; returns graph, collective and whether it was fused, by case."""
    rows = {}
    torch._inductor.config.fx_graph_cache = False  # every case runs the pass
    for name, (fn, how) in CASES.items():
        torch._dynamo.reset()
        before = len(flux_inductor.report().graphs)
        with flux_inductor.options(strategy="always"):
            compiled = torch.compile(fn, backend=backend, **how)
            for count in ROWS.get(name, (8,)):
                with torch.no_grad():
                    arguments = inputs(rank, count)
                    torch.testing.assert_close(compiled(*arguments), fn(*arguments))
                arguments = inputs(rank, count, requires_grad=True)
                torch.testing.assert_close(_gradients(compiled, arguments), _gradients(fn, arguments))
        graphs = flux_inductor.report().graphs[before:]
        rows[name] = [(r.graph.split()[0], r.op, r.fused) for graph in graphs for r in graph.records]
    executions = {(run.op, run.engine): run.calls for run in flux_inductor.report().executions}
    assert set(executions) == {("all_gather_matmul", "cpu"), ("matmul_reduce_scatter", "cpu")}
    return rows


@pytest.fixture(scope="module")
def rows() -> list[dict[str, list[tuple[str, str, bool]]]]:
    return run_ranks(_run_cases, 2, timeout=150)


@pytest.mark.parametrize("case", CASES)
def test_every_pair_is_fused_alike_on_both_ranks(case: str, rows: list[dict[str, Any]]) -> None:
    assert rows[0] == rows[1]
    for graph in ("inference", "forward", "backward"):
        outcome = {op: fused for part, op, fused in rows[0][case] if part == graph}
        assert outcome == {"all_gather": True, "reduce_scatter": True}, graph
