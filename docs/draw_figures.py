"""Draws the documentation's figures: `python docs/draw_figures.py` rewrites docs/images/*.svg.

The pictures of real runs (losses.png, timeline.png) come from the example instead:
`python -m examples.llama_bytes --out docs/images`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

IMAGES = Path(__file__).resolve().parent / "images"
FOLDERS = {  # colour of each folder, paler than the text on it
    "yours": "#EEEEEE",
    "flux_inductor": "#FFE3B3",
    "passes": "#BFE0F5",
    "planning": "#BFE8D9",
    "runtime": "#F3D3E5",
    "csrc": "#F9CDB5",
    "torch": "#FFFFFF",
}


@dataclass(frozen=True)
class Box:
    """A box of the architecture figure; `x`, `y` are its centre."""

    x: float
    y: float
    name: str
    where: str
    folder: str


WIDTH, HEIGHT = 2.3, 0.86
BOXES = {
    "model": Box(1.3, 4.1, "your model", "DTensor, Megatron-style,\ntorch.distributed", "yours"),
    "backend": Box(
        4.2, 4.1, "torch.compile backend", "flux_inductor/backend.py,\noptions.py", "flux_inductor"
    ),
    "graph": Box(7.1, 4.1, "FX graph", "torch: post-grad,\nforward and backward", "torch"),
    "pass": Box(10.0, 4.1, "recognise: Site", "passes/", "passes"),
    "report": Box(4.2, 2.6, "report", "flux_inductor/tools/\nreport.py, explain.py", "flux_inductor"),
    "strategy": Box(10.0, 2.6, "Problem → Plan", "planning/: topology,\ncost, strategy", "planning"),
    "node": Box(7.1, 2.6, "one op node", 'all_gather_matmul(x, [w], group,\n"mesh push chunk=64")', "passes"),
    "code": Box(1.3, 0.35, "compiled code", "torch: Inductor", "torch"),
    "ops": Box(4.2, 0.35, "op", "flux_inductor/ops.py", "flux_inductor"),
    "engine": Box(7.1, 0.35, "engine", "runtime/: engine, groups,\ndetect", "runtime"),
    "reference": Box(10.0, 1.3, "reference", "collective, then matmul", "runtime"),
    "cpu": Box(10.0, 0.35, "cpu", "csrc/cpu: shared memory,\nchunk by chunk", "csrc"),
    "cuda": Box(10.0, -0.6, "cuda", "csrc/cuda: copy engines,\nkernels that wait for signals", "csrc"),
}
ARROWS = (
    ("model", "backend"),
    ("backend", "graph"),
    ("graph", "pass"),
    ("pass", "strategy"),
    ("strategy", "node"),
    ("node", "report"),
    ("code", "ops"),
    ("ops", "engine"),
    ("engine", "reference"),
    ("engine", "cpu"),
    ("engine", "cuda"),
)


def draw_architecture() -> Figure:
    """The way of the data: compile time above, run time below; a colour for each folder."""
    figure = Figure(figsize=(11.4, 6.2))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, 11.4)
    axes.set_ylim(-1.15, 5.05)
    axes.axis("off")
    axes.add_patch(Rectangle((0.05, 1.98), 11.3, 3.02, facecolor="#FAFAFA", edgecolor="#BBBBBB"))
    axes.add_patch(Rectangle((0.05, -1.1), 11.3, 2.9, facecolor="#FAFAFA", edgecolor="#BBBBBB"))
    axes.text(0.15, 4.78, "compile time, once for each graph", fontsize=11, color="#666666")
    axes.text(1.45, 1.5, "run time, every step", fontsize=11, color="#666666")
    for start, end in ARROWS:
        _arrow(axes, BOXES[start], BOXES[end])
    # The rewritten graph becomes the compiled code: between the two frames to the left.
    node, code, between = BOXES["node"], BOXES["code"], 1.89
    axes.plot((node.x, node.x, code.x), (node.y - HEIGHT / 2, between, between), color="#444444", linewidth=1)
    _head(axes, (code.x, between), (code.x, code.y + HEIGHT / 2))
    for box in BOXES.values():
        _box(axes, box)
    return figure


def _box(axes: Axes, box: Box) -> None:
    corner = (box.x - WIDTH / 2, box.y - HEIGHT / 2)
    shape = FancyBboxPatch(
        corner, WIDTH, HEIGHT, boxstyle="round,pad=0.02", facecolor=FOLDERS[box.folder], edgecolor="#444444"
    )
    axes.add_patch(shape)
    axes.text(box.x, box.y + 0.2, box.name, ha="center", va="center", fontsize=12, weight="bold")
    axes.text(box.x, box.y - 0.17, box.where, ha="center", va="center", fontsize=8.5, linespacing=1.15)


def _arrow(axes: Axes, start: Box, end: Box) -> None:
    """From the middle of one box's side to the middle of the other's."""
    if start.x == end.x:
        sign = 1 if end.y > start.y else -1
        _head(axes, (start.x, start.y + sign * HEIGHT / 2), (end.x, end.y - sign * HEIGHT / 2))
    else:
        sign = 1 if end.x > start.x else -1
        _head(axes, (start.x + sign * WIDTH / 2, start.y), (end.x - sign * WIDTH / 2, end.y))


def _head(axes: Axes, tail: tuple[float, float], head: tuple[float, float]) -> None:
    arrow = FancyArrowPatch(
        tail, head, arrowstyle="-|>", mutation_scale=14, color="#444444", shrinkA=0, shrinkB=2
    )
    axes.add_patch(arrow)


# A call of each op as two ranks see it, with two chunks a shard: (rank, lane, start, length, text, owner).
# Owner -1 is a wait.
GATHER = (
    (0, 0, 0.1, 2.0, "push 0", 0),
    (0, 0, 2.2, 2.0, "push 1", 0),
    (0, 1, 0.0, 3.0, "mm own", 0),
    (0, 1, 3.0, 1.5, "mm 0", 1),
    (0, 1, 4.5, 0.5, "", -1),
    (0, 1, 5.0, 1.5, "mm 1", 1),
    (1, 0, 0.7, 2.0, "push 0", 1),
    (1, 0, 2.8, 2.0, "push 1", 1),
    (1, 1, 0.6, 3.0, "mm own", 1),
    (1, 1, 3.6, 1.5, "mm 0", 0),
    (1, 1, 5.1, 1.5, "mm 1", 0),
)
SCATTER = (
    (0, 1, 0.0, 1.5, "mm 0", 1),
    (0, 1, 1.5, 1.5, "mm 1", 1),
    (0, 1, 3.0, 2.4, "mm own", 0),
    (0, 1, 5.4, 0.4, "+0", 0),
    (0, 1, 5.8, 0.4, "+1", 0),
    (0, 0, 1.6, 1.2, "push 0", 1),
    (0, 0, 3.1, 1.2, "push 1", 1),
    (1, 1, 0.6, 1.5, "mm 0", 0),
    (1, 1, 2.1, 1.5, "mm 1", 0),
    (1, 1, 3.6, 2.4, "mm own", 1),
    (1, 1, 6.0, 0.4, "+0", 1),
    (1, 1, 6.4, 0.4, "+1", 1),
    (1, 0, 2.2, 1.2, "push 0", 0),
    (1, 0, 3.7, 1.2, "push 1", 0),
)
OWNERS = ("#9CCBEA", "#FFD28A")


def draw_protocol() -> Figure:
    """One call of each op on two ranks as blocks on a time axis, with the signals as arrows."""
    figure = Figure(figsize=(10.5, 5.4), layout="constrained")
    for axes, title, blocks in zip(
        figure.subplots(2, 1),
        ("all_gather_matmul: the own shard first, then chunk by chunk as they arrive",
         "matmul_reduce_scatter: the peers' chunks first, then the own shard, then the sums"),
        (GATHER, SCATTER),
        strict=True,
    ):  # fmt: skip
        for rank, lane, start, length, text, owner in blocks:
            level = rank * 2.4 + lane
            face = "#E5E5E5" if owner < 0 else OWNERS[owner]
            hatch = "////" if owner < 0 else None
            axes.barh(level, length, left=start, height=0.8, color=face, edgecolor="#666666", hatch=hatch)
            axes.text(start + length / 2, level, text, ha="center", va="center", fontsize=9)
        _signals(axes, blocks)
        axes.set_yticks((0, 1, 2.4, 3.4), ("rank 0 moves", "multiplies", "rank 1 moves", "multiplies"))
        axes.invert_yaxis()
        axes.set_xticks(())
        axes.set_xlabel("time →", loc="right")
        axes.set_title(title, loc="left", fontsize=11)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _signals(axes: Axes, blocks: tuple[tuple[int, int, float, float, str, int], ...]) -> None:
    """An arrow from the end of each transfer to the first block of the other rank that needs the chunk."""
    for rank, lane, start, length, text, owner in blocks:
        if lane != 0:
            continue
        moved = start + length
        chunk = text.removeprefix("push ")
        target = next(
            begin
            for other, row, begin, _, words, whose in blocks
            if other != rank and row == 1 and whose == owner and words in (f"mm {chunk}", f"+{chunk}")
        )
        tail = (moved, rank * 2.4)
        head = (max(target, moved) + 0.05, (1 - rank) * 2.4 + 1)
        axes.annotate("", head, tail, arrowprops={"arrowstyle": "->", "color": "#C0392B", "linewidth": 1})


# One SM of each fused kernel, schematically: (lane, start, length, text, kind). A tile is a letter; r is a
# remote tile, l a local one. Kinds: 0 local, 1 remote, 2 a wait, 3 a transfer.
KERNEL_LANES = ("producer warp", "MMA warps", "store warp")
KERNEL_GATHER = (
    (0, 0.2, 2.6, "push chunk 0", 3),
    (0, 2.9, 2.6, "push chunk 1", 3),
    (1, 0.0, 1.6, "load l0", 0),
    (1, 1.6, 1.6, "load l1", 0),
    (1, 3.2, 1.6, "load r0", 1),
    (1, 4.8, 0.7, "wait", 2),
    (1, 5.5, 1.6, "load r1", 1),
    (2, 0.3, 1.6, "l0", 0),
    (2, 1.9, 1.6, "l1", 0),
    (2, 3.5, 1.6, "r0", 1),
    (2, 5.8, 1.6, "r1", 1),
    (3, 1.9, 0.7, "l0", 0),
    (3, 3.5, 0.7, "l1", 0),
    (3, 5.1, 0.7, "r0", 1),
    (3, 7.4, 0.7, "r1", 1),
)
KERNEL_GATHER_SIGNALS = (((2.8, 0), (3.2, 1)), ((5.5, 0), (5.55, 1)))
KERNEL_SCATTER = (
    (0, 2.7, 1.7, "push chunk 0", 3),
    (0, 4.6, 1.7, "push chunk 1", 3),
    (1, 0.0, 1.6, "load r0", 1),
    (1, 1.6, 1.6, "load r1", 1),
    (1, 3.2, 1.6, "load l0", 0),
    (1, 4.8, 0.5, "partial", 3),
    (1, 5.3, 1.6, "load l1", 0),
    (1, 6.9, 0.5, "partial", 3),
    (2, 0.3, 1.6, "r0", 1),
    (2, 2.1, 1.6, "r1", 1),
    (2, 3.9, 1.6, "l0", 0),
    (2, 5.5, 0.4, "+", 3),
    (2, 6.0, 1.5, "l1", 0),
    (2, 7.5, 0.4, "+", 3),
    (3, 2.0, 0.7, "r0", 1),
    (3, 3.8, 0.7, "r1", 1),
    (3, 5.9, 0.7, "l0", 0),
    (3, 7.9, 0.7, "l1", 0),
)
KERNEL_SCATTER_SIGNALS = (((2.7, 3), (2.72, 0)), ((4.5, 3), (4.6, 0)))
KINDS = ("#9CCBEA", "#FFD28A", "#E5E5E5", "#BFE8D9")


def draw_kernel() -> Figure:
    """What the warps of one SM and the copy stream do over time, with the waits that join them."""
    figure = Figure(figsize=(10.5, 5.6), layout="constrained")
    panels = (
        ("all_gather_matmul: local tiles need no wait; a remote tile's first load waits for its chunk",
         "peer's copy stream", KERNEL_GATHER, KERNEL_GATHER_SIGNALS),
        ("matmul_reduce_scatter: remote tiles first; local tiles add the partials that have arrived",
         "own copy stream", KERNEL_SCATTER, KERNEL_SCATTER_SIGNALS),
    )  # fmt: skip
    for axes, (title, copies, blocks, signals) in zip(figure.subplots(2, 1), panels, strict=True):
        for lane, start, length, text, kind in blocks:
            hatch = "////" if kind == 2 else None
            axes.barh(
                lane, length, left=start, height=0.8, color=KINDS[kind], edgecolor="#666666", hatch=hatch
            )
            axes.text(start + length / 2, lane, text, ha="center", va="center", fontsize=8.5)
        for tail, head in signals:
            axes.annotate(
                "", head, tail, arrowprops={"arrowstyle": "->", "color": "#C0392B", "linewidth": 1.2}
            )
        axes.set_yticks(range(4), (copies, *KERNEL_LANES))
        axes.invert_yaxis()
        axes.set_xticks(())
        axes.set_xlim(-0.1, 8.8)
        axes.set_xlabel("time → (schematic)", loc="right")
        axes.set_title(title, loc="left", fontsize=11)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def main(folder: Path) -> None:
    # No date and no random identifiers: the same figure is the same file.
    matplotlib.rcParams["svg.hashsalt"] = "flux_inductor"
    folder.mkdir(parents=True, exist_ok=True)
    draw_architecture().savefig(folder / "architecture.svg", metadata={"Date": None})
    draw_protocol().savefig(folder / "protocol.svg", metadata={"Date": None})
    draw_kernel().savefig(folder / "kernel.svg", metadata={"Date": None})


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else IMAGES)
