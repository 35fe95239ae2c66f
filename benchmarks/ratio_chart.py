"""Bars of ratios in groups, drawn alike for every benchmark, from the JSON that it wrote."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib.axes import Axes

Draw = Callable[[list[dict[str, Any]], dict[str, str], str], None]

COLOURS = {
    "unfused": "#b0b0b0",
    "inductor": "#b0b0b0",
    "async TP": "#e0a458",
    "ours, gathered kept": "#7fb3d5",
    "ours": "#1f618d",
}


def bars(
    panel: Axes,
    groups: Sequence[str],
    ratios: Mapping[str, Sequence[float | None]],
    *,
    numbers: float,
    labels: float,
    highest: float = math.inf,
) -> None:
    """One bar a group for each name in `ratios`, with its number above it, and a line at 1.

    Args:
        ratios: None where there is no bar.
        numbers, labels: sizes of the text above the bars, and below the groups.
        highest: bars are cut off there.
    """
    width = 0.8 / len(ratios)
    for place, (name, of_groups) in enumerate(ratios.items()):
        for index, ratio in enumerate(of_groups):
            if ratio is None:
                continue
            at = index + (place - len(ratios) / 2 + 0.5) * width
            height = min(ratio, highest)
            panel.bar(at, height, width, color=COLOURS[name], label=name if index == 0 else None)
            panel.text(at, height, f"{ratio:.2f}", ha="center", va="bottom", fontsize=numbers)
    panel.axhline(1, color="black", linewidth=0.8)
    panel.set_xticks(range(len(groups)), list(groups), fontsize=labels)
    panel.legend(fontsize=8, ncol=len(ratios))


def main(description: str | None, draw: Draw) -> None:
    """The command line of a chart: the figures, and where the picture goes."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("figures", help="JSON that the benchmark wrote")
    parser.add_argument("picture", help="PNG to write")
    options = parser.parse_args()
    with open(options.figures) as file:
        content = json.load(file)
    draw(content["rows"], content["versions"], options.picture)
