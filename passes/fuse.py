"""Fuses pairs of collectives and matmuls, and says about every other collective why it stays."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.fx import Node

from flux_inductor.passes import gather_site, scatter_site
from flux_inductor.passes.collectives import Collective
from flux_inductor.passes.decide import decide, gather_problem, scatter_problem, unsuitable
from flux_inductor.passes.dependencies import Dependencies
from flux_inductor.passes.gather_pair import GatherPair, pair_of
from flux_inductor.passes.gather_site import GatherSite
from flux_inductor.passes.in_flight import FusedOp
from flux_inductor.passes.reasons import Reason
from flux_inductor.passes.rewrite_gather import rewrite_gather
from flux_inductor.passes.rewrite_scatter import rewrite_scatter
from flux_inductor.passes.sizes import Size, dtype_text, is_tensor, shape_text, tensor
from flux_inductor.passes.work import Work
from flux_inductor.planning.problem import Problem


def fuse_gathers(work: Work) -> int:
    """all_gather -> matmuls. All are recognised before the first is rewritten: see Dependencies."""
    before = len(work.fused)
    sites = {one: gather_site.explore(one) for one in work.collectives if one.op == "all_gather"}
    candidates = [one.node for one, site in sites.items() if isinstance(site, GatherSite) and site.consumers]
    dependencies = Dependencies(work.graph, [one.node for one in work.collectives], candidates)
    for one, site in sites.items():
        pair = site if isinstance(site, Reason) else pair_of(site, dependencies)
        if isinstance(pair, Reason):
            work.leave(one, pair, _input_text(one))
        else:
            _gather(work, pair)
            if one.node in work.fused:
                dependencies.fuse(one.node, pair.operands)
    return len(work.fused) - before


def _gather(work: Work, pair: GatherPair) -> None:
    collective, x = pair.site.collective, tensor(pair.site.x)
    weights = [one.matmul.weight for one in pair.consumers]
    problem = unsuitable(collective, pair.dtype, x, pair.operands) or gather_problem(pair)
    shapes = _pair_text(x.shape, weights, pair.dtype)
    _settle(work, collective, shapes, problem, x.device.type, lambda plan: rewrite_gather(pair, plan))


def fuse_scatters(work: Work) -> int:
    """matmul -> reduce_scatter."""
    before = len(work.fused)
    for one in work.collectives:
        if one.op == "reduce_scatter":
            _scatter(work, one)
    return len(work.fused) - before


def _scatter(work: Work, collective: Collective) -> None:
    site = scatter_site.explore(collective)
    if isinstance(site, Reason):
        work.leave(collective, site, _input_text(collective))
        return
    lhs = tensor(site.matmul.lhs)
    shape = [*site.shape[:-1], lhs.shape[-1]]
    problem = unsuitable(collective, lhs.dtype, lhs, site.operands, site.dtype) or scatter_problem(site)
    shapes = _pair_text(shape, [site.matmul.weight], lhs.dtype, site.dtype)
    _settle(work, collective, shapes, problem, lhs.device.type, lambda plan: rewrite_scatter(site, plan))


def _settle(
    work: Work,
    one: Collective,
    shapes: str,
    problem: Problem | Reason,
    device: str,
    rewrite: Callable[[str], Node],
) -> None:
    if isinstance(problem, Reason):
        work.leave(one, problem, shapes)
        return
    decision = decide(problem, one, device, work.setting)
    if isinstance(decision, Reason):
        work.leave(one, decision, shapes)
    elif not decision.fused:
        work.leave(one, Reason(decision.code, decision.reason), shapes, decision)
    else:
        work.fused[one.node] = node = rewrite(str(decision.plan))
        work.ops[node] = FusedOp(one, problem, device, decision)
        work.tell(one, shapes, decision)


def leave_others(work: Work) -> int:
    """Says about collectives that have no fused op why they stay."""
    others = [one for one in work.collectives if one.op not in ("all_gather", "reduce_scatter")]
    for one in others:
        work.leave(one, _not_fused_yet(one), _input_text(one))
    return len(others)


def _not_fused_yet(one: Collective) -> Reason:
    if one.op == "wait_tensor":
        text = "waits for a collective that another graph has started"
    elif one.op == "all_reduce":
        text = "all_reduce is not fused yet"
    else:
        text = f"{one.op} has no fused op"
    return Reason("other-collective", text)


def _pair_text(
    shape: Sequence[Size], weights: list[Node], dtype: torch.dtype, result: torch.dtype | None = None
) -> str:
    factors = "+".join(shape_text(tensor(weight).shape) for weight in weights)
    as_result = "" if result in (None, dtype) else f" as {dtype_text(result)}"
    return f"{shape_text(shape)} x {factors} {dtype_text(dtype)}{as_result}"


def _input_text(one: Collective) -> str:
    """The first tensor that the collective is given."""
    for node in one.node.all_input_nodes:
        if is_tensor(node):
            return f"{shape_text(tensor(node).shape)} {dtype_text(tensor(node).dtype)}"
    return ""
