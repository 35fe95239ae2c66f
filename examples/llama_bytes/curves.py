"""Loss curves side by side: as a picture and in the terminal."""

from __future__ import annotations

from pathlib import Path

from examples.llama_bytes.training import Run

COLOURS = {"eager": "#E69F00", "reference": "#9CCBEA", "compiled": "#0072B2"}
PROGRAMS = {"eager": "eager", "reference": "compiled,\nnot fused", "compiled": "compiled"}


def largest_difference(eager: Run, compiled: Run) -> float:
    """The largest |compiled - eager| / eager over all steps."""
    return max(abs(a - b) / a for a, b in zip(eager.losses, compiled.losses, strict=True))


def terminal_plot(eager: Run, compiled: Run, width: int = 64, height: int = 12) -> str:
    """Both curves as text: e is eager, c is compiled, * where they share a place."""
    low = min(*eager.losses, *compiled.losses)
    span = max(*eager.losses, *compiled.losses) - low or 1.0
    steps = len(eager.losses)
    width = min(width, steps)
    grid = [[" "] * width for _ in range(height)]
    for mark, run in (("e", eager), ("c", compiled)):
        for column in range(width):
            loss = run.losses[column * (steps - 1) // max(width - 1, 1)]
            row = round((1 - (loss - low) / span) * (height - 1))
            grid[row][column] = "*" if grid[row][column] not in (" ", mark) else mark
    lines = [
        f"{low + span * (1 - row / (height - 1)):6.3f} |{''.join(cells)}" for row, cells in enumerate(grid)
    ]
    axis = f"{'':7}+{'-' * width}\n{'':8}1{f'step {steps}':>{width - 1}}"
    return "\n".join([*lines, axis, f"{'':8}e eager   c compiled   * both"])


def draw_losses(eager: Run, compiled: Run, speeds: dict[str, float], tolerance: float, path: Path) -> None:
    """A picture of both curves, of their relative difference, and of each program's tokens per second."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    grid = figure.add_gridspec(2, 2, width_ratios=(2.2, 1), height_ratios=(2.2, 1))
    steps = range(1, len(eager.losses) + 1)
    curve = figure.add_subplot(grid[0, 0])
    curve.plot(steps, eager.losses, color=COLOURS["eager"], linewidth=4, alpha=0.6, label="eager")
    curve.plot(steps, compiled.losses, color=COLOURS["compiled"], linewidth=1.5, label="compiled")
    curve.set_ylabel("loss, nats per byte")
    curve.set_title("The same training run twice", loc="left", fontsize=11)
    curve.legend(frameon=False)

    apart = figure.add_subplot(grid[1, 0], sharex=curve)
    differences = [abs(a - b) / a for a, b in zip(eager.losses, compiled.losses, strict=True)]
    apart.semilogy(steps, [max(value, 1e-9) for value in differences], color="#444444", linewidth=1)
    apart.axhline(tolerance, color="#D55E00", linestyle="--", linewidth=1)
    apart.text(1, tolerance, "tolerance", color="#D55E00", fontsize=8, va="bottom")
    apart.set_ylim(top=tolerance * 20)
    apart.set_ylabel("relative\ndifference")
    apart.set_xlabel("step")

    speed = figure.add_subplot(grid[:, 1])
    names = list(PROGRAMS)
    bars = speed.bar(
        [PROGRAMS[name] for name in names],
        [speeds[name] for name in names],
        color=[COLOURS[name] for name in names],
    )
    speed.bar_label(bars, fmt="{:,.0f}")
    speed.set_title("tokens per second", loc="left", fontsize=11)
    for axes in (curve, apart, speed):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
