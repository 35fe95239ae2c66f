"""The list of passes: its order, and what is told about each."""

from __future__ import annotations

import logging

import pytest
import torch.distributed as dist
from torch import Tensor, randn

from flux_inductor.passes.pass_list import PASSES
from tests.passes.programs import gather, scatter
from tests.passes.tracing import trace

Group = dist.ProcessGroup


def test_the_order_of_the_passes() -> None:
    assert [one.name for one in PASSES] == [
        "tidy",
        "find",
        "fuse gathers",
        "fuse scatters",
        "leave others",
        "sort and check",
        "make room",
        "agree",
        "pin order",
    ]


def test_every_pass_is_timed_counted_and_dumped(group: Group, caplog: pytest.LogCaptureFixture) -> None:
    def fn(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return scatter((gather(x, 0, group) @ w).relu() @ v, 0, group)

    with caplog.at_level(logging.DEBUG, "flux_inductor.passes"):
        traced = trace(fn, randn(4, 8), randn(8, 6), randn(6, 8))
    counts = {run.name: run.count for run in traced.runs}
    assert list(counts) == [one.name for one in PASSES]
    assert {name: count for name, count in counts.items() if count} == {
        "find": 2,
        "fuse gathers": 1,
        "fuse scatters": 1,
        "sort and check": 2,
        "agree": 1,
        "pin order": 1,
    }
    assert all(run.seconds > 0 for run in traced.runs)
    said = [record.getMessage() for record in caplog.records]
    assert any(line.startswith("fuse gathers: 1 fused in ") for line in said)
    dumps = [line.split(":")[0].split(" ", 3)[3] for line in said if line.startswith("graph ")]
    assert dumps[0] == "before all passes"
    assert "after fuse gathers" in dumps
    assert "after leave others" not in dumps, "a pass that changes nothing shows nothing"
