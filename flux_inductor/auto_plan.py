"""Plan "auto", which functions that are called by name pass: the strategy's choice, made when the op runs.

Not when it is called: a trace (torch.compile, make_fx) may have no sizes to choose by, and must not wait for
peers to say which hosts they run on. ops.py remembers the choice with the call that it was made for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from flux_inductor.options import current
from flux_inductor.planning.machine import KERNEL
from flux_inductor.planning.plan import PlanTable, parse_plan
from flux_inductor.planning.problem import Layout, Problem
from flux_inductor.planning.strategy import choose
from flux_inductor.planning.topology import Topology
from flux_inductor.runtime.detect import topology_of
from flux_inductor.runtime.groups import group_size
from flux_inductor.runtime.plain_collectives import communicators_seen

AUTO = "auto"
DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def plan_gather(
    x: Tensor, weights: Sequence[Tensor], group: str, dim: int, return_gathered: bool
) -> tuple[Problem, PlanTable]:
    """Sizes and plan of all_gather_matmul of shard `x`, gathered along `dim`. All was checked before.

    Raises:
        ValueError: a bad option, or no engine for the device.
    """
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
    return problem, _plan(problem, group, x.device.type)


def plan_scatter(
    x: Tensor,
    weight: Tensor,
    addend: Tensor | None,
    group: str,
    dim: int,
    out_dtype: torch.dtype | None = None,
) -> tuple[Problem, PlanTable]:
    """Sizes and plan of matmul_reduce_scatter of `x @ weight`, scattered along `dim`; checked before.

    Raises:
        ValueError: a bad option, or no engine for the device.
    """
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
        addend=addend is not None,
        result=DTYPE_NAMES[out_dtype or x.dtype],
        layout=_layout([weight]),
    )
    return problem, _plan(problem, group, x.device.type)


def _layout(weights: Sequence[Tensor]) -> Layout:
    return "k_major" if all(weight.stride(0) == 1 for weight in weights) else "n_major"


def _plan(problem: Problem, group: str, device: str) -> PlanTable:
    options = current()
    reserve = _reserve(group)
    written = Topology.parse(options.topology) if options.topology else None
    topology = written if written and written.ranks == problem.world else topology_of(group, device)
    return choose(problem, topology, options.strategy, reserve=reserve).plan


def plan_by_hand(text: str, group: str, device: str) -> PlanTable:
    """A plan that the caller wrote. On CUDA, one without a reserve leaves SMs to what may be in flight (R2).

    Raises:
        ValueError: see `parse_plan`.
    """
    table = parse_plan(text)
    reserve = _reserve(group) if device == "cuda" else 0
    if not reserve:
        return table
    return PlanTable(
        tuple(
            (bound, plan if plan.reserve or not plan.fused else replace(plan, reserve=reserve))
            for bound, plan in table.entries
        )
    )


def _reserve(group: str) -> int | None:
    """The option, or SMs for the plain collectives of these ranks that have been seen; None: neither."""
    chosen = current().reserve
    if chosen is not None:
        return chosen
    seen = communicators_seen(group)
    return seen * int(KERNEL.reserve.value) if seen else None
