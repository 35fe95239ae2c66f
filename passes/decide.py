"""Asks the strategy about a pair: conditions that no plan can do without, then the Problem and the answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch._inductor import config as inductor_config
from torch.fx import Node

from flux_inductor.dtypes import DTYPE_NAMES
from flux_inductor.options import Options
from flux_inductor.passes.collectives import Collective
from flux_inductor.passes.gather_pair import GatherPair
from flux_inductor.passes.reasons import Reason
from flux_inductor.passes.scatter_site import ScatterSite
from flux_inductor.passes.sizes import (
    as_expression,
    dtype_text,
    equal,
    layout_of,
    tensor,
)
from flux_inductor.planning.installed import CPU_ONLY, Installed
from flux_inductor.planning.ops.all_gather_matmul import GatherCall
from flux_inductor.planning.ops.matmul_reduce_scatter import ScatterCall
from flux_inductor.planning.problem import Problem
from flux_inductor.planning.strategy import Decision, choose
from flux_inductor.planning.topology import Topology

TopologyOf = Callable[[str, str], Topology]


@dataclass(frozen=True)
class Setting:
    """What all pairs of a graph are decided by.

    Args:
        topology_of: the topology of a group, by its name and the type of device ("cpu", "cuda").
        installed: the engines that there are.
    """

    options: Options
    topology_of: TopologyOf
    installed: Installed = CPU_ONLY


def gather_problem(pair: GatherPair) -> Problem:
    return GatherCall(
        shape=tuple(map(as_expression, pair.site.shape)),
        columns=tuple(as_expression(one.matmul.columns) for one in pair.consumers),
        dtype=DTYPE_NAMES[pair.dtype],
        layout=layout_of(one.matmul.weight for one in pair.consumers),
        world=pair.site.collective.world,
        dim=pair.dim,
        return_gathered=bool(pair.used),
    ).problem


def scatter_problem(site: ScatterSite) -> Problem:
    *leading, columns = map(as_expression, site.shape)
    return ScatterCall(
        shape=(*leading, as_expression(site.matmul.depth)),
        columns=columns,
        dtype=DTYPE_NAMES[tensor(site.matmul.lhs).dtype],
        layout=layout_of([site.matmul.weight]),
        world=site.collective.world,
        dim=site.dim,
        reduce_op=site.reduce_op,
        scale=float(site.term.scale),
        out_dtype=DTYPE_NAMES[tensor(site.product).dtype],
        addend=site.has_addend,
    ).problem


def unsuitable(
    collective: Collective,
    dtype: torch.dtype,
    x: torch.Tensor,
    operands: Iterable[Node],
    result: torch.dtype | None = None,
) -> Reason | None:
    """Why no fused op takes `x`, in that dtype, with these operands; None if one may.

    Args:
        result: a dtype that operands may have instead: what is added in the dtype of the sum.
    """
    if inductor_config.cpp_wrapper:
        text = "Inductor's cpp_wrapper crashes on ops that return lists of tensors; set it to False"
        return Reason("cpp-wrapper", text)
    if isinstance(collective.group, Reason):
        return collective.group
    tensors = [tensor(node) for node in operands]
    kinds = {(dtype if value.dtype == result else value.dtype, value.device) for value in tensors}
    kinds.add((dtype, x.device))
    if dtype not in DTYPE_NAMES:
        return Reason("dtype", f"the pair is in {dtype_text(dtype)}; fused ops take bf16, fp16 and fp32")
    if len(kinds) > 1:
        text = ", ".join(sorted(f"{dtype_text(one)} on {device}" for one, device in kinds))
        return Reason("mixed-dtypes", f"a fused op needs one dtype and device; the operands are {text}")
    if any(equal(size, 0) for value in (x, *tensors) for size in value.shape):
        return Reason("empty", "a tensor of the pair has no elements")
    return None


def decide(problem: Problem, collective: Collective, device: str, setting: Setting) -> Decision | Reason:
    """The strategy's answer, or why it cannot be asked."""
    try:
        topology = topology_for(collective, device, setting)
    except ValueError as error:
        return Reason("topology", str(error))
    options = setting.options
    return choose(problem, topology, options.strategy, installed=setting.installed, reserve=options.reserve)


def topology_for(collective: Collective, device: str, setting: Setting) -> Topology:
    """Of the collective's group, as it is written or found.

    Raises:
        ValueError: it cannot be found.
    """
    assert isinstance(collective.group, str)
    if setting.options.topology:
        written = Topology.parse(setting.options.topology)
        if written.ranks == collective.world:
            return written
    return setting.topology_of(collective.group, device)
