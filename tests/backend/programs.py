"""Small tensor-parallel programs for tests of the backend, and their inputs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

ROWS, HIDDEN, INNER = 8, 16, 32


def _gather(x: Tensor) -> Tensor:
    group: Any = dist.group.WORLD
    whole: Tensor = funcol.all_gather_tensor(x, 0, group)
    return whole


def _scatter(x: Tensor) -> Tensor:
    group: Any = dist.group.WORLD
    part: Tensor = funcol.reduce_scatter_tensor(x, "sum", 0, group)
    return part


def mlp(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Sequence-parallel MLP. x [rows, HIDDEN] and the result are shards by rows; up and down by INNER."""
    return _scatter(torch.relu(_gather(x) @ up) @ down) / dist.get_world_size()


def pair(x: Tensor, up: Tensor) -> Tensor:
    """The first pair alone; Inductor generates no kernel for it, so it compiles fast."""
    return _gather(x) @ up


def broken_mlp(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """The same, with a graph break between its two pairs."""
    inner = torch.relu(_gather(x) @ up)
    torch._dynamo.graph_break()
    return _scatter(inner @ down) / dist.get_world_size()


def inputs(rank: int = 0, rows: int = ROWS, *, requires_grad: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """x, up and down of `mlp`, different on every rank."""
    generator = torch.Generator().manual_seed(rank)
    shapes = ((rows, HIDDEN), (HIDDEN, INNER), (INNER, HIDDEN))
    x, up, down = (torch.randn(shape, generator=generator).requires_grad_(requires_grad) for shape in shapes)
    return x, up, down


@contextmanager
def fake_ranks(world: int) -> Iterator[None]:
    """This process as rank 0 of a group that only pretends: it compiles, its collectives move nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()
