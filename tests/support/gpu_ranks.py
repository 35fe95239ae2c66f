"""Ranks with a GPU each, for tests of the CUDA engine."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import run_ranks


def why_not(gpus: int = 2) -> str:
    """Why these tests cannot run here; "" if they can."""
    if torch.cuda.device_count() < gpus:
        return f"needs {gpus} CUDA devices, found {torch.cuda.device_count()}"
    if torch.cuda.get_device_capability() != (9, 0):
        return "the kernels are for compute capability 9.0 (H100, H200)"
    from flux_inductor.runtime.cuda_kernels import kernels

    return "" if kernels is not None else "flux_inductor._core was built without CUDA kernels"


needs_two_gpus = pytest.mark.skipif(bool(why_not()), reason=why_not())


def nccl_group(world: int, seconds: float = 60) -> str:
    """A new process group of all ranks, by name."""
    group = dist.new_group(list(range(world)), backend="nccl", timeout=timedelta(seconds=seconds))
    assert isinstance(group, dist.ProcessGroup)
    return group.group_name


def _on_gpu(fn: Callable[..., Any], rank: int, world: int, *args: Any) -> Any:
    torch.cuda.set_device(rank)
    # Results are poisoned with NaN before an op writes them, and every run is alike.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.manual_seed(1234 + rank)
    return fn(rank, world, *args)


def run_gpu_ranks(fn: Callable[..., Any], *args: Any, world: int = 2, timeout: float = 150) -> list[Any]:
    """Calls the module-level function `fn(rank, world, *args)` on `world` processes, each with its GPU."""
    return run_ranks(partial(_on_gpu, fn), world, *args, timeout=timeout, group_timeout=60)
