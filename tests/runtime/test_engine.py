"""The choice of the engine, its counters, traces, topology, and the stress test's short form."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from flux_inductor.planning.ops import ALL_GATHER_MATMUL
from flux_inductor.planning.plan import UNFUSED, Plan
from flux_inductor.runtime import cpu_group, trace
from flux_inductor.runtime.detect import publish_host, topology_of
from flux_inductor.runtime.engine import engine_for, executions, reset_executions
from flux_inductor.runtime.groups import name_of
from tests.support.engines import bind_gather
from tests.support.ranks import run_ranks

FUSED = Plan("mesh", "push", 2)


def choices(rank: int, world: int) -> None:
    def engine(plan: Plan, device: str = "cpu", group: str = "0") -> str:
        return engine_for(ALL_GATHER_MATMUL, device, group, plan).name

    reset_executions()
    assert engine(FUSED) == "cpu"
    assert engine(UNFUSED) == "unfused"
    os.environ["FLUX_INDUCTOR_ENGINE"] = "reference"
    assert engine(FUSED) == engine(UNFUSED) == "reference"
    os.environ["FLUX_INDUCTOR_ENGINE"] = "auto"
    assert engine(FUSED) == "cpu"
    counts = {"cpu": 2, "unfused": 1, "reference": 2}
    assert executions() == {("all_gather_matmul", name): count for name, count in counts.items()}
    os.environ["FLUX_INDUCTOR_ENGINE"] = "fast"
    with pytest.raises(ValueError, match="FLUX_INDUCTOR_ENGINE='fast'; it must be one of auto, reference"):
        engine(FUSED)
    del os.environ["FLUX_INDUCTOR_ENGINE"]
    with pytest.raises(ValueError, match="no fused engine for device 'mps'"):
        engine(FUSED, "mps")
    with pytest.raises(ValueError, match="all_gather_matmul on cpu cannot 'store'; valid: push, pull"):
        engine(Plan("mesh", "store", 2))
    with pytest.raises(ValueError, match="no process group 'tp' on this rank"):
        engine(FUSED, "cpu", "tp")
    assert sum(executions().values()) == 5, "a call that cannot run is not counted"


def traces(rank: int, world: int) -> None:
    x, weight = torch.randn(5, 8), torch.randn(8, 4)
    cpu_group.INLINE_BYTES = 0  # the transfer thread's events are seen from the caller's side
    for direction in ("push", "pull"):
        plan = Plan("mesh", direction, 2)  # type: ignore[arg-type]
        engine = engine_for(ALL_GATHER_MATMUL, "cpu", "0", plan)
        run = bind_gather(engine, x, [weight], [], "0", plan, 0, False)
        with trace.record_trace() as events:
            run(x, [weight], [])
        with (
            pytest.raises(RuntimeError, match="being recorded already"),
            trace.record_trace(),
            trace.record_trace(),
        ):
            pass
        run(x, [weight], [])
        chunks = {
            what: [(e.owner, e.chunk) for e in events if e.what == what]
            for what in ("wait", "multiply", "move")
        }
        peer = 1 - rank
        peers = [(peer, 0), (peer, 1), (peer, 2)]
        assert chunks["wait"] == peers
        assert chunks["multiply"] == [(rank, 0), *peers]
        assert chunks["move"] == (peers if direction == "pull" else [(rank, 0), (rank, 1), (rank, 2)])
        assert all(event.rank == rank and event.start_ns <= event.stop_ns for event in events)
        began = min(event.start_ns for event in events)
        assert max(event.stop_ns for event in events) - began < 30e9, "all on one clock"


def topologies(rank: int, world: int) -> None:
    publish_host()
    assert str(topology_of("0", "cpu")) == f"cpu ranks={world} nodes=1 link=shm"
    with pytest.raises(ValueError, match="no engine for device 'mps'"):
        topology_of("0", "mps")
    alone, _ = dist.new_subgroups(1)
    assert str(topology_of(name_of(alone), "cpu")) == "cpu ranks=1 nodes=1 link=shm shared=yes"
    assert name_of(None) == "0"
    with pytest.raises(ValueError, match="not in the group"):
        name_of(-100)  # type: ignore[arg-type]  # what torch returns to ranks outside a new group


def all_of_it(rank: int, world: int) -> None:
    choices(rank, world)
    traces(rank, world)
    topologies(rank, world)


def test_choices_traces_and_topology() -> None:
    run_ranks(all_of_it, 2)


def test_without_torch_distributed() -> None:
    with pytest.raises(ValueError, match=r"torch\.distributed is not initialised"):
        name_of(None)
    publish_host()  # nobody to tell
