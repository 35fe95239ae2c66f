"""Collectives as programs write them."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor


def gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    return funcol.all_gather_tensor(x, dim, group)  # type: ignore[no-any-return, unused-ignore]


def gather_list(x: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Every rank's x, by rank."""
    chunks = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(chunks, x, group=group)
    return chunks


def scatter(x: Tensor, dim: int, group: dist.ProcessGroup, op: str = "sum") -> Tensor:
    return funcol.reduce_scatter_tensor(x, op, dim, group)  # type: ignore[no-any-return, unused-ignore]


def wait(started: Tensor) -> Tensor:
    return torch.ops._c10d_functional.wait_tensor(started)  # type: ignore[no-any-return, unused-ignore]
