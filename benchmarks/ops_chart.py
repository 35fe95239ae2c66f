"""A picture of benchmarks/ops.py's figures: the time of each way over that of the matmul alone, by shape.

python -m benchmarks.ops_chart benchmarks/results/ops.json benchmarks/results/ops.png
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLOURS = {
    "unfused": "#b0b0b0",
    "async TP": "#e0a458",
    "ours, gathered kept": "#7fb3d5",
    "ours": "#1f618d",
}
TITLES = {"all_gather_matmul": "all_gather + matmul", "matmul_reduce_scatter": "matmul + reduce_scatter"}
HIGHEST = 2.7  # ratios beyond are cut off and written


def draw(rows: list[dict[str, Any]], versions: dict[str, str], path: str) -> None:
    """Writes the picture: one panel an op, one group of bars a shape."""
    figure, panels = plt.subplots(len(TITLES), 1, figsize=(11, 8), constrained_layout=True)
    for panel, (op, title) in zip(panels, TITLES.items(), strict=True):
        mine = [row for row in rows if row["op"] == op and row["m"] > 64]
        shapes = list(dict.fromkeys((row["m"], row["n"], row["k"]) for row in mine))
        names = [name for name in COLOURS if any(row["candidate"] == name for row in mine)]
        width = 0.8 / len(names)
        for place, name in enumerate(names):
            ratios = {(r["m"], r["n"], r["k"]): r["ratio"] for r in mine if r["candidate"] == name}
            for index, shape in enumerate(shapes):
                at = index + (place - len(names) / 2 + 0.5) * width
                ratio = ratios[shape]
                label = name if index == 0 else None
                panel.bar(at, min(ratio, HIGHEST), width, color=COLOURS[name], label=label)
                panel.text(at, min(ratio, HIGHEST), f"{ratio:.2f}", ha="center", va="bottom", fontsize=6)
        panel.axhline(1, color="black", linewidth=0.8)
        panel.set_xticks(range(len(shapes)), [f"{m}\n{n} x {k}" for m, n, k in shapes], fontsize=7)
        panel.set_ylim(0.8, HIGHEST + 0.1)
        panel.set_ylabel("time / matmul alone")
        panel.set_title(f"{title}: M, N x K", fontsize=10)
        panel.legend(fontsize=8, ncol=len(names))
    figure.suptitle(f"{versions['gpu']}, torch {versions['torch']}, {versions['date']}", fontsize=9)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("figures", help="JSON that benchmarks.ops wrote")
    parser.add_argument("picture", help="PNG to write")
    options = parser.parse_args()
    with open(options.figures) as file:
        content = json.load(file)
    draw(content["rows"], content["versions"], options.picture)


if __name__ == "__main__":
    main()
