"""Who depends on which gather, for all nodes of a graph in one sweep."""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import Graph, Node


class Dependencies:
    """Positions in the graph, and for each node the gathers that it depends on, as the bits of one number.

    A fused gather makes all its products at once, where the first of them was made. So an operand of a later
    product must be available there too. It is, without a cycle, if it is made before that place already, or
    if it depends on no gather at all and can be moved there with all that it depends on: fusing only makes
    results available earlier, and nothing that depends on a fused op is moved. (Two gathers whose products
    need one another's later products would otherwise wait for each other.)
    """

    def __init__(self, graph: Graph, gathers: Sequence[Node]) -> None:
        self._bit = {node: 1 << number for number, node in enumerate(gathers)}
        self._position: dict[Node, int] = {}
        self._gathers: dict[Node, int] = {}
        for position, node in enumerate(graph.nodes):
            self._position[node] = position
            bits = self._bit.get(node, 0)
            for source in node.all_input_nodes:
                bits |= self._gathers[source]
            self._gathers[node] = bits

    def position(self, node: Node) -> int:
        return self._position[node]

    def depends(self, node: Node, gather: Node) -> bool:
        """Whether the node is made from the gathered tensor."""
        return bool(self._gathers[node] & self._bit[gather])

    def available(self, node: Node, place: int) -> bool:
        """Whether the node can be had before that position."""
        return self._position[node] < place or not self._gathers[node]
