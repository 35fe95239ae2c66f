"""Ranks whose unrelated tensors differ in size: Inductor orders those differently, not what communicates."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

from flux_inductor.runtime.engine import executions
from tests.passes.programs import gather
from tests.support.ranks import run_ranks

# By rank: inner sizes that no other rank sees. With them Inductor, to save memory, puts the all_reduce before
# the gather's matmul on even ranks, and behind it on odd ones.
LOCAL = ((8, 64, 8, 300), (64, 1024, 300, 64))


def across_groups(pair: dist.ProcessGroup, *args: Tensor) -> tuple[Tensor, Tensor]:
    """A pair of one group beside an all_reduce of another, which does not depend on it."""
    x, x1, x2, w, v, y, y1, y2, u = args
    product = gather(x @ x1 @ x2, 0, pair) @ w
    assert dist.group.WORLD is not None
    total: Tensor = funcol.all_reduce(y @ y1 @ y2, "sum", dist.group.WORLD)
    return product @ v, total @ u


def inputs(rank: int) -> list[Tensor]:
    rng = torch.Generator().manual_seed(rank)
    inner, columns, other, others_columns = LOCAL[rank % 2]
    shapes = (
        *((256, 8), (8, inner), (inner, 256), (256, 512), (512, columns)),
        *((256, 8), (8, other), (other, 1024), (1024, others_columns)),
    )
    return [torch.randn(shape, generator=rng, dtype=torch.float64) for shape in shapes]


def on_rank(rank: int, world: int, strategies: list[str]) -> list[tuple[float, int]]:
    """For each strategy: the worst error relative to eager fp64 code, and fused ops that ran."""
    short = timedelta(seconds=15)
    pairs = [dist.new_group([first, first + 1], timeout=short) for first in range(0, world, 2)]
    exact = across_groups(pairs[rank // 2], *inputs(rank))
    found = []
    for strategy in strategies:
        torch._dynamo.reset()
        compiled = torch.compile(across_groups, backend="flux_inductor", options={"strategy": strategy})
        before = sum(executions().values())
        with torch.no_grad():
            results: Any = compiled(pairs[rank // 2], *(one.float() for one in inputs(rank)))
        errors = [float((a - b).norm() / b.norm()) for a, b in zip(results, exact, strict=True)]
        found.append((max(errors), sum(executions().values()) - before))
    return found


@pytest.mark.parametrize(("world", "strategies"), [(2, ["auto"]), (4, ["always"])])
def test_one_order_on_all_ranks(world: int, strategies: list[str]) -> None:
    replies = run_ranks(on_rank, world, strategies, timeout=150, group_timeout=20)
    for reply in replies:
        assert all(error < 1e-5 for error, _ in reply)
        assert reply[0][1] == 1
