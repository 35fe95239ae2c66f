"""Keeps everything that communicates in a graph in one order, on every rank.

Inductor may reorder custom ops that do not depend on each other, and does so differently on ranks with
different shapes. Two ranks that run two fused ops in opposite orders wait for each other for ever:

    rank 0: A waits for rank 1's part of A         rank 1: B waits for rank 0's part of B

So does a fused op of one group with a plain collective of another: both use the same processes. Hence there
is one chain of all collectives, of whatever group, in the order of the unfused program (chain.py): ranks have
that in common whether they fuse a pair or not. Inductor keeps plain collectives in the graph's order among
themselves. A neighbour of a fused op gets a control dependency, unless it depends on that already.

Waits need no place in the chain: what one waits for is in the chain, or was started before the graph.

A control dependency is Inductor's own `control_deps`: the op moves into a subgraph of one node, and the
scheduler gets an edge that carries no data and keeps no buffer alive. A token as a further argument of the
ops was the alternative: it needs another output on each op, and cannot order plain collectives.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence

import torch
from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering
from torch.fx import Graph, Node
from torch.utils._ordered_set import OrderedSet

from flux_inductor.passes.build import call

# Ops that take a tensor for its shape alone: Inductor makes no dependency of that.
_SHAPE_ONLY = (
    "empty_like",
    "full_like",
    "zeros_like",
    "ones_like",
    "rand_like",
    "randn_like",
    "randint_like",
)


def pin_order(
    graph: Graph, chain: Sequence[Node], fused: Collection[Node], waits: Mapping[Node, Sequence[Node]]
) -> list[Node]:
    """Makes the chain's order one that Inductor keeps.

    Args:
        graph: in topological order, with the members in that of the chain.
        waits: for fused ops, waits that must end before they start.

    Returns:
        The chain again: members with a control dependency are new nodes.
    """
    dependencies: dict[Node, OrderedSet[Node]] = {}
    for before, node in _missing_edges(graph, chain):
        if before in fused or node in fused or not (_is_kept(before) and _is_kept(node)):
            dependencies.setdefault(node, OrderedSet()).add(_tensor_of(before))
    for node, some in waits.items():
        dependencies.setdefault(node, OrderedSet()).update(some)
    now: dict[Node, Node] = {}
    for node in chain:
        if node in dependencies:
            after = node.next
            # A tensor of an op that was replaced is a node of its own, and follows its new source by itself.
            sources = OrderedSet(now.get(source, source) for source in dependencies[node])
            preserve_node_ordering(graph, {node: sources})
            now[node] = after.prev
    return [now.get(node, node) for node in chain]


def _missing_edges(graph: Graph, chain: Sequence[Node]) -> list[tuple[Node, Node]]:
    """(before, after) of neighbours in the chain that do not depend on each other, found in one sweep."""
    place = {node: number for number, node in enumerate(chain)}
    missing = []
    reached: dict[Node, int] = {}  # how many members, from the first on, are done before the node is
    for node in graph.nodes:
        passes = node.op == "call_function" and _carries_data(node)
        inputs = max((reached[source] for source in node.all_input_nodes), default=0) if passes else 0
        if node in place:
            if inputs < place[node] > 0:
                missing.append((chain[place[node] - 1], node))
            inputs = place[node] + 1
        reached[node] = inputs
    return missing


def _carries_data(node: Node) -> bool:
    """Whether the node's result needs its inputs' data, and not only their shapes."""
    if isinstance(node.meta.get("val"), (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)):
        return False
    name = getattr(node.target, "_opname", "")
    return name not in _SHAPE_ONLY and not name.startswith("new_")


def _is_kept(node: Node) -> bool:
    """Whether Inductor keeps this plain collective in order by itself."""
    return getattr(node.target, "namespace", "") == "_c10d_functional"


def _tensor_of(node: Node) -> Node:
    """A tensor that the node makes: a dependency on a list of tensors is ignored by torch 2.11."""
    if not isinstance(node.meta["val"], (list, tuple)):
        return node
    for user in node.users:
        if user.target is operator.getitem:
            return user
    return call(node.next, operator.getitem, node, 0)
