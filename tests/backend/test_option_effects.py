"""Every combination of our options has exactly the effects it names."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import flux_inductor
from flux_inductor.backend import flux_inductor as backend
from flux_inductor.options import STRATEGIES
from tests.backend.programs import fake_ranks, inputs, pair

TOPOLOGIES = ("", "cpu ranks=2 nodes=1 link=shm", "cpu ranks=2 nodes=2 link=shm")


@pytest.mark.parametrize(
    ("strategy", "strict", "report", "topology"),
    list(itertools.product(STRATEGIES, (False, True), (False, True), TOPOLOGIES)),
)
def test_options_take_effect_together(
    strategy: str, strict: bool, report: bool, topology: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = len(flux_inductor.report().records)
    options: dict[str, Any] = {"strategy": strategy, "strict": strict, "report": report, "topology": topology}
    two_nodes = "nodes=2" in topology
    with fake_ranks(2):
        compiled = torch.compile(pair, backend=backend, options=options)
        if two_nodes and strict and strategy != "never":
            with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="strict=True"):
                compiled(*inputs()[:2])
        else:
            compiled(*inputs()[:2])
    (record,) = flux_inductor.report().records[before:]
    # The pair is far too small for "auto" to find it worth while.
    assert record.fused == (strategy == "always" and not two_nodes)
    assert ("flux_inductor: inference" in capsys.readouterr().err) == report


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stratgy": "always"}, "did you mean strategy"),
        ({"strategy": "sometimes"}, "valid: auto, always, never"),
        ({"max_autotune": "yes"}, "not bool"),
        ({"topology": "cpu ranks=two link=shm"}, "ranks=two"),
    ],
)
def test_a_wrong_option_stops_the_compilation(options: dict[str, Any], message: str) -> None:
    compiled = torch.compile(torch.square, backend=backend, options=options)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=f"ValueError: .*{message}"):
        compiled(torch.ones(2))
