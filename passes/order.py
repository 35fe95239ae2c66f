"""Keeps everything that communicates within a group in one order, the graph's, on every rank.

Inductor may reorder custom ops that do not depend on each other, and does so differently on ranks with
different shapes. Two ranks that run two fused ops in opposite orders wait for each other for ever:

    rank 0: A waits for rank 1's part of A         rank 1: B waits for rank 0's part of B

So each fused op gets a control dependency on what communicated before it, unless it depends on that already.
The plain collectives of the same groups belong to the order too, as they use the same processes; among
themselves Inductor keeps those in order.

A control dependency is Inductor's own `control_deps`: the op moves into a subgraph of one node, and the
scheduler gets an edge that carries no data and keeps no buffer alive. A token as a further argument of the
ops was the alternative: it needs another output on each op, and cannot order plain collectives.
"""

from __future__ import annotations

import operator
from collections.abc import Collection

from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering
from torch.fx import Graph, Node
from torch.utils._ordered_set import OrderedSet

from flux_inductor.passes.build import call


def pin_order(graph: Graph, fused: Collection[Node], left: Collection[Node]) -> None:
    """Chains the fused ops and the plain collectives `left` of their groups.

    Args:
        graph: in topological order.
    """
    latest = _Latest(graph, fused, left)
    dependencies = {
        node: OrderedSet([_tensor_of(before)])
        for before, node in latest.missing_edges()
        if before in fused or node in fused
    }
    preserve_node_ordering(graph, dependencies)


class _Latest:
    """For each node, how far along the chain its inputs reach. One sweep, linear in the graph."""

    def __init__(self, graph: Graph, fused: Collection[Node], left: Collection[Node]) -> None:
        members = set(fused) | set(left)
        self._chain: list[Node] = []
        self._missing: list[tuple[Node, Node]] = []
        reached: dict[Node, int] = {}
        for node in graph.nodes:
            inputs = max((reached[source] for source in node.all_input_nodes), default=0)
            if node in members:
                if inputs < len(self._chain):
                    self._missing.append((self._chain[-1], node))
                self._chain.append(node)
                inputs = len(self._chain)
            reached[node] = inputs

    def missing_edges(self) -> list[tuple[Node, Node]]:
        """(before, after) of neighbours in the chain that do not depend on each other."""
        return self._missing


def _tensor_of(node: Node) -> Node:
    """A tensor that the node makes: a dependency on a list of tensors is ignored by torch 2.11."""
    if not isinstance(node.meta["val"], (list, tuple)):
        return node
    for user in node.users:
        if user.target is operator.getitem:
            return user
    return call(node.next, operator.getitem, node, 0)
