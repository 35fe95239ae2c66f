"""Plans for fused ops that are called by name: the strategy's choice for the shapes of one call."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from flux_inductor.options import resolve
from flux_inductor.planning.problem import Layout, Problem
from flux_inductor.planning.strategy import Mode, choose
from flux_inductor.planning.topology import Topology
from flux_inductor.runtime.detect import topology_of
from flux_inductor.runtime.groups import group_size

DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def plan_gather(x: Tensor, weights: Sequence[Tensor], group: str, dim: int, return_gathered: bool) -> str:
    """The plan's text for all_gather_matmul of shard `x`, gathered along `dim` of group `group`."""
    problem = Problem(
        kind="all_gather_matmul",
        world=group_size(group),
        strips=math.prod(x.shape[:dim]),
        rows=math.prod(x.shape[dim:-1]),
        columns=tuple(weight.shape[1] for weight in weights),
        depth=x.shape[-1],
        dtype=DTYPE_NAMES[x.dtype],
        return_gathered=return_gathered,
        layout=_layout(weights),
    )
    return _plan(problem, group, x.device.type)


def plan_scatter(x: Tensor, weight: Tensor, group: str, dim: int, *, has_addend: bool) -> str:
    """The plan's text for matmul_reduce_scatter of `x @ weight`, scattered along `dim` of the product."""
    world = group_size(group)
    by_columns = dim == x.dim() - 1
    problem = Problem(
        kind="matmul_reduce_scatter",
        world=world,
        strips=1 if by_columns else math.prod(x.shape[:dim]),
        rows=math.prod(x.shape[:-1]) if by_columns else math.prod(x.shape[dim:-1]) // world,
        columns=(weight.shape[1],),
        depth=x.shape[-1],
        dtype=DTYPE_NAMES[x.dtype],
        split="columns" if by_columns else "rows",
        addend=has_addend,
        layout=_layout([weight]),
    )
    return _plan(problem, group, x.device.type)


def _layout(weights: Sequence[Tensor]) -> Layout:
    return "k_major" if all(weight.stride(0) == 1 for weight in weights) else "n_major"


def _plan(problem: Problem, group: str, device: str) -> str:
    options, _ = resolve()
    written = Topology.parse(options.topology) if options.topology else None
    topology = written if written and written.ranks == problem.world else topology_of(group, device)
    return _cached_plan(problem, topology, options.strategy, options.reserve)


@lru_cache(maxsize=1024)
def _cached_plan(problem: Problem, topology: Topology, mode: Mode, reserve: int | None) -> str:
    return str(choose(problem, topology, mode, reserve=reserve).plan)
