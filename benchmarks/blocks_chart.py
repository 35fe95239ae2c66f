"""A picture of benchmarks/blocks.py's figures: each way's time over that of the program without transfers.

python -m benchmarks.blocks_chart benchmarks/results/blocks.json benchmarks/results/blocks.png
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLOURS = {"inductor": "#b0b0b0", "async TP": "#e0a458", "ours": "#1f618d"}
NAMES = {"8b": "8B", "70b": "70B", "70b-long": "70B, S=8192", "tiny": "tiny"}


def draw(rows: list[dict[str, Any]], versions: dict[str, str], path: str) -> None:
    """Writes the picture: one group of bars a shape and mode."""
    programs = list(dict.fromkeys((row["shape"], row["mode"]) for row in rows))
    ms = {(row["shape"], row["mode"], row["candidate"]): row["ms"] for row in rows}
    figure, panel = plt.subplots(figsize=(9, 4), constrained_layout=True)
    width = 0.8 / len(COLOURS)
    for place, (name, colour) in enumerate(COLOURS.items()):
        for index, program in enumerate(programs):
            if (*program, name) not in ms:
                continue
            ratio = ms[(*program, name)] / ms[(*program, "compute")]
            at = index + (place - len(COLOURS) / 2 + 0.5) * width
            panel.bar(at, ratio, width, color=colour, label=name if index == 0 else None)
            panel.text(at, ratio, f"{ratio:.2f}", ha="center", va="bottom", fontsize=7)
    panel.axhline(1, color="black", linewidth=0.8)
    panel.set_xticks(
        range(len(programs)), [f"{NAMES[shape]}\n{mode}" for shape, mode in programs], fontsize=8
    )
    panel.set_ylim(0.9)
    panel.set_ylabel("time / time without communication")
    panel.legend(fontsize=8, ncol=len(COLOURS))
    device = versions.get("gpu", "CPU ranks")
    panel.set_title(
        f"Llama block, tensor parallel: {device}, torch {versions['torch']}, {versions['date']}", fontsize=9
    )
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("figures", help="JSON that benchmarks.blocks wrote")
    parser.add_argument("picture", help="PNG to write")
    options = parser.parse_args()
    with open(options.figures) as file:
        content = json.load(file)
    draw(content["rows"], content["versions"], options.picture)


if __name__ == "__main__":
    main()
