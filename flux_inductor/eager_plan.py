"""Plans for fused ops that are called by name: the strategy's choice for the shapes of one call.

To choose costs ten times what the call itself costs the host, so plans are remembered with their group.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor
from torch.compiler import is_compiling

from flux_inductor.ops import check_gather, check_scatter
from flux_inductor.options import current
from flux_inductor.planning.problem import Layout, Problem
from flux_inductor.planning.strategy import choose
from flux_inductor.planning.topology import Topology
from flux_inductor.runtime.bound import Remembered, describe, remember
from flux_inductor.runtime.detect import topology_of
from flux_inductor.runtime.groups import group_size, state_of

DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}

# Other tensors, such as FakeTensor, may have no memory to describe.
_DESCRIBED = (Tensor, torch.nn.Parameter)


class _KnownPlans(Remembered[str, str]):
    """Those of one process group."""


def plan_gather(
    x: Tensor,
    weights: list[Tensor],
    biases: Sequence[Tensor | None],
    group: str,
    dim: int,
    return_gathered: bool,
) -> str:
    """The plan's text for all_gather_matmul of shard `x`, gathered along `dim` of group `group`.

    Raises:
        ValueError: no such group, a bad option, or what `check_gather` finds where nothing is remembered.
    """
    plans = state_of(group, _KnownPlans).gathers
    key = _key(x, weights, dim, return_gathered)
    plan = plans.get(key)
    if plan is not None:
        return plan
    check_gather(x, weights, biases, dim)
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
    return _remember(plans, key, _plan(problem, group, x.device.type))


def plan_scatter(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    addend: Tensor | None,
    group: str,
    dim: int,
    reduce_op: str,
) -> str:
    """The plan's text for matmul_reduce_scatter of `x @ weight`, scattered along `dim` of the product.

    Raises:
        ValueError: no such group, a bad option, or what `check_scatter` finds where nothing is remembered.
    """
    plans = state_of(group, _KnownPlans).scatters
    key = _key(x, weight, dim, addend is not None)
    plan = plans.get(key)
    if plan is not None:
        return plan
    check_scatter(x, weight, bias, addend, group, dim, reduce_op)
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
        layout=_layout([weight]),
    )
    return _remember(plans, key, _plan(problem, group, x.device.type))


def _key(x: Tensor, weights: Tensor | list[Tensor], dim: int, also: bool) -> Hashable:
    """What a plan follows from, beside the group; None for tensors without memory, as there are in traces."""
    options = current()
    if type(x) not in _DESCRIBED or is_compiling():
        return None
    try:
        return describe(x, weights), dim, also, options
    except ValueError:  # the checks or the op will name it
        return None


def _remember(plans: dict[Hashable, str], key: Hashable, plan: str) -> str:
    if key is not None:
        remember(plans, key, plan)
    return plan


def _layout(weights: Sequence[Tensor]) -> Layout:
    return "k_major" if all(weight.stride(0) == 1 for weight in weights) else "n_major"


def _plan(problem: Problem, group: str, device: str) -> str:
    options = current()
    written = Topology.parse(options.topology) if options.topology else None
    topology = written if written and written.ranks == problem.world else topology_of(group, device)
    return str(choose(problem, topology, options.strategy, reserve=options.reserve).plan)
