"""Replaces a gather and its matmuls by one fused op."""

from __future__ import annotations

import operator
from typing import cast

import torch
from torch.fx import Node

from flux_inductor.passes.build import call, erase_unused, size_argument, with_strides_of
from flux_inductor.passes.gather_pair import GatherPair
from flux_inductor.passes.gather_site import Consumer
from flux_inductor.passes.matmul import Matmul, as_matmul
from flux_inductor.passes.replay import arranged, repeat, replay, restored, scaled
from flux_inductor.passes.rows import (
    CONVERT,
    KEEPS_ORDER,
    Move,
    Step,
)
from flux_inductor.passes.sizes import same, tensor
from flux_inductor.passes.views import RESHAPES, plain, row_index

aten = torch.ops.aten


def rewrite_gather(pair: GatherPair, plan: str) -> Node:
    """Makes the op just before the first of its matmuls, and gives all that was made from the gather.

    The graph is not left in topological order: other users of the gathered tensor may stand before the op.
    """
    collective = pair.site.collective.node
    # Operands as they are now: the rewrite of another pair may have replaced those that were recognised.
    matmuls = [_current(one.matmul.node) for one in pair.consumers]
    anchor = matmuls[0].node
    x = pair.site.x
    if pair.cast is not None:
        x = call(anchor, CONVERT, x, pair.cast)
    x = arranged(anchor, x, pair.site.roles)
    both = list(zip(matmuls, pair.consumers, strict=True))
    biases = [None if consumer.adds_behind else matmul.bias for matmul, consumer in both]
    op = call(
        anchor,
        torch.ops.flux_inductor.all_gather_matmul.default,
        x,
        [_weight(anchor, matmul, consumer) for matmul, consumer in both],
        biases if any(bias is not None for bias in biases) else [],
        pair.site.collective.group,
        plan,
        pair.dim,
        bool(pair.used),
    )
    dead = []
    for number, (matmul, consumer) in enumerate(both):
        product = call(anchor, operator.getitem, op, number)
        stages = _stages(matmul, consumer.lhs.steps, product)
        _redirect_sizes(
            pair, dict(zip([pair.root, *(one.node for one in consumer.lhs.steps)], stages, strict=True))
        )
        dead += _replace_product(matmul, consumer, stages)
    if pair.used:
        dead += _replace_gathered(pair, call(anchor, operator.getitem, op, len(matmuls)))
    erase_unused(collective.graph, [*dead, *(matmul.node for matmul in matmuls), pair.root, collective])
    return op


def _current(node: Node) -> Matmul:
    matmul = as_matmul(node)
    assert isinstance(matmul, Matmul)
    return matmul


def _weight(anchor: Node, matmul: Matmul, consumer: Consumer) -> Node:
    """The weight, its rows scaled as the columns of the gathered tensor were."""
    weight = matmul.matrix(anchor)
    for step in consumer.factors:
        weight = scaled(anchor, step, weight, [-1, 1])
    return weight


def _stages(matmul: Matmul, steps: list[Step], product: Node) -> list[Node]:
    """The product, and what each step of the gathered tensor's way makes of it."""
    last = size_argument(matmul.node, matmul.weight, -1)
    stages = [product]
    for step in steps:
        stages.append(replay(matmul.node, step, stages[-1], last))
    return stages


def _redirect_sizes(pair: GatherPair, stage_of: dict[Node, Node]) -> None:
    """Asks a stage of the product for the sizes of the arrangement that it has."""
    for size, whole in pair.site.sizes.items():
        if whole.node in stage_of:
            dim = row_index(whole.roles, cast(int, size.args[1]))
            size.args = (stage_of[whole.node], dim)


def _replace_product(matmul: Matmul, consumer: Consumer, stages: list[Node]) -> list[Node]:
    """Gives the last stage, or an earlier one. Returns nodes that may be left without users."""
    node, steps = matmul.node, consumer.lhs.steps
    # As it is now: what is added may be another product of this op, which has been replaced since.
    added = _current(node).full
    if added is None and consumer.adds_behind:
        added = matmul.bias
    if added is not None:
        node.replace_all_uses_with(call(node, aten.add.Tensor, stages[-1], added))
        return stages
    shortcuts = [user for user in node.users if _take_shortcut(user, stages, steps)]
    if node.users:
        node.replace_all_uses_with(with_strides_of(node, stages[-1], node))
    return [*shortcuts, *stages]


def _take_shortcut(user: Node, stages: list[Node], steps: list[Step]) -> bool:
    """Replaces a reshape of the product by an earlier stage of that shape, if rows kept their order since."""
    if user.target not in RESHAPES:
        return False
    for number in range(len(steps)):
        in_order = all(step.move in KEEPS_ORDER for step in steps[number:])
        if in_order and same(tensor(stages[number]).shape, tensor(user).shape):
            user.replace_all_uses_with(with_strides_of(user, stages[number], user))
            return True
    return False


def _replace_gathered(pair: GatherPair, gathered: Node) -> list[Node]:
    """Gives the gathered tensor to all that need it. Returns nodes that may be left without users."""
    whole = _restored(pair, gathered)
    if pair.cast is None:
        pair.root.replace_all_uses_with(whole)
        if pair.root is pair.site.wait:
            unwaited = pair.site.collective.node
            unwaited.replace_all_uses_with(whole, delete_user_cb=lambda user: user is not pair.root)
        return []
    # The op gathers what is cast already, so every cast on the way goes, with what came before it.
    casts = []
    for used in pair.used:
        value = whole
        for step in used.steps:
            if step.move is Move.CAST:
                if step.node.users:
                    step.node.replace_all_uses_with(value)
                casts.append(step.node)
                break
            value = repeat(step.node, step, value)
    return casts


def _restored(pair: GatherPair, gathered: Node) -> Node:
    """The gathered tensor with the roles, and the strides, of the one that it replaces."""
    site, anchor = pair.site, gathered.next
    if site.roles == plain(len(site.roles)):
        return gathered
    dims = [dim for dim, columns in enumerate(site.roles) if columns]
    sizes = [size_argument(anchor, site.x, dim) for dim in dims]
    return with_strides_of(anchor, restored(anchor, gathered, site.roles, sizes), pair.root)
