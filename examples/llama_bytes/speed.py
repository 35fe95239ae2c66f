"""Seconds per step of several programs, measured in turns: what else the machine does hits them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch.distributed as dist

WARM_UP = 2  # rounds whose times do not count


def medians(programs: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """The median seconds of each program over `rounds` rounds, in each of which every program runs once."""
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for number in range(WARM_UP + rounds):
        for name, program in programs.items():
            dist.barrier()
            begin = time.perf_counter()
            program()
            if number >= WARM_UP:
                seconds[name].append(time.perf_counter() - begin)
    return {name: statistics.median(times) for name, times in seconds.items()}
