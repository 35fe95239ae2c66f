"""Tells each graph which collectives it has, so that ranks can agree on those that are fused.

The pass puts one op first into the graph for each group that has all_gathers or reduce_scatters, also where
this rank fuses none: another rank may. It has a line for each of them, in the order of the graph as it was
given, which all ranks share; and each fused op learns which line is its own. What is done with it:
runtime/agreement.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node
from torch.fx.node import has_side_effect

from flux_inductor.passes.build import set_argument
from flux_inductor.passes.collectives import Collective
from flux_inductor.passes.sizes import Size, as_expression, dtype_text, is_tensor, product, tensor
from flux_inductor.planning.exchange import (
    Site,
    digest_of,
    exchange_of,
    geometry,
    moves_text,
)
from flux_inductor.planning.plan import PlanTable
from flux_inductor.planning.problem import Problem
from flux_inductor.planning.topology import Device

AGREE = torch.ops.flux_inductor.agree.default

has_side_effect(AGREE)


@dataclass(frozen=True)
class Part:
    """A collective that ranks compare.

    Args:
        group: its name.
        moves: see exchange.Site.
        device: of its tensors.
    """

    group: str
    moves: str
    device: torch.device


def parts_of(collectives: Sequence[Collective]) -> dict[Node, Part]:
    """Those that have a fused op, by node, in their order. To be asked before the graph is rewritten."""
    parts = {}
    for one in collectives:
        moves = _moves(one)
        if moves and isinstance(one.group, str) and one.world > 1:
            parts[one.node] = Part(one.group, moves, tensor(one.node).device)
    return parts


def _moves(one: Collective) -> str:
    source = one.node.args[0]
    if one.op not in ("all_gather", "reduce_scatter") or not is_tensor(source):
        return ""
    elements: Size = product(tensor(source).shape)
    dtype = dtype_text(tensor(source).dtype)
    if one.op == "all_gather":
        return moves_text(one.op, as_expression(elements), dtype)
    return moves_text(f"{one.op} {one.node.args[1]}", as_expression(elements), dtype)


def site_of(part: Part, problem: Problem, plan: PlanTable) -> Site:
    """The collective as a fused op."""
    device: Device = "cuda" if part.device.type == "cuda" else "cpu"
    return Site(part.moves, geometry(problem), exchange_of(plan, problem.op, device))


def add_agreement(
    graph: Graph, identity: str, parts: dict[Node, Part], fused: dict[Node, tuple[Site, Node]]
) -> tuple[list[Node], dict[Node, str]]:
    """Adds the ops that tell, in front of everything, and its place to each fused op.

    Args:
        identity: of the graph: two graphs whose collectives look alike may meet different ones elsewhere.
        parts: of `parts_of`.
        fused: for the collectives that were rewritten, what has become of them.

    Returns:
        The ops, and the place of each rewritten collective.
    """
    first = next(node for node in graph.nodes if node.op not in ("placeholder", "get_attr"))
    tellers: list[Node] = []
    places: dict[Node, str] = {}
    for group in dict.fromkeys(part.group for part in parts.values()):
        members = [(node, part) for node, part in parts.items() if part.group == group]
        lines = [str(fused[node][0]) if node in fused else part.moves for node, part in members]
        text = "\n".join(lines)
        digest = digest_of(f"{identity}\n{text}")
        tellers.append(_teller(first, members[0], digest, text))
        for number, (node, _) in enumerate(members):
            if node in fused:
                op = fused[node][1]
                places[node] = f"{digest}/{number}"
                set_argument(op, "place", places[node])
    return tellers, places


def _teller(anchor: Node, member: tuple[Node, Part], digest: str, text: str) -> Node:
    """Its fake result is made by hand: without a tensor among its arguments, the op would run for real."""
    node, part = member
    with anchor.graph.inserting_before(anchor):
        teller = anchor.graph.call_function(AGREE, (part.group, digest, text, part.device))
    teller.meta["val"] = tensor(node).new_empty(0)
    return teller
