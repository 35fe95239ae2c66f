"""Inductor's caches: a graph is compiled once, and anew when what decides its rewrite has changed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._inductor.utils import fresh_cache
from torch.utils.checkpoint import checkpoint

import flux_inductor
import flux_inductor.passes.cache_key as cache_key
import flux_inductor.runtime.detect as detect
from flux_inductor.backend import flux_inductor as backend
from flux_inductor.options import Options
from flux_inductor.planning.installed import CPU_ONLY
from flux_inductor.tools import kept
from flux_inductor.tools.report import GraphReport
from tests.backend.programs import fake_ranks, inputs, pair
from tests.support.ranks import run_ranks


@pytest.fixture(autouse=True)
def _empty_cache() -> Iterator[None]:
    with fresh_cache(), config.patch(fx_graph_cache=True):
        yield


def _compile(**options: object) -> tuple[GraphReport, ...]:
    """Compiles forward and backward as a new process would; returns their part of the report."""
    torch._dynamo.reset()
    before = len(flux_inductor.report().graphs)
    with flux_inductor.options(strategy="always"), flux_inductor.options(**options):
        *arguments, _ = inputs(requires_grad=True)
        torch.autograd.grad(torch.compile(pair, backend=backend)(*arguments).sum(), arguments)
    return flux_inductor.report().graphs[before:]


def _decisions(graphs: tuple[GraphReport, ...]) -> list[tuple[str, str, str]]:
    return [(r.graph.split()[0], r.op, r.plan) for graph in graphs for r in graph.records]


def test_a_cached_graph_keeps_its_records() -> None:
    with fake_ranks(2):
        cold, warm = _compile(), _compile()
    assert [graph.cached for graph in cold] == [False, False]
    assert [graph.cached for graph in warm] == [True, True]
    assert _decisions(cold) == _decisions(warm)
    assert [decision[:2] for decision in _decisions(warm)] == [
        ("forward", "all_gather"),
        ("backward", "reduce_scatter"),
    ]


@pytest.mark.parametrize(
    "options",
    [{"strategy": "never"}, {"strict": True}, {"topology": "cpu ranks=2 nodes=2 link=shm"}],
    ids=lambda options: next(iter(options)),
)
def test_another_option_misses(options: dict[str, object]) -> None:
    with fake_ranks(2):
        _compile()
        assert [graph.cached for graph in _compile(**options)] == [False, False]


@pytest.mark.parametrize(
    "variable", ["LOCAL_WORLD_SIZE", "SLURM_STEP_NUM_NODES", "OMPI_COMM_WORLD_LOCAL_SIZE"]
)
def test_another_layout_of_the_ranks_misses(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    key = cache_key.cache_key(Options(), CPU_ONLY)
    monkeypatch.setenv(variable, "3")
    assert cache_key.cache_key(Options(), CPU_ONLY) != key


def test_another_version_of_the_sources_misses(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_ranks(2):
        _compile()
        monkeypatch.setattr(cache_key, "_sources", lambda: "changed")
        assert [graph.cached for graph in _compile()] == [False, False]


def test_records_that_cannot_be_kept_are_missed_in_the_report_alone(caplog: pytest.LogCaptureFixture) -> None:
    Path(cache_dir(), "flux_inductor").write_text("in the way")
    with fake_ranks(2):
        assert [graph.cached for graph in _compile()] == [False, False]
        assert "TORCHINDUCTOR_CACHE_DIR" in caplog.text
        (graph,) = _compile()
    assert graph.cached
    assert "no collective of it is on record" in str(graph)


def test_graphs_that_differ_inside_a_checkpoint_have_different_keys() -> None:
    keys = []

    def note_key(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        keys.append(kept.key_of(gm, example_inputs))
        return gm.forward

    for body in (torch.sin, torch.cos, torch.sin):
        torch._dynamo.reset()
        x = torch.ones(4, requires_grad=True)
        torch.compile(partial(checkpoint, body, use_reentrant=False), backend=note_key)(x)
    assert keys[0] == keys[2] != keys[1]


def _train(rank: int, world: int, folder: str) -> tuple[Any, ...]:
    # Ranks that share a folder may find in it what the other has just compiled.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(folder, str(rank)))
    *arguments, _ = inputs(rank, requires_grad=True)
    with flux_inductor.options(strategy="always"):
        result = torch.compile(pair, backend=backend)(*arguments)
        gradients = torch.autograd.grad(result.square().sum(), arguments)
    report = flux_inductor.report()
    hits = counters["aot_autograd"]["autograd_cache_hit"], counters["inductor"]["fxgraph_cache_hit"]
    return [value.tolist() for value in (result, *gradients)], report, hits


def _train_apart(rank: int, world: int, folder: str) -> tuple[Any, ...]:
    """On two hosts, started by something that does not say so in the environment."""
    detect.host_identity = lambda: f"host{rank}"  # type: ignore[assignment]
    return _train(rank, world, folder)


def test_a_second_program_finds_its_graphs_and_runs_them_alike() -> None:
    cold, warm, apart = (
        run_ranks(program, 2, cache_dir(), timeout=120) for program in (_train, _train, _train_apart)
    )
    for (values, report, hits), (apart_values, apart_report, apart_hits) in zip(warm, apart, strict=True):
        assert apart_hits == hits
        assert _decisions(apart_report.graphs) == _decisions(report.graphs)
        for value, apart_value in zip(values, apart_values, strict=True):
            torch.testing.assert_close(torch.tensor(apart_value), torch.tensor(value))
        assert {run.engine for run in report.executions} == {"cpu"}
        assert {run.engine for run in apart_report.executions} == {"unfused"}
    for (cold_values, cold_report, cold_hits), (values, report, hits) in zip(cold, warm, strict=True):
        assert cold_hits == (0, 0)
        assert hits == (1, 2)
        assert values == cold_values
        assert all(graph.cached for graph in report.graphs)
        assert _decisions(report.graphs) == _decisions(cold_report.graphs)
        assert report.executions == cold_report.executions
