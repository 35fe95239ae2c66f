"""Fuses what can be fused in one graph, and says about every collective what became of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch._inductor.pattern_matcher import stable_topological_sort
from torch.fx import Graph, Node

from flux_inductor.passes import gather_site, scatter_site
from flux_inductor.passes.agreement import Part, add_agreement, parts_of, site_of
from flux_inductor.passes.build import set_argument
from flux_inductor.passes.chain import arrange, chain_of
from flux_inductor.passes.collectives import WAIT, Collective, find_collectives, merge_waits
from flux_inductor.passes.decide import Setting, decide, gather_problem, scatter_problem, unsuitable
from flux_inductor.passes.dependencies import Dependencies
from flux_inductor.passes.gather_pair import GatherPair, pair_of
from flux_inductor.passes.gather_site import GatherSite
from flux_inductor.passes.in_flight import FusedOp, make_room
from flux_inductor.passes.order import pin_order
from flux_inductor.passes.reasons import Reason
from flux_inductor.passes.record import CollectiveRecord
from flux_inductor.passes.rewrite_gather import rewrite_gather
from flux_inductor.passes.rewrite_scatter import rewrite_scatter
from flux_inductor.passes.sizes import Size, dtype_text, is_tensor, shape_text, tensor
from flux_inductor.planning.exchange import Site
from flux_inductor.planning.problem import Problem
from flux_inductor.planning.strategy import Decision


def fuse(graph: Graph, name: str, setting: Setting) -> list[CollectiveRecord]:
    """Rewrites the graph in place and leaves it in topological order.

    Args:
        name: of the graph, for the records.

    Returns:
        One record a collective, in the order of the graph as it was given.
    """
    if not any(find_collectives(graph)):
        return []
    # A user's pass may have left it unsorted, or with users of a gathered tensor that nobody needs.
    stable_topological_sort(graph)
    graph.eliminate_dead_code()
    merge_waits(graph)
    collectives = list(find_collectives(graph))
    parts, identity = parts_of(collectives), f"{name}\n{graph}"
    fusion = _Fusion(name, setting)
    fusion.gathers(graph, collectives)
    for one in collectives:
        if one.op == "reduce_scatter":
            fusion.scatter(one)
        elif one.op != "all_gather":
            fusion.leave(one, _not_fused_yet(one), _input_text(one))
    if fusion.fused:
        stable_topological_sort(graph)
        fusion.check_gone(graph)
    members = [one.node for one in collectives if one.node.target is not WAIT]
    fused = set(fusion.fused.values())
    chain = chain_of(graph, [fusion.fused.get(node, node) for node in members], fused)
    waits = fusion.make_room(graph, chain, collectives)
    tellers, places = add_agreement(graph, identity, parts, fusion.sites(parts))
    if fused or tellers:
        arrange(graph, chain, waits)
        pin_order(graph, [*tellers, *chain], {*fused, *tellers}, waits)
    records = ((one.node, fusion.records[one.node]) for one in collectives)
    return [replace(record, place=places.get(node, "")) for node, record in records]


class _Fusion:
    """The work on one graph.

    Args:
        records: by the node of the collective, which may be gone.
        fused: the ops that were made, by the node of the collective that each replaces.
    """

    def __init__(self, name: str, setting: Setting) -> None:
        self.records: dict[Node, CollectiveRecord] = {}
        self.fused: dict[Node, Node] = {}
        self._ops: dict[Node, FusedOp] = {}
        self._name = name
        self._setting = setting

    def gathers(self, graph: Graph, collectives: list[Collective]) -> None:
        """All gathers are recognised before the first is rewritten: see Dependencies."""
        sites = {one: gather_site.explore(one) for one in collectives if one.op == "all_gather"}
        candidates = [
            one.node for one, site in sites.items() if isinstance(site, GatherSite) and site.consumers
        ]
        dependencies = Dependencies(graph, [one.node for one in collectives], candidates)
        for one, site in sites.items():
            pair = site if isinstance(site, Reason) else pair_of(site, dependencies)
            if isinstance(pair, Reason):
                self.leave(one, pair, _input_text(one))
            else:
                self._gather(pair)
                if one.node in self.fused:
                    dependencies.fuse(one.node, pair.operands)

    def _gather(self, pair: GatherPair) -> None:
        collective, x = pair.site.collective, tensor(pair.site.x)
        weights = [one.matmul.weight for one in pair.consumers]
        shapes = _pair_text(x.shape, weights, pair.dtype)
        reason = unsuitable(collective, pair.dtype, x, pair.operands)
        self._settle(
            collective,
            shapes,
            reason or gather_problem(pair),
            x.device.type,
            lambda plan: rewrite_gather(pair, plan),
        )

    def scatter(self, collective: Collective) -> None:
        site = scatter_site.explore(collective)
        if isinstance(site, Reason):
            self.leave(collective, site, _input_text(collective))
            return
        lhs = tensor(site.matmul.lhs)
        shape = [*site.shape[:-1], lhs.shape[-1]]
        shapes = _pair_text(shape, [site.matmul.weight], lhs.dtype, site.dtype)
        reason = unsuitable(collective, lhs.dtype, lhs, site.operands, site.dtype)
        self._settle(
            collective,
            shapes,
            reason or scatter_problem(site),
            lhs.device.type,
            lambda plan: rewrite_scatter(site, plan),
        )

    def _settle(
        self,
        one: Collective,
        shapes: str,
        problem: Problem | Reason,
        device: str,
        rewrite: Callable[[str], Node],
    ) -> None:
        if isinstance(problem, Reason):
            self.leave(one, problem, shapes)
            return
        decision = decide(problem, one, device, self._setting)
        if isinstance(decision, Reason):
            self.leave(one, decision, shapes)
        elif not decision.fused:
            self.leave(one, Reason(decision.code, decision.reason), shapes, decision)
        else:
            self.fused[one.node] = node = rewrite(str(decision.plan))
            self._ops[node] = FusedOp(one, problem, device, decision)
            self._record(one, shapes, decision)

    def leave(self, one: Collective, why: Reason, shapes: str, decision: Decision | None = None) -> None:
        self._record(one, shapes, decision, why)

    def _record(
        self,
        one: Collective,
        shapes: str,
        decision: Decision | None,
        why: Reason | None = None,
        note: str = "",
    ) -> None:
        reason = why.text if why is not None else decision.reason if decision is not None else ""
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
            reason=f"{reason}; {note}" if note else reason,
        )

    def make_room(
        self, graph: Graph, chain: list[Node], collectives: list[Collective]
    ) -> dict[Node, tuple[Node, ...]]:
        """Plans with SMs for other communication, where needed. Returns waits that must come before ops."""
        plain = [one for one in collectives if one.node not in self.fused]
        rooms = make_room(graph, chain, self._ops, plain, self._setting)
        for node, room in rooms.items():
            one, decision = self._ops[node].collective, room.decision
            set_argument(node, "plan", str(decision.plan))
            self._ops[node] = replace(self._ops[node], decision=decision)
            self._record(one, self.records[one.node].shapes, decision, note=room.note)
        return {node: room.waits for node, room in rooms.items()}

    def sites(self, parts: dict[Node, Part]) -> dict[Node, tuple[Site, Node]]:
        """For the collectives that were rewritten, what ranks compare, and the op."""
        return {
            node: (site_of(parts[node], self._ops[op].problem, self._ops[op].decision.plan), op)
            for node, op in self.fused.items()
        }

    def check_gone(self, graph: Graph) -> None:
        """A collective that is reported as fused must not run as well."""
        still = self.fused.keys() & set(graph.nodes)
        assert not still, f"reported as fused, and still in the graph: {still}"


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
