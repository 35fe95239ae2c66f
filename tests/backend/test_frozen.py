"""Options hold from the moment the backend is entered, and Inductor's configuration is left as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass

import flux_inductor
from flux_inductor.backend import flux_inductor as backend
from tests.backend.programs import fake_ranks, inputs, mlp


def _fused() -> dict[str, bool]:
    """Whether all pairs were fused, by part of the graph that was compiled last."""
    graphs = flux_inductor.report().graphs
    last = graphs[-1].name.split()[1]
    return {
        part: all(record.fused for record in graph.records)
        for graph in graphs
        for part, number in [graph.name.split()]
        if number == last
    }


@pytest.mark.parametrize(("then", "later"), [("always", "never"), ("never", "always")])
def test_a_backward_compiled_later_sees_the_options_of_its_forward(then: str, later: str) -> None:
    with fake_ranks(2):
        with flux_inductor.options(strategy=then):
            arguments = inputs(requires_grad=True)
            result = torch.compile(mlp, backend=backend)(*arguments)
        assert _fused() == {"forward": then == "always"}
        with flux_inductor.options(strategy=later):
            torch.autograd.grad(result.sum(), arguments)
        assert _fused() == {"forward": then == "always", "backward": then == "always"}


def test_nothing_is_left_in_inductors_configuration() -> None:
    before = config.get_config_copy()
    with fake_ranks(2):
        torch.compile(mlp, backend=backend, mode="max-autotune-no-cudagraphs")(*inputs())
    assert config.get_config_copy() == before


class CountingPass(CustomGraphPass):
    """A pass of the user's own, which counts the graphs that it is given."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.graphs += 1

    def uuid(self) -> str:
        return "counting"


def _in_configuration(users: CountingPass) -> None:
    with config.patch(post_grad_custom_post_pass=users):
        torch.compile(mlp, backend=backend)(*inputs())


def _in_options(users: CountingPass) -> None:
    options: dict[str, Any] = {"post_grad_custom_post_pass": users, "strategy": "always"}
    torch.compile(mlp, backend=backend, options=options)(*inputs())


@pytest.mark.parametrize("run", [_in_configuration, _in_options])
def test_a_pass_of_the_user_runs_too(run: Callable[[CountingPass], None]) -> None:
    users = CountingPass()
    with fake_ranks(2), flux_inductor.options(strategy="always"):
        run(users)
    assert users.graphs == 1
    assert _fused() == {"inference": True}
