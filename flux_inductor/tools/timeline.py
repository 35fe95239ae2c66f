"""A picture of one fused op: when each chunk moved, when it was multiplied, and who waited, on every rank.

The events come from `flux_inductor.runtime.trace.record_trace()` on each rank of one host, where all ranks
share a clock; gather them (they are plain data) and draw them together. Needs matplotlib (extra "demo").
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flux_inductor.runtime.trace import TraceEvent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# By the rank that owns a chunk: Okabe and Ito's palette, which colour-blind people can tell apart.
OWNER_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
WAIT_COLOUR = "#DDDDDD"
LANE = 0.8  # height of a lane's bars; lanes are 1 apart, ranks 2.5
RANK_STEP = 2.5
NARROWEST_LABEL = 0.022  # of the picture's width: no number is written into a narrower bar
NARROWEST_BAR = 0.004  # likewise: what takes less time is drawn as wide as this, so that it can be seen


def draw_timeline(events: Sequence[TraceEvent], path: str | Path, title: str = "") -> None:
    """Writes `timeline_figure` to `path` as PNG, SVG or PDF, by its suffix."""
    timeline_figure(events, title).savefig(path, dpi=150)


def timeline_figure(events: Sequence[TraceEvent], title: str = "") -> Figure:
    """A figure with two lanes for each rank.

    The upper lane shows the transfers that the rank executed, the lower one its multiplications and waits.
    The number in a bar is the chunk's index in its owner's shard; the colour tells the owner. A rank
    multiplies its own shard as one.

    Args:
        events: of one call of one op, from all ranks, in any order.
        title: text above it.

    Raises:
        ValueError: no events.
        ModuleNotFoundError: matplotlib is not installed.
    """
    if not events:
        raise ValueError("no events to draw; record a call that runs fused, on the cpu engine")
    from matplotlib.figure import Figure

    ranks = sorted({event.rank for event in events})
    figure = Figure(figsize=(11, 1.2 + 1.15 * len(ranks)), layout="constrained")
    axes = figure.subplots()
    _draw_lanes(axes, events, ranks)
    _label(axes, events, ranks)
    axes.set_title(title, loc="left", fontsize=11)
    return figure


def _draw_lanes(axes: Axes, events: Sequence[TraceEvent], ranks: list[int]) -> None:
    origin = min(event.start_ns for event in events)
    width = (max(event.stop_ns for event in events) - origin) / 1000
    for event in events:
        start = (event.start_ns - origin) / 1000
        length = max((event.stop_ns - event.start_ns) / 1000, NARROWEST_BAR * width)
        lane = ranks.index(event.rank) * RANK_STEP + (event.what != "move")
        wait = event.what == "wait"
        axes.barh(
            lane,
            length,
            left=start,
            height=LANE,
            color=WAIT_COLOUR if wait else OWNER_COLOURS[event.owner % len(OWNER_COLOURS)],
            edgecolor="#888888" if wait else "none",
            hatch="////" if wait else None,
            linewidth=0.5,
        )
        if not wait and length > NARROWEST_LABEL * width:
            own = event.what == "multiply" and event.owner == event.rank
            text = "own" if own else str(event.chunk)
            axes.text(start + length / 2, lane, text, ha="center", va="center", fontsize=8, color="white")


def _label(axes: Axes, events: Sequence[TraceEvent], ranks: list[int]) -> None:
    from matplotlib.patches import Patch

    lanes = [index * RANK_STEP + row for index in range(len(ranks)) for row in (0, 1)]
    axes.set_yticks(lanes, [f"rank {rank}: {word}" for rank in ranks for word in ("moves", "multiplies")])
    axes.invert_yaxis()
    axes.set_xlabel("microseconds since the first event")
    axes.spines[["top", "right"]].set_visible(False)
    owners = sorted({event.owner for event in events})
    legend = [
        Patch(color=OWNER_COLOURS[owner % len(OWNER_COLOURS)], label=f"chunk of rank {owner}")
        for owner in owners
    ]
    legend.append(Patch(facecolor=WAIT_COLOUR, edgecolor="#888888", hatch="////", label="waits"))
    axes.legend(handles=legend, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=9)
