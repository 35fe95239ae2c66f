"""Matmuls, however the graph writes them: product = lhs [..., K] @ weight [K, N] (+ bias [N]) (+ full).

The weight may also be [1, K, N]: torch.einsum and torch.bmm have it so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch.fx import Node

from flux_inductor.passes.build import call
from flux_inductor.passes.reasons import Reason
from flux_inductor.passes.sizes import Size, equal, same, tensor
from flux_inductor.passes.views import RESHAPES

aten = torch.ops.aten
_PLAIN = (aten.mm.default, aten.bmm.default)
_ADDING = (aten.addmm.default, aten.baddbmm.default)
_REPEATS = (aten.expand.default, aten.unsqueeze.default, *RESHAPES)
# Matmuls that no fused op expresses.
_FOREIGN = (aten._scaled_mm.default,)


@dataclass(frozen=True)
class Matmul:
    """One matmul.

    Args:
        node: what makes the product [..., N].
        lhs: [..., K], of as many dims as the product.
        weight: [K, N] or [1, K, N].
        bias: [N], or None.
        full: another tensor that is added, of a shape that broadcasts to the product's, or None.
    """

    node: Node
    lhs: Node
    weight: Node
    bias: Node | None = None
    full: Node | None = None

    @property
    def operands(self) -> list[Node]:
        """What a fused op needs beside lhs before it starts: weight and bias."""
        return [self.weight] if self.bias is None else [self.weight, self.bias]

    @property
    def depth(self) -> Size:
        """K."""
        return tensor(self.weight).shape[-2]

    @property
    def columns(self) -> Size:
        """N."""
        return tensor(self.weight).shape[-1]

    def matrix(self, anchor: Node) -> Node:
        """The weight as [K, N], before `anchor`."""
        if tensor(self.weight).dim() == 2:
            return self.weight
        return call(anchor, aten.squeeze.dims, self.weight, [0])


def is_matmul(node: Node) -> bool:
    """Whether the node multiplies matrices, in a form that as_matmul understands or not."""
    return node.target in (*_PLAIN, *_ADDING, *_FOREIGN)


def as_matmul(node: Node) -> Matmul | Reason:
    """The matmul that `node` is, or why no fused op expresses it. Only for nodes that are matmuls."""
    if node.target in _FOREIGN:
        return Reason("dtype", f"{node.name} multiplies scaled fp8 matrices")
    added: Node | None = None
    factors = node.args
    if node.target in _ADDING:
        if any(node.kwargs.get(name, 1) != 1 for name in ("alpha", "beta")) or len(node.args) > 3:
            return Reason("scaled-addmm", f"{node.name} has alpha or beta other than 1")
        added, factors = cast(Node, node.args[0]), node.args[1:]
    lhs, rhs = cast(Node, factors[0]), cast(Node, factors[1])
    one = tensor(rhs).dim() == 2 or equal(tensor(rhs).shape[0], 1)
    weight = _repeated(rhs) or (rhs if one else None)
    if weight is None:
        return Reason(
            "batched-weight",
            f"{node.name} multiplies each of the {tensor(rhs).shape[0]} batch entries by a weight of its own",
        )
    return _with_added(node, lhs, weight, added)


def _with_added(node: Node, lhs: Node, weight: Node, added: Node | None) -> Matmul:
    if added is None:
        return Matmul(node, lhs, weight)
    shape = tensor(added).shape
    if len(shape) == 1 and equal(shape[0], tensor(node).shape[-1]):
        return Matmul(node, lhs, weight, bias=added)
    return Matmul(node, lhs, weight, full=added)


def _repeated(rhs: Node) -> Node | None:
    """The one weight [K, N] or [1, K, N] that `rhs` [B, K, N] repeats for every batch entry, or None."""
    matrix = tensor(rhs).shape[-2:]
    source, found = rhs, None
    # As long as the last two dims stay, whole matrices are kept: if they all come from one, it is repeated.
    while tensor(source).dim() > 2 and source.target in _REPEATS:
        source = cast(Node, source.args[0])
        shape = tensor(source).shape
        if not same(shape[-2:], matrix):
            break
        if len(shape) == 2:
            return source
        if len(shape) == 3 and equal(shape[0], 1):
            found = source
    return found
