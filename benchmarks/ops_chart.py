"""A picture of benchmarks/ops.py's figures: the time of each way over that of the matmul alone, by shape.

python -m benchmarks.ops_chart benchmarks/results/ops.json benchmarks/results/ops.png
"""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt

from benchmarks.ratio_chart import bars, main

WAYS = ("unfused", "async TP", "ours, gathered kept", "ours")
TITLES = {"all_gather_matmul": "all_gather + matmul", "matmul_reduce_scatter": "matmul + reduce_scatter"}
HIGHEST = 2.7  # ratios beyond are cut off and written


def draw(rows: list[dict[str, Any]], versions: dict[str, str], path: str) -> None:
    """Writes the picture: one panel an op, one group of bars a shape."""
    figure, panels = plt.subplots(len(TITLES), 1, figsize=(11, 8), constrained_layout=True)
    for panel, (op, title) in zip(panels, TITLES.items(), strict=True):
        mine = [row for row in rows if row["op"] == op and row["m"] > 64]
        shapes = list(dict.fromkeys((row["m"], row["n"], row["k"]) for row in mine))
        known = {(row["candidate"], row["m"], row["n"], row["k"]): row["ratio"] for row in mine}
        ways = [way for way in WAYS if any(row["candidate"] == way for row in mine)]
        groups = [f"{m}\n{n} x {k}" for m, n, k in shapes]
        ratios = {way: [known[(way, *shape)] for shape in shapes] for way in ways}
        bars(panel, groups, ratios, numbers=6, labels=7, highest=HIGHEST)
        panel.set_ylim(0.8, HIGHEST + 0.1)
        panel.set_ylabel("time / matmul alone")
        panel.set_title(f"{title}: M, N x K", fontsize=10)
    figure.suptitle(f"{versions['gpu']}, torch {versions['torch']}, {versions['date']}", fontsize=9)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main(__doc__, draw)
