"""The picture of one op shows every event at its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from flux_inductor.runtime.trace import TraceEvent
from flux_inductor.tools.timeline import OWNER_COLOURS, draw_timeline, timeline_figure

pytest.importorskip("matplotlib")

EVENTS = [
    TraceEvent(0, "move", 0, 0, 1_000_000, 1_030_000),
    TraceEvent(0, "multiply", 0, 0, 1_000_000, 1_050_000),
    TraceEvent(0, "wait", 1, 0, 1_050_000, 1_060_000),
    TraceEvent(0, "multiply", 1, 0, 1_060_000, 1_100_000),
    TraceEvent(1, "move", 1, 0, 1_020_000, 1_060_000),
    TraceEvent(1, "multiply", 1, 0, 1_020_000, 1_070_000),
    TraceEvent(1, "multiply", 0, 0, 1_070_000, 1_110_000),
]


def test_bars_lie_where_the_events_were() -> None:
    from matplotlib.colors import to_hex
    from matplotlib.patches import Rectangle

    (axes,) = timeline_figure(EVENTS, "an op").axes
    bars = set()
    for bar in axes.patches:
        assert isinstance(bar, Rectangle)
        lane = round(bar.get_y() + bar.get_height() / 2, 3)
        bars.add((lane, bar.get_x(), bar.get_width(), to_hex(bar.get_facecolor())))
    own, peer = (colour.lower() for colour in OWNER_COLOURS[:2])
    assert bars == {
        (0.0, 0.0, 30.0, own),
        (1.0, 0.0, 50.0, own),
        (1.0, 50.0, 10.0, "#dddddd"),
        (1.0, 60.0, 40.0, peer),
        (2.5, 20.0, 40.0, peer),
        (3.5, 20.0, 50.0, peer),
        (3.5, 70.0, 40.0, own),
    }
    lanes = [label.get_text() for label in axes.get_yticklabels()]
    assert [text.get_text() for text in axes.texts] == ["0", "own", "0", "0", "own", "0"]
    assert lanes == ["rank 0: moves", "rank 0: multiplies", "rank 1: moves", "rank 1: multiplies"]


def test_writes_a_picture(tmp_path: Path) -> None:
    draw_timeline(EVENTS, tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_nothing_to_draw_is_an_error() -> None:
    with pytest.raises(ValueError, match="no events to draw"):
        timeline_figure([])
