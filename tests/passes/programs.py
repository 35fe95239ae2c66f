"""Collectives as programs write them."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor


def gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """As funcol.all_gather_tensor does it, whose reassembly Dynamo of torch 2.11 does not trace."""
    whole: Tensor = funcol.all_gather_tensor(x, 0, group)
    if dim == 0:
        return whole
    if math.prod(x.shape[:dim]) == 1:
        return whole.view([*x.shape[:dim], -1, *x.shape[dim + 1 :]])
    return torch.cat(torch.chunk(whole, group.size()), dim)


def gather_list(x: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Every rank's x, by rank."""
    chunks = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(chunks, x, group=group)
    return chunks


def scatter(x: Tensor, dim: int, group: dist.ProcessGroup, op: str = "sum") -> Tensor:
    return funcol.reduce_scatter_tensor(x, op, dim, group)  # type: ignore[no-any-return, unused-ignore]


def wait(started: Tensor) -> Tensor:
    return torch.ops._c10d_functional.wait_tensor(started)  # type: ignore[no-any-return, unused-ignore]
