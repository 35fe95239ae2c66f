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

CHUNKS = 4  # of a shard, in the op that is looked into: more than the strategy takes, for something to see
CALLS = 30  # of that op; the quickest is shown


@dataclass(frozen=True)
class Comparison:
    """One rank's results.

    `unfused` is the compiled program with its fused ops on the reference engine; `calls` are the events of
    several calls of one op.
    """

    eager: Run
    compiled: Run
    unfused: Run
    report: flux_inductor.Report
    calls: tuple[tuple[TraceEvent, ...], ...]
    calls_title: str


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
        unfused = train(model, forward, cuts(max(setting.steps // 4, 1)), setting, "reference")
    return Comparison(eager, compiled, unfused, report, *look_inside(setting))


def look_inside(setting: Setting) -> tuple[tuple[tuple[TraceEvent, ...], ...], str]:
    """The events of some calls of the feed-forward's last op, down → reduce_scatter, and a title for them."""
    if setting.device != "cpu":
        return (), ""
    world, shape = dist.get_world_size(), setting.shape
    plan = f"mesh push chunk={setting.sequence // world // CHUNKS}"
    x = torch.randn(setting.batch, setting.sequence, shape.inner // world)
    down = torch.randn(shape.inner // world, shape.hidden)
    calls = []
    for _ in range(CALLS):
        dist.barrier()
        with record_trace() as events:
            flux_inductor.matmul_reduce_scatter(x, down, scatter_dim=1, plan=plan)
        calls.append(tuple(events))
    title = f'matmul_reduce_scatter(x {list(x.shape)}, down {list(down.shape)}, "{plan}")'
    return tuple(calls), title


def quickest(results: list[Comparison]) -> list[TraceEvent]:
    """All ranks' events of the call that took least time from its first event to its last."""
    calls = [
        [event for part in parts for event in part] for parts in zip(*(r.calls for r in results), strict=True)
    ]

    def span(events: list[TraceEvent]) -> int:
        return max(event.stop_ns for event in events) - min(event.start_ns for event in events)

    return min(filter(None, calls), key=span, default=[])


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
