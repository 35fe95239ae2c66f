"""python -m examples.llama_bytes: trains a language model on two ranks, eager and compiled, and compares."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

from examples.llama_bytes.comparison import Comparison, compare, quickest
from examples.llama_bytes.curves import draw_losses, largest_difference, terminal_plot
from examples.llama_bytes.launch import run_on_ranks
from examples.llama_bytes.training import Setting, setting_for
from flux_inductor import _core
from flux_inductor.tools.timeline import draw_timeline

WORLD = 2
# Largest relative difference of the two loss curves. Compiled code adds in another order than eager code, and
# training amplifies each rounding, so the curves drift apart slowly; a wrong result differs by far more.
TOLERANCE = {"cpu": 1e-3, "cuda": 0.05}  # float32, bfloat16


def main() -> int:
    arguments = parse()
    setting = setting_for(arguments.device, arguments.steps)
    began = time.monotonic()
    print(
        f"A Llama-style model of {setting.shape.layers} layers and hidden size {setting.shape.hidden} learns "
        f"this project's documentation,\n{setting.steps} steps of {setting.tokens} bytes, on {WORLD} ranks "
        f"({setting.device}): first eager, then compiled with backend='flux_inductor'.\n",
        flush=True,
    )
    results = run_on_ranks(
        compare, WORLD, setting.device, setting, arguments.strategy, seconds=arguments.seconds
    )
    arguments.out.mkdir(parents=True, exist_ok=True)
    agreed = show(results, setting, arguments.out)
    print(f"\nAll of it took {time.monotonic() - began:.0f} s.")
    return 0 if agreed else 1


def parse() -> argparse.Namespace:
    missing = why_no_gpus()
    parser = argparse.ArgumentParser(prog="python -m examples.llama_bytes", description=__doc__)
    parser.add_argument("--steps", type=int, default=Setting().steps, help="training steps of each run")
    parser.add_argument("--strategy", choices=("auto", "always", "never"), default="auto")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu" if missing else "cuda")
    parser.add_argument("--out", type=Path, default=Path("build/demo"), help="folder for the pictures")
    parser.add_argument("--seconds", type=float, default=600, help="time limit for all of it")
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error(f"--steps {arguments.steps}: at least one step is needed")
    if arguments.device == "cuda" and missing:
        parser.error(f"--device cuda: {missing}; use --device cpu")
    if arguments.device == "cpu" and missing and torch.cuda.is_available():
        print(f"On CPU ranks, though there are GPUs: {missing}.\n")
    return arguments


def why_no_gpus() -> str:
    """Why fused ops cannot run on this machine's GPUs; "" if they can."""
    gpus = torch.cuda.device_count()
    if gpus < WORLD:
        return f"{WORLD} GPUs are needed, {gpus} found"
    if torch.cuda.get_device_capability() != (9, 0):
        return f"GPUs of compute capability 9.0 are needed, found {torch.cuda.get_device_name()}"
    return "" if hasattr(_core, "cuda") else "the package was built without CUDA kernels (make CUDA=1 demo)"


def show(results: list[Comparison], setting: Setting, folder: Path) -> bool:
    """Prints and draws what the ranks found; False if the two runs disagree."""
    first = results[0]
    print("What became of each collective:\n")
    print(first.report)
    print("\nLoss, nats per byte:\n")
    print(terminal_plot(first.eager, first.compiled))
    difference, tolerance = largest_difference(first.eager, first.compiled), TOLERANCE[setting.device]
    agreed = difference <= tolerance
    print(
        f"\nafter {setting.steps} steps eager {first.eager.losses[-1]:.4f}, "
        f"compiled {first.compiled.losses[-1]:.4f}; largest relative difference {difference:.1e}, "
        f"{'within' if agreed else 'ABOVE'} the tolerance of {tolerance}"
    )
    print_speeds(first, setting)
    speeds = {name: setting.tokens / seconds for name, seconds in first.seconds.items()}
    draw_losses(first.eager, first.compiled, speeds, tolerance, folder / "losses.png")
    print(f"\nPictures: {folder / 'losses.png'}", end="")
    events = quickest(results)
    if events:
        draw_timeline(events, folder / "timeline.png", first.calls_title)
        print(f", {folder / 'timeline.png'}")
    else:
        print("; no timeline, which only the cpu engine records")
    return agreed


def print_speeds(result: Comparison, setting: Setting) -> None:
    print(
        "\nSpeed: medians of steps taken in turns. Beside them the first step, which includes compilation.\n"
    )
    print(f"{'':44}{'tokens/s':>9}{'step':>10}{'first step':>12}")
    for label, name, first in (
        ("eager", "eager", f"{result.eager.first_step:.1f} s"),
        ("compiled", "compiled", f"{result.compiled.first_step:.1f} s"),
        ("  not fused: FLUX_INDUCTOR_ENGINE=reference", "reference", ""),
    ):
        seconds = result.seconds[name]
        print(f"{label:44}{setting.tokens / seconds:>9,.0f}{seconds * 1e3:>7.0f} ms{first:>12}")


if __name__ == "__main__":
    sys.exit(main())
