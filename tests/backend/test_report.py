"""The report as text and as JSON."""

# ruff: noqa: E501 (the table is as wide as it is)

from __future__ import annotations

import json
from dataclasses import replace

import expecttest
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flux_inductor.passes.record import CollectiveRecord
from flux_inductor.tools.report import Executions, GraphReport, Report

FUSED = CollectiveRecord(
    graph="forward 0",
    node="all_gather_into_tensor",
    op="all_gather",
    group="tp",
    world=2,
    shapes="[64,256] x [256,512] bf16",
    fused=True,
    plan="mesh push chunk=64",
    fused_us=80.0,
    unfused_us=100.0,
    code="",
    reason="predicted faster",
)
LEFT = CollectiveRecord(
    graph="backward 0",
    node="all_reduce",
    op="all_reduce",
    group="dp",
    world=4,
    shapes="[8] fp32",
    fused=False,
    plan="",
    fused_us=None,
    unfused_us=None,
    code="no-matmul",
    reason="its result feeds no matmul",
)


class TestText(expecttest.TestCase):
    def test_the_table_is_aligned_and_ends_with_totals(self) -> None:
        twins = (FUSED, replace(FUSED, node="all_gather_into_tensor_1"))
        report = Report(
            (GraphReport("forward 0", twins), GraphReport("backward 0", (LEFT,))),
            (Executions("all_gather_matmul", "cpu", 12),),
        )
        self.assertExpectedInline(
            str(report),
            """\
graph       n  collective  group   shapes                     outcome          plan                fused us  unfused us   gain  reason
----------  -  ----------  ------  -------------------------  ---------------  ------------------  --------  ----------  -----  --------------------------
forward 0   2  all_gather  tp (2)  [64,256] x [256,512] bf16  fused            mesh push chunk=64      80.0       100.0  1.25x  predicted faster
backward 0  1  all_reduce  dp (4)  [8] fp32                   left: no-matmul                                                   its result feeds no matmul
total: 3 collectives in 2 graphs, 2 fused, 1 left (no-matmul 1); predicted to save 40.0 us a run
executed: all_gather_matmul on cpu 12x""",
        )

    def test_a_graph_from_the_cache_says_so(self) -> None:
        known = GraphReport("forward 0", (FUSED,), cached=True)
        self.assertExpectedInline(
            str(Report((known,))),
            """\
graph      n  collective  group   shapes                     outcome  plan                fused us  unfused us   gain  reason
---------  -  ----------  ------  -------------------------  -------  ------------------  --------  ----------  -----  ----------------
forward 0  1  all_gather  tp (2)  [64,256] x [256,512] bf16  fused    mesh push chunk=64      80.0       100.0  1.25x  predicted faster
forward 0: loaded from Inductor's cache; decided when it was compiled
total: 1 collectives in 1 graphs, 1 fused, 0 left; predicted to save 20.0 us a run""",
        )
        unknown = GraphReport("graph 0", (), cached=True)
        self.assertExpectedInline(
            str(Report((unknown,))),
            """\
no collectives
graph 0: loaded from Inductor's cache; no collective of it is on record
total: 0 collectives in 1 graphs, 0 fused, 0 left; predicted to save 0.0 us a run""",
        )


_TEXT = st.text(max_size=8)
_MICROSECONDS = st.none() | st.floats(0, 1e6)
_RECORDS = st.builds(
    CollectiveRecord,
    graph=_TEXT,
    node=_TEXT,
    op=_TEXT,
    group=_TEXT,
    world=st.integers(1, 64),
    shapes=_TEXT,
    fused=st.booleans(),
    plan=_TEXT,
    fused_us=_MICROSECONDS,
    unfused_us=_MICROSECONDS,
    code=_TEXT,
    reason=_TEXT,
)
_GRAPHS = st.builds(GraphReport, _TEXT, st.lists(_RECORDS, max_size=3).map(tuple), st.booleans())
_RUNS = st.builds(Executions, _TEXT, _TEXT, st.integers(1, 10**9))
_REPORTS = st.builds(Report, st.lists(_GRAPHS, max_size=3).map(tuple), st.lists(_RUNS, max_size=3).map(tuple))


@given(_REPORTS)
def test_json_returns_the_same_report(report: Report) -> None:
    assert Report.from_json(report.to_json()) == report


@given(_REPORTS)
def test_the_totals_count_every_record(report: Report) -> None:
    total = str(report).rpartition("total: ")[2]
    fused = sum(record.fused for record in report.records)
    left = len(report.records) - fused
    assert total.startswith(
        f"{len(report.records)} collectives in {len(report.graphs)} graphs, {fused} fused, "
    )
    assert f" {left} left" in total


@pytest.mark.parametrize("text", ["", "[]", '{"graphs": []}', json.dumps({"graphs": [{}], "executions": []})])
def test_what_is_no_report_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a report"):
        Report.from_json(text)
