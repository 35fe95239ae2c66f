"""What was compiled in this process, and its announcement as it happens.

Every graph goes to the logger "flux_inductor" (TORCH_LOGS="+flux_inductor" shows it), to torch's structured
trace (TORCH_TRACE), and with the option `report` also to stderr, followed at the process's end by how often
each engine ran each fused op.
"""

from __future__ import annotations

import logging
import multiprocessing.util
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache

import torch.distributed as dist
from torch._logging._internal import trace_structured

from flux_inductor.passes.record import CollectiveRecord
from flux_inductor.runtime.agreement import unfused_because
from flux_inductor.runtime.engine import executions
from flux_inductor.runtime.groups import workspace_bytes
from flux_inductor.tools import kept
from flux_inductor.tools.report import Executions, GraphReport, Report

logger = logging.getLogger("flux_inductor")

_graphs: list[GraphLog] = []  # in the order in which the backend was entered


class GraphLog:
    """The parts (forward and backward, or inference) of one graph of Dynamo, as they are compiled."""

    def __init__(self, *, to_stderr: bool) -> None:
        self.parts: list[GraphReport] = []
        self._to_stderr = to_stderr  # the option `report`
        self._number = len(_graphs)
        self._key: str | None = None
        self._decided: kept.Kept = {}
        self._ran = False
        _graphs.append(self)

    def keep(self, key: str) -> None:
        """Under which key the records are kept for the time when Inductor has the graph in its cache."""
        self._key = key

    def add(self, records: Sequence[CollectiveRecord]) -> None:
        """The pass has run on one part; the backward's turn may come long after the forward's."""
        self._ran = True
        if records:
            part = records[0].graph.split()[0]
            self._decided[part] = tuple(records)
            self._announce(part, records, cached=False)
        if self._key is not None:
            kept.save(self._key, {**(kept.load(self._key) or {}), **self._decided})

    def entered(self) -> None:
        """Inductor is done with the graph, but for a backward that it may compile later.

        If the pass has not run, the graph came from the cache, and what was kept then is reported.
        """
        if self._ran:
            return
        known = kept.load(self._key) if self._key is not None else None
        if known is None:
            self._announce("graph", (), cached=True)
            return
        for part, records in known.items():
            self._announce(part, records, cached=True)

    def _announce(self, part: str, records: Sequence[CollectiveRecord], *, cached: bool) -> None:
        name = f"{part} {self._number}"
        graph = GraphReport(name, tuple(replace(record, graph=name) for record in records), cached)
        self.parts.append(graph)
        _show(graph, to_stderr=self._to_stderr)


def _show(graph: GraphReport, *, to_stderr: bool) -> None:
    text = str(graph)
    logger.info("%s\n%s", graph.name, text)
    trace_structured(
        "artifact",
        metadata_fn=lambda: {
            "name": f"flux_inductor_{graph.name.replace(' ', '_')}",
            "encoding": "string",
        },
        payload_fn=lambda: text,
    )
    if to_stderr and _first_rank():
        print(f"flux_inductor: {graph.name}\n{text}", file=sys.stderr, flush=True)
        _print_executions_at_exit()


@cache
def _print_executions_at_exit() -> None:
    """Once a process. Unlike atexit's, these finalizers run in the children of multiprocessing too."""
    multiprocessing.util.Finalize(None, _print_executions, exitpriority=0)


def _print_executions() -> None:
    memory = f"workspaces of this rank: {workspace_bytes() / 2**20:.1f} MiB"
    print(f"flux_inductor: {report().executed}; {memory}", file=sys.stderr, flush=True)


def report() -> Report:
    """Everything that this process has compiled, and every fused call that it has run."""
    return since((0, {}))


Mark = tuple[int, dict[tuple[str, str], int]]


def mark() -> Mark:
    """This moment, for `since`: how many graphs were entered, and the executions by op and engine."""
    return len(_graphs), dict(executions())


def since(moment: Mark) -> Report:
    """The report of what was compiled and run after a mark()."""
    graphs, before = moment
    parts = tuple(_as_agreed(part) for graph in _graphs[graphs:] for part in graph.parts)
    ran = ((op, engine, calls - before.get((op, engine), 0)) for (op, engine), calls in executions().items())
    return Report(parts, _sorted(Executions(*run) for run in ran))


def _as_agreed(graph: GraphReport) -> GraphReport:
    """With what ranks have found out together since the graph was compiled."""
    return replace(graph, records=tuple(map(_record_as_agreed, graph.records)))


def _record_as_agreed(record: CollectiveRecord) -> CollectiveRecord:
    why = unfused_because(record.group, record.place) if record.place else ""
    return replace(record, fused=False, plan="", code="ranks-differ", reason=why) if why else record


def _sorted(runs: Iterable[Executions]) -> tuple[Executions, ...]:
    return tuple(sorted((run for run in runs if run.calls), key=lambda run: (run.op, run.engine)))


def _first_rank() -> bool:
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
