"""What the passes ask of the strategy: topology and options reach it."""

from __future__ import annotations

import pytest
from torch.fx import Graph

from flux_inductor import auto_plan
from flux_inductor.options import Options
from flux_inductor.passes.collectives import Collective
from flux_inductor.passes.decide import Setting, decide
from flux_inductor.planning.ops.all_gather_matmul import GatherCall
from flux_inductor.planning.strategy import Decision
from flux_inductor.planning.topology import Topology
from tests.support.installations import EVERYWHERE

CALL = GatherCall((4096, 12288), (6144,), "bf16", "k_major", world=2, dim=0, return_gathered=False)
PROBLEM = CALL.problem


def detected(group: str, device: str) -> Topology:
    return Topology("cuda", 2, link="nvlink", shared=True)


@pytest.mark.parametrize(
    ("options", "reserve"),
    [
        (Options(), 8),
        (Options(topology="cuda ranks=2 link=nvlink"), 0),
        (Options(topology="cuda ranks=4 link=nvlink"), 8),
        (Options(reserve_sms=0), 0),
        (Options(reserve_sms=16), 16),
    ],
)
def test_a_group_beside_others_leaves_sms_to_them(options: Options, reserve: int) -> None:
    collective = Collective(Graph().placeholder("x"), "all_gather", "tp", 2)
    decision = decide(PROBLEM, collective, "cuda", Setting(options, detected, EVERYWHERE))
    assert isinstance(decision, Decision)
    plan = decision.plan.at(8192)
    assert (plan.fused, plan.reserve) == (True, reserve)


@pytest.fixture
def _without_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_plan, "topology_of", detected)
    monkeypatch.setattr(auto_plan, "installed", lambda: EVERYWHERE)
    monkeypatch.setattr(auto_plan, "communicators_seen", lambda group: 0)


@pytest.mark.usefixtures("_without_a_process_group")
def test_ops_called_by_name_leave_them_too(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "reserve=8" in str(auto_plan.plan_call(CALL, "tp", "cuda"))
    monkeypatch.setenv("FLUX_INDUCTOR_RESERVE_SMS", "0")
    assert "reserve" not in str(auto_plan.plan_call(CALL, "tp", "cuda"))


@pytest.mark.usefixtures("_without_a_process_group")
def test_a_written_topology_is_that_of_groups_of_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLUX_INDUCTOR_TOPOLOGY", "cuda ranks=4 link=nvlink")
    assert "reserve=8" in str(auto_plan.plan_call(CALL, "tp", "cuda"))
    monkeypatch.setenv("FLUX_INDUCTOR_TOPOLOGY", "cuda ranks=2 link=nvlink")
    assert "reserve" not in str(auto_plan.plan_call(CALL, "tp", "cuda"))
