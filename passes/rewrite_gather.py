"""Replaces a gather and its matmuls by one fused op."""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

from flux_inductor.passes.build import call, erase_unused, size_argument, with_strides_of
from flux_inductor.passes.gather_pair import GatherPair
from flux_inductor.passes.gather_site import Whole
from flux_inductor.passes.matmul import Matmul, as_matmul
from flux_inductor.passes.rows import CONVERT, KEEPS_ORDER, RESHAPES, Move, replay
from flux_inductor.passes.sizes import same, tensor

aten = torch.ops.aten


def rewrite_gather(pair: GatherPair, plan: str) -> Node:
    """Makes the op just before the first of its matmuls, and gives all that was made from the gather.

    The graph is not left in topological order: other users of the gathered tensor may stand before the op.
    """
    collective = pair.site.collective.node
    # Operands as they are now: the rewrite of another pair may have replaced those that were recognised.
    matmuls = [_current(one.matmul.node) for one in pair.consumers]
    anchor = matmuls[0].node
    x = collective.args[0]
    if pair.cast is not None:
        x = call(anchor, CONVERT, x, pair.cast)
    biases = [matmul.bias for matmul in matmuls]
    op = call(
        anchor,
        torch.ops.flux_inductor.all_gather_matmul.default,
        x,
        [matmul.weight for matmul in matmuls],
        biases if any(bias is not None for bias in biases) else [],
        pair.site.collective.group,
        plan,
        pair.dim,
        bool(pair.used),
    )
    dead = []
    for number, (matmul, consumer) in enumerate(zip(matmuls, pair.consumers, strict=True)):
        product = call(anchor, operator.getitem, op, number)
        stages = _stages(matmul, consumer.lhs.steps, product)
        _redirect_sizes(
            pair, dict(zip([pair.root, *(one.node for one in consumer.lhs.steps)], stages, strict=True))
        )
        dead += _replace_product(matmul, consumer.lhs.steps, stages)
    if pair.used:
        dead += _replace_gathered(pair, call(anchor, operator.getitem, op, len(matmuls)))
    erase_unused(collective.graph, [*dead, *(matmul.node for matmul in matmuls), pair.root, collective])
    return op


def _current(node: Node) -> Matmul:
    matmul = as_matmul(node)
    assert isinstance(matmul, Matmul)
    return matmul


def _stages(matmul: Matmul, steps: list[Whole], product: Node) -> list[Node]:
    """The product, and what each step of the gathered tensor's way makes of it."""
    last = size_argument(matmul.node, matmul.weight, 1)
    stages = [product]
    for step in steps:
        assert step.move is not None
        stages.append(replay(matmul.node, step.node, step.move, stages[-1], last))
    return stages


def _redirect_sizes(pair: GatherPair, stage_of: dict[Node, Node]) -> None:
    """Asks a stage of the product for the sizes of the arrangement that it has."""
    for size, whole in pair.site.sizes.items():
        if whole.node in stage_of:
            size.replace_input_with(whole.node, stage_of[whole.node])


def _replace_product(matmul: Matmul, steps: list[Whole], stages: list[Node]) -> list[Node]:
    """Gives the last stage, or an earlier one. Returns nodes that may be left without users."""
    node = matmul.node
    # As it is now: what is added may be another product of this op, which has been replaced since.
    full = _current(node).full
    if full is not None:
        node.replace_all_uses_with(call(node, aten.add.Tensor, stages[-1], full))
        return stages
    shortcuts = [user for user in node.users if _take_shortcut(user, stages, steps)]
    if node.users:
        node.replace_all_uses_with(with_strides_of(node, stages[-1], node))
    return [*shortcuts, *stages]


def _take_shortcut(user: Node, stages: list[Node], steps: list[Whole]) -> bool:
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
    if pair.cast is None:
        pair.root.replace_all_uses_with(gathered)
        if pair.root is pair.site.wait:
            unwaited = pair.site.collective.node
            unwaited.replace_all_uses_with(gathered, delete_user_cb=lambda user: user is not pair.root)
        return []
    # The op gathers what is cast already, so every cast on the way goes, with what came before it.
    last = size_argument(gathered, pair.site.x, -1)
    casts = []
    for whole in pair.used:
        value = gathered
        for step in whole.steps:
            assert step.move is not None
            if step.move is Move.CAST:
                if step.node.users:
                    step.node.replace_all_uses_with(value)
                casts.append(step.node)
                break
            value = replay(step.node, step.node, step.move, value, last)
    return casts
