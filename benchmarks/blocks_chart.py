"""A picture of benchmarks/blocks.py's figures: each way's time over that of the program without transfers.

python -m benchmarks.blocks_chart benchmarks/results/blocks.json benchmarks/results/blocks.png
"""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt

from benchmarks.ratio_chart import bars, main

WAYS = ("inductor", "async TP", "ours")
NAMES = {"8b": "8B", "70b": "70B", "70b-long": "70B, S=8192", "tiny": "tiny"}


def draw(rows: list[dict[str, Any]], versions: dict[str, str], path: str) -> None:
    """Writes the picture: one group of bars a shape and mode."""
    programs = list(dict.fromkeys((row["shape"], row["mode"]) for row in rows))
    ms = {(row["shape"], row["mode"], row["candidate"]): row["ms"] for row in rows}

    def ratio(program: tuple[str, str], way: str) -> float | None:
        return ms[(*program, way)] / ms[(*program, "compute")] if (*program, way) in ms else None

    figure, panel = plt.subplots(figsize=(9, 4), constrained_layout=True)
    groups = [f"{NAMES[shape]}\n{mode}" for shape, mode in programs]
    ratios = {way: [ratio(program, way) for program in programs] for way in WAYS}
    bars(panel, groups, ratios, numbers=7, labels=8)
    panel.set_ylim(0.9)
    panel.set_ylabel("time / time without communication")
    device = versions.get("gpu", "CPU ranks")
    panel.set_title(
        f"Llama block, tensor parallel: {device}, torch {versions['torch']}, {versions['date']}", fontsize=9
    )
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main(__doc__, draw)
