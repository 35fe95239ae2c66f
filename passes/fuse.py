"""Fuses what can be fused in one graph, and says about every collective what became of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch._inductor.pattern_matcher import stable_topological_sort
from torch.fx import Graph, Node

from flux_inductor.passes import gather_site, scatter_site
from flux_inductor.passes.collectives import WAIT, Collective, find_collectives, merge_waits
from flux_inductor.passes.decide import Setting, decide, gather_problem, scatter_problem, unsuitable
from flux_inductor.passes.dependencies import Dependencies
from flux_inductor.passes.gather_pair import GatherPair, pair_of
from flux_inductor.passes.gather_site import GatherSite
from flux_inductor.passes.order import pin_order
from flux_inductor.passes.reasons import Reason
from flux_inductor.passes.record import CollectiveRecord
from flux_inductor.passes.rewrite_gather import rewrite_gather
from flux_inductor.passes.rewrite_scatter import rewrite_scatter
from flux_inductor.passes.sizes import Size, dtype_text, is_tensor, shape_text, tensor
from flux_inductor.planning.strategy import Decision


def fuse(graph: Graph, name: str, setting: Setting) -> list[CollectiveRecord]:
    """Rewrites the graph in place and leaves it in topological order.

    Args:
        name: of the graph, for the records.

    Returns:
        One record a collective, in the order of the graph as it was given.
    """
    merge_waits(graph)
    collectives = list(find_collectives(graph))
    if not collectives:
        return []
    fusion = _Fusion(name, setting)
    fusion.gathers(graph, [one for one in collectives if one.op == "all_gather"])
    for one in collectives:
        if one.op == "reduce_scatter":
            fusion.scatter(one)
        elif one.op != "all_gather":
            fusion.leave(one, _not_fused_yet(one), _input_text(one))
    if fusion.fused:
        stable_topological_sort(graph)
        pin_order(graph, fusion.fused, fusion.left_beside_fused(collectives))
    return [fusion.records[one.node] for one in collectives]


class _Fusion:
    """The work on one graph.

    Args:
        records: by the node of the collective, which may be gone.
        fused: the ops that were made.
    """

    def __init__(self, name: str, setting: Setting) -> None:
        self.records: dict[Node, CollectiveRecord] = {}
        self.fused: set[Node] = set()
        self._name = name
        self._setting = setting

    def gathers(self, graph: Graph, collectives: list[Collective]) -> None:
        """All gathers are recognised before the first is rewritten: see Dependencies."""
        sites = {one: gather_site.explore(one) for one in collectives}
        candidates = [
            one.node for one, site in sites.items() if isinstance(site, GatherSite) and site.consumers
        ]
        dependencies = Dependencies(graph, candidates)
        for one, site in sites.items():
            pair = site if isinstance(site, Reason) else pair_of(site, dependencies)
            if isinstance(pair, Reason):
                self.leave(one, pair, _input_text(one))
            else:
                self._gather(pair)

    def _gather(self, pair: GatherPair) -> None:
        collective, x = pair.site.collective, tensor(pair.site.x)
        weights = [one.matmul.weight for one in pair.consumers]
        operands = [operand for one in pair.consumers for operand in one.matmul.operands]
        shapes = _pair_text(x.shape, weights, pair.dtype)
        reason = unsuitable(collective, pair.dtype, x, operands)
        decision = reason or decide(gather_problem(pair), collective, x.device.type, self._setting)
        self._settle(collective, shapes, decision, lambda plan: rewrite_gather(pair, plan))

    def scatter(self, collective: Collective) -> None:
        site = scatter_site.explore(collective)
        if isinstance(site, Reason):
            self.leave(collective, site, _input_text(collective))
            return
        lhs = tensor(site.matmul.lhs)
        shape = [*site.shape[:-1], lhs.shape[-1]]
        shapes = _pair_text(shape, [site.matmul.weight], lhs.dtype)
        reason = unsuitable(collective, lhs.dtype, lhs, site.operands)
        decision = reason or decide(scatter_problem(site), collective, lhs.device.type, self._setting)
        self._settle(collective, shapes, decision, lambda plan: rewrite_scatter(site, plan))

    def _settle(
        self, one: Collective, shapes: str, decision: Decision | Reason, rewrite: Callable[[str], Node]
    ) -> None:
        if isinstance(decision, Reason):
            self.leave(one, decision, shapes)
        elif not decision.fused:
            self.leave(one, Reason(decision.code, decision.reason), shapes, decision)
        else:
            self.fused.add(rewrite(str(decision.plan)))
            self._record(one, shapes, decision)

    def leave(self, one: Collective, why: Reason, shapes: str, decision: Decision | None = None) -> None:
        self._record(one, shapes, decision, why)

    def _record(
        self, one: Collective, shapes: str, decision: Decision | None, why: Reason | None = None
    ) -> None:
        self.records[one.node] = CollectiveRecord(
            graph=self._name,
            node=one.node.name,
            op=one.op,
            group=one.group if isinstance(one.group, str) else "",
            world=one.world,
            shapes=shapes,
            fused=why is None,
            plan=str(decision.plan) if decision is not None and why is None else "",
            fused_us=decision.fused_us if decision is not None else None,
            unfused_us=decision.unfused_us if decision is not None else None,
            code=why.code if why is not None else "",
            reason=why.text if why is not None else decision.reason if decision is not None else "",
        )

    def left_beside_fused(self, collectives: list[Collective]) -> list[Node]:
        """The plain collectives of the groups that have fused ops."""
        groups = {one.group for one in collectives if self.records[one.node].fused}
        left = [one for one in collectives if not self.records[one.node].fused and one.group in groups]
        return [one.node for one in left if one.node.target is not WAIT]


def _not_fused_yet(one: Collective) -> Reason:
    if one.op == "wait_tensor":
        text = "waits for a collective that another graph has started"
    elif one.op == "all_reduce":
        text = "all_reduce is not fused yet"
    else:
        text = f"{one.op} has no fused op"
    return Reason("other-collective", text)


def _pair_text(shape: Sequence[Size], weights: list[Node], dtype: torch.dtype) -> str:
    factors = "+".join(shape_text(tensor(weight).shape) for weight in weights)
    return f"{shape_text(shape)} x {factors} {dtype_text(dtype)}"


def _input_text(one: Collective) -> str:
    """The first tensor that the collective is given."""
    for node in one.node.all_input_nodes:
        if is_tensor(node):
            return f"{shape_text(tensor(node).shape)} {dtype_text(tensor(node).dtype)}"
    return ""
