"""Who depends on which collective, and where among the collectives a fused gather may therefore stand."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from torch.fx import Graph, Node


class Dependencies:
    """Positions in the graph, and for each node the collectives that it depends on, as bits of a number.

    A fused gather makes all its products at once, in the place of its all_gather. An operand that is made
    later is no obstacle, as it can be moved there with all that it depends on, unless that is a later
    collective. Then the op must wait for that one, and with it everything that is made of the gathered
    tensor. This is admitted as long as all collectives that stay plain keep their order, and no two ops wait
    for each other.
    """

    def __init__(self, graph: Graph, collectives: Sequence[Node], candidates: Collection[Node]) -> None:
        """Args:
        graph: in topological order.
        collectives: all of them, in the order of the graph.
        candidates: the gathers among them that may be fused.
        """
        self._number = {node: number for number, node in enumerate(collectives)}
        self._candidates = sum(1 << self._number[node] for node in candidates)
        self._position: dict[Node, int] = {}
        self._needs: dict[Node, int] = {}
        # Of each fused gather, by number: what its op depends on.
        self._fused: dict[int, int] = {}
        self._collectives = collectives
        for position, node in enumerate(graph.nodes):
            self._position[node] = position
            bits = 1 << self._number[node] if node in self._number else 0
            for source in node.all_input_nodes:
                bits |= self._needs[source]
            self._needs[node] = bits

    def position(self, node: Node) -> int:
        return self._position[node]

    def depends(self, node: Node, collective: Node) -> bool:
        """Whether the node is made from the collective's result."""
        return bool(self._needs[node] >> self._number[collective] & 1)

    def crosses(self, operands: Iterable[Node], gather: Node) -> bool:
        """Whether one of the operands depends on a later gather that may be fused."""
        own = self._number[gather]
        return bool((self._needed(operands) & self._candidates) >> own + 1)

    def latest(self, operands: Iterable[Node]) -> int:
        """The number of the last collective that the operands depend on, -1 if there is none."""
        return self._needed(operands).bit_length() - 1

    def admits(self, gather: Node, operands: Iterable[Node]) -> bool:
        """Whether an op may take the place of the gather and make all products with these operands."""
        own, needs = self._number[gather], self._needed(operands)
        if needs >> own == 0:
            return True
        followers = [number for number, needed in self._fused.items() if self._closed(needed) >> own & 1]
        self._fused[own] = needs
        try:
            numbers = range(min([own, *followers]), needs.bit_length())
            return all(self._keeps_order(number) for number in numbers)
        finally:
            del self._fused[own]

    def fuse(self, gather: Node, operands: Iterable[Node]) -> None:
        """Notes that the gather is fused with products of these operands."""
        self._fused[self._number[gather]] = self._needed(operands)

    def _needed(self, operands: Iterable[Node]) -> int:
        bits = 0
        for operand in operands:
            bits |= self._needs[operand]
        return self._closed(bits)

    def _closed(self, bits: int) -> int:
        """With what fused gathers among them depend on."""
        seen = 0
        while found := [number for number in self._fused if (bits & ~seen) >> number & 1]:
            for number in found:
                seen |= 1 << number
                bits |= self._fused[number]
        return bits

    def _keeps_order(self, number: int) -> bool:
        """A fused gather must not need itself, another collective no plain one that comes later."""
        if number in self._fused:
            return not self._closed(self._fused[number]) >> number & 1
        later = self._closed(self._needs[self._collectives[number]]) >> number + 1
        return not any(
            later >> other - number - 1 & 1
            for other in range(number + 1, number + 1 + later.bit_length())
            if other not in self._fused
        )
