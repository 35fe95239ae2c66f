"""The one order of all that communicates in a graph, and the graph's nodes in that order."""

from __future__ import annotations

import heapq
import operator
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise

from torch.fx import Graph, Node


def chain_of(graph: Graph, sequence: Sequence[Node], fused: Collection[Node]) -> list[Node]:
    """The order in which collectives and fused ops run: `sequence`, wherever the data allow it.

    A fused gather with an operand that depends on a later collective stands right behind that one. Plain
    collectives always keep their order among themselves, since a rank that fuses nothing has it too.

    Args:
        graph: in topological order.
        sequence: all members in the order of the unfused program, each fused op in the place of the
            collective that it replaces.
    """
    before = _members_before(graph, sequence)
    plain = [number for number, node in enumerate(sequence) if node not in fused]
    for earlier, later in pairwise(plain):
        before[later] |= 1 << earlier
    waiting = {number: bits.bit_count() for number, bits in enumerate(before)}
    ready = [number for number, count in waiting.items() if count == 0]
    chain: list[int] = []
    while ready:
        number = heapq.heappop(ready)
        chain.append(number)
        for other, bits in enumerate(before):
            if bits >> number & 1:
                waiting[other] -= 1
                if waiting[other] == 0:
                    heapq.heappush(ready, other)
    assert len(chain) == len(sequence), "fused ops and collectives wait for each other"
    return [sequence[number] for number in chain]


def _members_before(graph: Graph, sequence: Sequence[Node]) -> list[int]:
    """For each member the numbers of those that it depends on, as bits."""
    number_of = {node: number for number, node in enumerate(sequence)}
    before = [0] * len(sequence)
    bits_of: dict[Node, int] = {}
    for node in graph.nodes:
        bits = 0
        for source in node.all_input_nodes:
            bits |= bits_of[source]
        if node in number_of:
            before[number_of[node]] = bits
            bits |= 1 << number_of[node]
        bits_of[node] = bits
    return before


def arrange(graph: Graph, chain: Sequence[Node], waits: Mapping[Node, Sequence[Node]]) -> None:
    """Moves members up to their places in the chain, each with all that it depends on.

    A member moves only if one that comes later in the chain stands before it, and no further than needed:
    to just before that one. So the graph's order, and with it what is alive at once, stays as it is where no
    other collective is passed. Where one is, a gather's products are alive from there on, in place of the
    gathered tensor; casts and copies that are made for it alone end with it.

    Args:
        graph: in topological order.
        waits: for members, nodes that must come before them in addition to their inputs.
    """
    position = {node: number for number, node in enumerate(graph.nodes)}
    place = {node: number for number, node in enumerate(chain)}
    order: list[Node] = []
    done: set[Node] = set()
    reached = 0

    def take(member: Node) -> None:
        needed, pending = {member}, [member]
        while pending:
            node = pending.pop()
            for source in (*node.all_input_nodes, *waits.get(node, ())):
                if source not in done and source not in needed:
                    needed.add(source)
                    pending.append(source)
        # The first tensor of a list comes with it: what must follow the op names that one.
        first = [user for user in member.users if user.target is operator.getitem][:1]
        order.extend([*sorted(needed - {member}, key=position.__getitem__), member, *first])
        done.update(needed, first)

    for node in graph.nodes:
        if node in done:
            continue
        if node in place:
            for member in chain[reached : place[node] + 1]:
                take(member)
            reached = place[node] + 1
        else:
            order.append(node)
            done.add(node)
    for node, after in pairwise(reversed(order)):
        if after.next is not node:
            node.prepend(after)
