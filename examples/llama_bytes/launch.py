"""Runs a function on several ranks of this machine, each a process, and never waits for ever."""

from __future__ import annotations

import os
import pickle
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn


def run_on_ranks(fn: Callable[..., Any], world: int, device: str, *args: Any, seconds: float) -> list[Any]:
    """Calls the module-level function `fn(*args)` on `world` ranks and returns their results by rank.

    `device` is "cpu" (gloo) or "cuda" (NCCL, one GPU a rank). Raises TimeoutError after `seconds`, and
    the first rank's exception when one fails; all processes are ended in every case.
    """
    # More threads than cores would make the ranks disturb each other.
    threads = max((os.cpu_count() or 1) // world, 1) if device == "cpu" else 4
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    with tempfile.TemporaryDirectory(prefix="llama_bytes_") as folder:
        entry = (world, device, folder, seconds, fn, args)
        context = spawn(_rank, entry, nprocs=world, join=False)  # type: ignore[no-untyped-call]
        try:
            deadline = time.monotonic() + seconds
            while not context.join(timeout=max(deadline - time.monotonic(), 0.1)):
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"the ranks did not finish within {seconds:.0f} seconds")
        finally:
            for process in context.processes:
                if process.is_alive():
                    process.kill()
                process.join()
        return [pickle.loads((Path(folder) / f"{rank}").read_bytes()) for rank in range(world)]


def _rank(
    rank: int,
    world: int,
    device: str,
    folder: str,
    seconds: float,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=seconds),
    )
    result = fn(*args)
    (Path(folder) / f"{rank}").write_bytes(pickle.dumps(result))
    dist.destroy_process_group()
