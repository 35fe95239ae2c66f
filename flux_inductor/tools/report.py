"""The report: what became of every collective, as objects, as a table, as JSON.

`print(flux_inductor.report())` shows the whole process so far; `flux_inductor.explain` returns the same kind
of object for one function.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from flux_inductor.passes.record import CollectiveRecord

_HEADINGS = (
    "graph",
    "n",
    "collective",
    "group",
    "shapes",
    "outcome",
    "plan",
    "fused us",
    "unfused us",
    "gain",
    "reason",
)
_NUMERIC = frozenset({"n", "fused us", "unfused us", "gain"})


@dataclass(frozen=True)
class GraphReport:
    """The collectives of one compiled graph.

    Args:
        name: "forward 0", "backward 0", "inference 1": which pass of the program, and a count.
        records: one for each collective, in the order of the graph.
        cached: the graph came from Inductor's cache, so nothing was decided in this process: the records, if
            any, are those that the process which compiled it left beside the cache (see tools/kept.py).
    """

    name: str
    records: tuple[CollectiveRecord, ...]
    cached: bool = False

    def __str__(self) -> str:
        return "\n".join([*_table([self]), *_notes([self])])


@dataclass(frozen=True)
class Executions:
    """Calls of one fused op that ran on one engine."""

    op: str
    engine: str
    calls: int


@dataclass(frozen=True)
class Report:
    """Graphs in the order of their compilation, and which engines ran the fused ops since."""

    graphs: tuple[GraphReport, ...]
    executions: tuple[Executions, ...] = ()

    @property
    def records(self) -> tuple[CollectiveRecord, ...]:
        return tuple(record for graph in self.graphs for record in graph.records)

    def __str__(self) -> str:
        lines = [*_table(self.graphs), *_notes(self.graphs), _totals(self.graphs)]
        if self.executions:
            lines.append(self.executed)
        return "\n".join(lines)

    @property
    def executed(self) -> str:
        """How often each engine ran each op, in one line."""
        ran = ", ".join(f"{run.op} on {run.engine} {run.calls}x" for run in self.executions)
        return f"executed: {ran or 'no fused op'}"

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @staticmethod
    def from_json(text: str) -> Report:
        """The inverse of to_json. ValueError if `text` is no report."""
        try:
            data = json.loads(text)
            graphs = tuple(
                GraphReport(
                    graph["name"],
                    tuple(CollectiveRecord(**record) for record in graph["records"]),
                    graph["cached"],
                )
                for graph in data["graphs"]
            )
            return Report(graphs, tuple(Executions(**run) for run in data["executions"]))
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(
                f"not a report of this version of flux_inductor ({error}); pass what Report.to_json returned"
            ) from error


def _table(graphs: Sequence[GraphReport]) -> list[str]:
    """One line for all collectives of a graph that differ in nothing but their place: a model's layers."""
    counts = Counter(_cells(record) for graph in graphs for record in graph.records)
    if not counts:
        return ["no collectives"]
    rows = [(graph, str(count), *cells) for (graph, *cells), count in counts.items()]
    widths = [max(map(len, column)) for column in zip(_HEADINGS, *rows, strict=True)]
    rule = tuple("-" * width for width in widths)
    return [_aligned(row, widths) for row in (_HEADINGS, rule, *rows)]


def _aligned(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = (
        cell.rjust(width) if heading in _NUMERIC else cell.ljust(width)
        for heading, cell, width in zip(_HEADINGS, row, widths, strict=True)
    )
    return "  ".join(cells).rstrip()


def _cells(record: CollectiveRecord) -> tuple[str, ...]:
    gain = ""
    if record.fused_us and record.unfused_us:
        gain = f"{record.unfused_us / record.fused_us:.2f}x"
    return (
        record.graph,
        record.op,
        f"{record.group} ({record.world})" if record.world else record.group,
        record.shapes,
        "fused" if record.fused else f"left: {record.code}",
        record.plan,
        _microseconds(record.fused_us),
        _microseconds(record.unfused_us),
        gain,
        record.reason,
    )


def _microseconds(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _notes(graphs: Sequence[GraphReport]) -> list[str]:
    return [
        f"{graph.name}: loaded from Inductor's cache; "
        + ("decided when it was compiled" if graph.records else "no collective of it is on record")
        for graph in graphs
        if graph.cached
    ]


def _totals(graphs: Sequence[GraphReport]) -> str:
    records = [record for graph in graphs for record in graph.records]
    fused = [record for record in records if record.fused]
    left = Counter(record.code for record in records if not record.fused)
    saved = sum(
        r.unfused_us - r.fused_us for r in fused if r.fused_us is not None and r.unfused_us is not None
    )
    why = f" ({', '.join(f'{code} {count}' for code, count in left.most_common())})" if left else ""
    return (
        f"total: {len(records)} collectives in {len(graphs)} graphs, {len(fused)} fused, "
        f"{left.total()} left{why}; predicted to save {saved:.1f} us a run"
    )
