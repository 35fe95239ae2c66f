"""Replaces a matmul, what is added to its product, and a reduce_scatter by one fused op."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Node

from flux_inductor.passes.build import call, erase_unused, size_argument
from flux_inductor.passes.rows import CONVERT, KEEPS_ORDER, RESHAPES, Move, replay
from flux_inductor.passes.scatter_site import Addition, ScatterSite
from flux_inductor.passes.sizes import Size, equal, same, tensor

aten = torch.ops.aten


def rewrite_scatter(site: ScatterSite, plan: str) -> Node:
    """Makes the op in the place of the reduce_scatter, of which it takes all users.

    An un-waited result that the graph returns (selective checkpointing keeps it so) becomes a finished one;
    to wait for it once more, in the backward, is harmless.
    """
    node, matmul = site.collective.node, site.matmul
    columns = size_argument(node, matmul.weight, 1)
    bias, addend = _added(site, node, columns)
    op = call(
        node,
        torch.ops.flux_inductor.matmul_reduce_scatter.default,
        _left_operand(site, node),
        matmul.weight,
        bias,
        addend,
        site.collective.group,
        plan,
        site.dim,
        site.reduce_op,
        float(site.term.scale),
        *([] if site.dtype == tensor(matmul.lhs).dtype else ["", site.dtype]),  # the place comes later
    )
    for wait in site.collective.waits:
        wait.replace_all_uses_with(op)
        node.graph.erase_node(wait)
    node.replace_all_uses_with(op)
    erase_unused(node.graph, [node])
    return op


def _left_operand(site: ScatterSite, anchor: Node) -> Node:
    """x with the steps of the product taken on it."""
    lhs, steps = site.matmul.lhs, site.term.steps
    wanted = [*tensor(site.product).shape[:-1], tensor(lhs).shape[-1]]
    if all(move in KEEPS_ORDER for _, move in steps):
        earlier = _before_reshapes(lhs, wanted)
        if earlier is not None:
            return earlier
    return _replayed(anchor, steps, lhs, size_argument(anchor, lhs, -1))


def _before_reshapes(node: Node, shape: Sequence[Size]) -> Node | None:
    """The tensor of that shape from which reshapes have made `node`, None if there is none."""
    while not same(tensor(node).shape, shape):
        source = node.args[0] if node.target in RESHAPES else None
        if not isinstance(source, Node) or not equal(tensor(source).shape[-1], shape[-1]):
            return None
        node = source
    return node


def _replayed(anchor: Node, steps: Sequence[tuple[Node, Move]], value: Node, last: int | Node) -> Node:
    for step, move in steps:
        value = replay(anchor, step, move, value, last)
    return value


def _added(site: ScatterSite, anchor: Node, columns: int | Node) -> tuple[Node | None, Node | None]:
    """What is added to the scaled product: for each column (bias), and in the product's shape (addend).

    What is computed here has the dtype of the sum: the program may have computed it behind the cast.
    """
    biases, addends = [], []
    for addition in site.additions:
        if addition.is_bias:
            biases.append(_scaled(anchor, addition.node, addition.scale, site.dtype))
        else:
            value = _replayed(anchor, addition.steps, _expanded(anchor, addition), columns)
            addends.append(_scaled(anchor, value, addition.scale, site.dtype))
    return _sum(anchor, biases, site.dtype), _sum(anchor, addends, site.dtype)


def _expanded(anchor: Node, addition: Addition) -> Node:
    if same(tensor(addition.node).shape, tensor(addition.like).shape):
        return addition.node
    sizes = [size_argument(anchor, addition.like, dim) for dim in range(tensor(addition.like).dim())]
    return call(anchor, aten.expand.default, addition.node, sizes)


def _converted(anchor: Node, value: Node, dtype: torch.dtype) -> Node:
    return value if tensor(value).dtype == dtype else call(anchor, CONVERT, value, dtype)


def _scaled(anchor: Node, value: Node, scale: float, dtype: torch.dtype) -> Node:
    if scale == 1:
        return value
    return call(anchor, aten.mul.Tensor, _converted(anchor, value, dtype), scale)


def _sum(anchor: Node, values: list[Node], dtype: torch.dtype) -> Node | None:
    if not values:
        return None
    total, *rest = values
    for value in rest:
        total = call(anchor, aten.add.Tensor, _converted(anchor, total, dtype), value)
    return total
