"""The pass as Inductor's hook: the user's own pass beside it, its key for the cache, strict, its records."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, randn
from torch._inductor import custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph

from flux_inductor.options import Options
from flux_inductor.passes import cache_key
from flux_inductor.passes.fusion_pass import FusionPass
from flux_inductor.passes.reasons import CODES
from flux_inductor.planning.installed import CPU_ONLY
from flux_inductor.planning.strategy import Decision
from tests.passes.programs import gather, scatter
from tests.passes.tracing import ALWAYS, cpu_topology, trace

Group = dist.ProcessGroup


def hook(chained: object = None, options: Options = ALWAYS) -> FusionPass:
    return FusionPass(options, chained, lambda records: None, cpu_topology)


class Named(CustomGraphPass):
    """A user's pass that keeps what it was given."""

    def __init__(self, name: object = "mine") -> None:
        self.name = name
        self.given: list[tuple[Any, ...]] = []

    def __call__(self, *args: Any) -> None:
        self.given.append(args)

    def uuid(self) -> object:
        return self.name


# ---------------------------------------------------------------- chaining


def test_chained_passes_run_first_and_in_order() -> None:
    ran: list[str] = []
    first, second = (lambda graph: ran.append("first")), (lambda graph: ran.append("second"))
    for chained in (None, first, [first, second], (second,)):
        hook(chained)(Graph())
    assert ran == ["first", "first", "second", "second"]


@pytest.mark.skipif(
    not hasattr(custom_graph_pass, "CustomInferenceAwareGraphPass"), reason="exists from torch 2.12 on"
)
def test_inference_aware_pass_is_told() -> None:
    class Aware(Named, custom_graph_pass.CustomInferenceAwareGraphPass):
        pass

    aware, unaware, graph = Aware(), Named(), Graph()
    hook([aware, unaware])(graph, True)
    assert aware.given == [(graph, True)]
    assert unaware.given == [(graph,)]


# ---------------------------------------------------------------- key for the cache


def test_uuid_holds_options_chained_passes_and_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = hook().uuid()
    assert hook().uuid() == plain
    others = [
        hook(options=replace(ALWAYS, strategy="never")).uuid(),
        hook(options=replace(ALWAYS, topology="cpu ranks=2 nodes=1 link=shm")).uuid(),
        hook(Named("mine")).uuid(),
        hook(Named("other")).uuid(),
        hook([Named("mine"), Named("other")]).uuid(),
    ]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    others.append(hook().uuid())
    assert len({plain, *others}) == 7


def test_uuid_holds_the_sources(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "passes").mkdir()
    (tmp_path / "planning").mkdir()
    for name in ("ops.py", "op_arguments.py", "passes/rows.py", "planning/cost.py"):
        (tmp_path / name).write_text("1")
    monkeypatch.setattr(cache_key, "_PACKAGE", tmp_path)
    monkeypatch.setattr(cache_key, "__file__", str(tmp_path / "passes/cache_key.py"))
    keys = set()
    for name in ("", "ops.py", "passes/rows.py", "planning/cost.py"):
        if name:
            (tmp_path / name).write_text("2")
        keys.add(cache_key._sources.__wrapped__())
    assert len(keys) == 4


def test_uuid_is_the_same_in_another_process() -> None:
    code = (
        "from flux_inductor.options import Options;"
        "from flux_inductor.passes.cache_key import cache_key;"
        "from flux_inductor.planning.installed import CPU_ONLY;"
        "print(cache_key(Options(strategy='always'), CPU_ONLY))"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert printed.stdout.strip() == cache_key.cache_key(ALWAYS, CPU_ONLY)


@pytest.mark.parametrize("chained", [lambda graph: None, Named(None), [Named(), lambda graph: None]])
def test_chained_pass_without_uuid_bypasses_the_cache(chained: object) -> None:
    assert hook(chained).uuid() is None


# ---------------------------------------------------------------- records and strict


def test_record_of_a_fused_pair(group: Group) -> None:
    x, w, v = (one.requires_grad_() for one in (randn(3, 4, 8), randn(8, 6), randn(8, 5)))

    def fn(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        whole = gather(x, 1, group)
        return whole @ w, whole @ v

    forward, backward = trace(fn, x, w, v).records
    assert forward.graph.split()[0] == "forward"
    assert forward.graph.split()[1] == backward.graph.split()[1]
    assert (forward.op, forward.group, forward.world) == ("all_gather", group.group_name, 2)
    assert forward.shapes == "[3,4,8] x [8,6]+[8,5] fp32"
    assert forward.plan.startswith("mesh ")
    assert forward.fused_us is not None
    assert forward.unfused_us is not None
    assert (backward.op, backward.fused, backward.shapes) == ("reduce_scatter", True, backward.shapes)
    assert backward.shapes == "[3,8,5] x [5,8] fp32" or backward.shapes == "[3,8,6] x [6,8] fp32"


def test_strict_names_every_pair_that_was_missed(group: Group) -> None:
    def fn(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        whole = gather(x, 0, group)
        scaled = torch.addmm(w[0], whole, w, alpha=2.0)
        return scaled, scatter(y.double() @ w.double(), 0, group)

    strict = replace(ALWAYS, strict=True)
    with pytest.raises(Exception, match=r"(?s)strict=True.*alpha.*\[scaled-addmm\].*float64.*\[dtype\]"):
        trace(fn, randn(4, 8), randn(8, 8), randn(8, 8), options=strict)


def test_strict_leaves_in_peace_what_cannot_be_fused(group: Group) -> None:
    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return w @ gather(x, 0, group), gather(w, 0, group).relu()

    traced = trace(fn, randn(4, 8), randn(5, 8), options=replace(ALWAYS, strict=True))
    assert traced.fates == "contracted no-matmul"


def test_codes_of_the_strategy_are_known() -> None:
    """Those that the documentation of its Decision lists."""
    assert Decision.__doc__ is not None
    codes = re.findall(r'"([a-z-]+)"', Decision.__doc__)
    assert "not-profitable" in codes
    assert set(codes) <= CODES.keys()
