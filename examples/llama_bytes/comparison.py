"""What each rank does: the same training twice, eager and compiled, then a look inside one fused op."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

import flux_inductor
from examples.llama_bytes.text import batches, corpus
from examples.llama_bytes.training import Run, Setting, build, train
from flux_inductor.runtime.trace import TraceEvent, record_trace

CHUNKS = 4  # of a shard, in the op that is looked into


@dataclass(frozen=True)
class Comparison:
    """One rank's results. `unfused` is the compiled program with its fused ops on the reference engine."""

    eager: Run
    compiled: Run
    unfused: Run
    report: flux_inductor.Report
    events: tuple[TraceEvent, ...]
    events_title: str


def compare(setting: Setting, strategy: str) -> Comparison:
    """Runs on every rank of an initialised process group."""
    text = corpus()

    def cuts(steps: int) -> Iterator[Tensor]:
        return batches(text, setting.batch, setting.sequence, steps, setting.seed)

    model = build(setting)
    eager = train(model, model, cuts(setting.steps), setting, "eager")
    model = build(setting)
    forward: Callable[[Tensor], Tensor] = torch.compile(
        model, backend="flux_inductor", options={"strategy": strategy}
    )
    compiled = train(model, forward, cuts(setting.steps), setting, "compiled")
    report = flux_inductor.report()
    with environment(FLUX_INDUCTOR_ENGINE="reference"):
        unfused = train(model, forward, cuts(setting.steps // 3), setting, "reference")
    return Comparison(eager, compiled, unfused, report, *look_inside(setting))


def look_inside(setting: Setting) -> tuple[tuple[TraceEvent, ...], str]:
    """The events of one call of the feed-forward's first op, gather → gate and up, and a title for them."""
    if setting.device != "cpu":
        return (), ""
    world = dist.get_world_size()
    rows, hidden = setting.sequence // world, setting.shape.hidden
    plan = f"mesh push chunk={rows // CHUNKS}"
    shard = torch.randn(setting.batch, rows, hidden)
    weights = [torch.randn(hidden, setting.shape.inner // world) for _ in ("gate", "up")]
    for _ in range(10):  # warm: shared memory is mapped, its pages are touched
        with record_trace() as events:
            flux_inductor.all_gather_matmul(shard, weights, gather_dim=1, plan=plan)
    title = f'all_gather_matmul(x {list(shard.shape)}, [gate, up] {list(weights[0].shape)}, "{plan}")'
    return tuple(events), title


@contextmanager
def environment(**values: str) -> Iterator[None]:
    """Sets environment variables for the time of the block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
