"""Replaces a matmul, what is added to its product, and a reduce_scatter by one fused op."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._guards import detect_fake_mode
from torch.fx import Node

from flux_inductor.passes.build import call, erase_unused, size_argument, with_strides_of
from flux_inductor.passes.replay import arranged, repeat, replay, restored, scaled
from flux_inductor.passes.rows import CONVERT, KEEPS_ORDER, Move, Step
from flux_inductor.passes.scatter_site import ScatterSite
from flux_inductor.passes.sizes import Size, equal, same, tensor
from flux_inductor.passes.views import RESHAPES, plain
from flux_inductor.passes.way import Addition, Summand

aten = torch.ops.aten


def rewrite_scatter(site: ScatterSite, plan: str) -> Node:
    """Makes the op in the place of the reduce_scatter, of which it takes all users.

    An un-waited result that the graph returns (selective checkpointing keeps it so) becomes a finished one;
    to wait for it once more, in the backward, is harmless.
    """
    node = site.collective.node
    bias, addend = _added(site, node)
    op = call(
        node,
        torch.ops.flux_inductor.matmul_reduce_scatter.default,
        _left_operand(site, node),
        _weight(site, node),
        bias,
        addend,
        site.collective.group,
        plan,
        site.dim,
        site.reduce_op,
        float(site.term.scale),
        *([] if site.dtype == tensor(site.matmul.lhs).dtype else [site.dtype]),
    )
    result = _result(site, node, op)
    for wait in site.collective.waits:
        wait.replace_all_uses_with(result)
        node.graph.erase_node(wait)
    node.replace_all_uses_with(result)
    erase_unused(node.graph, [node])
    return op


def _result(site: ScatterSite, anchor: Node, op: Node) -> Node:
    """The op's result with the roles of what was scattered."""
    if site.roles == plain(len(site.roles)):
        return op
    shape = tensor(site.product).shape
    _, *inner = (size for size, columns in zip(shape, site.roles, strict=True) if columns)
    return with_strides_of(anchor, restored(anchor, op, site.roles, [-1, *map(int, inner)]), anchor)


def _left_operand(site: ScatterSite, anchor: Node) -> Node:
    """x with the steps of the product taken on it."""
    lhs, steps = site.matmul.lhs, site.steps
    wanted = [*site.shape[:-1], tensor(lhs).shape[-1]]
    if all(step.move in KEEPS_ORDER for step in steps):
        earlier = _before_reshapes(lhs, wanted)
        if earlier is not None:
            return earlier
    value, last = lhs, size_argument(anchor, lhs, -1)
    for step in steps:
        value = replay(anchor, step, value, last)
    return value


def _weight(site: ScatterSite, anchor: Node) -> Node:
    return _with_column_factors(anchor, site.matmul.matrix(anchor), site.steps)


def _with_column_factors(anchor: Node, value: Node, steps: Sequence[Step]) -> Node:
    """The weight [K, N] or a bias [N], scaled as the columns of the product were."""
    for step in steps:
        if step.move is Move.COLUMNS:
            value = scaled(anchor, step, value, [-1])
    return value


def _before_reshapes(node: Node, shape: Sequence[Size]) -> Node | None:
    """The tensor of that shape from which reshapes have made `node`, None if there is none."""
    while not same(tensor(node).shape, shape):
        source = node.args[0] if node.target in RESHAPES else None
        if not isinstance(source, Node) or not equal(tensor(source).shape[-1], shape[-1]):
            return None
        node = source
    return node


def _added(site: ScatterSite, anchor: Node) -> tuple[Node | None, Node | None]:
    """What is added to the scaled product: for each column (bias), and in the product's shape (addend).

    What is computed here has the dtype of the sum: the program may have computed it behind the cast.
    """
    biases, addends = [], []
    for one in site.summands:
        scale = one.addition.scale
        if one.is_bias:
            biases.append(_scaled(anchor, _bias(site, anchor, one), scale, site.dtype))
        else:
            addends.append(_scaled(anchor, _addend(site, anchor, one), scale, site.dtype))
    return _sum(anchor, biases, site.dtype), _sum(anchor, addends, site.dtype)


def _bias(site: ScatterSite, anchor: Node, summand: Summand) -> Node:
    """[N]."""
    value, columns = summand.addition.value, size_argument(anchor, site.matmul.weight, -1)
    if not isinstance(value, Node):
        value = _full(anchor, site, [columns], value)
    if tensor(value).dim() != 1:
        value = call(anchor, aten.reshape.default, value, [-1])
    if not equal(tensor(value).shape[0], site.matmul.columns):
        value = call(anchor, aten.expand.default, value, [columns])
    return _with_column_factors(anchor, value, summand.steps)


def _addend(site: ScatterSite, anchor: Node, summand: Summand) -> Node:
    value = _expanded(anchor, site, summand.addition)
    for step in summand.steps:
        value = repeat(anchor, step, value)
    return arranged(anchor, value, site.roles)


def _expanded(anchor: Node, site: ScatterSite, addition: Addition) -> Node:
    value, like = addition.value, addition.like
    if isinstance(value, Node) and same(tensor(value).shape, tensor(like).shape):
        return value
    sizes = [size_argument(anchor, like, dim) for dim in range(tensor(like).dim())]
    if not isinstance(value, Node):
        return _full(anchor, site, sizes, value)
    return call(anchor, aten.expand.default, value, sizes)


def _full(anchor: Node, site: ScatterSite, sizes: list[int | Node], value: float) -> Node:
    lhs = tensor(site.matmul.lhs)
    mode = detect_fake_mode([lhs])
    assert mode is not None
    with mode:  # no operand of this call says that its result is only a fake
        return call(anchor, aten.full.default, sizes, value, dtype=site.dtype, device=lhs.device)


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
