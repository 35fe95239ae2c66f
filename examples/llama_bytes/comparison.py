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
from examples.llama_bytes.model import LanguageModel
from examples.llama_bytes.speed import medians
from examples.llama_bytes.text import batches, corpus
from examples.llama_bytes.training import Run, Setting, Trainer, train
from flux_inductor.runtime.trace import TraceEvent, record_trace

CHUNKS = 4  # of a shard, in the op that is looked into: more than the strategy takes, for something to see
CALLS = 200  # of that op; the quickest is shown


@dataclass(frozen=True)
class Comparison:
    """One rank's results.

    `seconds` are of one step, for "eager", "compiled" and "reference": the compiled program with its fused
    ops on the reference engine, collective then matmul. `calls` are the events of several calls of one op.
    """

    eager: Run
    compiled: Run
    seconds: dict[str, float]
    report: flux_inductor.Report
    calls: tuple[tuple[TraceEvent, ...], ...]
    calls_title: str


def compare(setting: Setting, strategy: str) -> Comparison:
    """Runs on every rank of an initialised process group."""
    text = corpus()

    def compiler(model: LanguageModel) -> Callable[[Tensor], Tensor]:
        compiled: Callable[[Tensor], Tensor] = torch.compile(
            model, backend="flux_inductor", options={"strategy": strategy}
        )
        return compiled

    def run(trainer: Trainer, label: str) -> Run:
        cuts = batches(text, setting.batch, setting.sequence, setting.steps, setting.seed)
        return train(trainer, cuts, label)

    eager, compiled = Trainer(setting, lambda model: model), Trainer(setting, compiler)
    eager_run, compiled_run = run(eager, "eager   "), run(compiled, "compiled")
    report = flux_inductor.report()
    cut = next(batches(text, setting.batch, setting.sequence, 1, setting.seed))

    def reference() -> None:
        with environment(FLUX_INDUCTOR_ENGINE="reference"):
            compiled.step(cut)

    programs = {
        "eager": lambda: eager.step(cut),
        "compiled": lambda: compiled.step(cut),
        "reference": reference,
    }
    seconds = medians(programs, rounds=max(setting.steps // 4, 1))
    return Comparison(eager_run, compiled_run, seconds, report, *look_inside(setting))


def look_inside(setting: Setting) -> tuple[tuple[tuple[TraceEvent, ...], ...], str]:
    """The events of some calls of the feed-forward's last op for one sequence, and a title for them."""
    if setting.device != "cpu":
        return (), ""
    world, shape = dist.get_world_size(), setting.shape
    plan = f"mesh push chunk={setting.sequence // world // CHUNKS}"
    x = torch.randn(1, setting.sequence, shape.inner // world)
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
