"""The way of a product from its matmul to the scatter, and what is added to it on that way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from flux_inductor.passes.matmul import Matmul
from flux_inductor.passes.reasons import Reason
from flux_inductor.passes.rows import Move, Step, follow
from flux_inductor.passes.sizes import below, equal, product, shape_text, tensor
from flux_inductor.passes.views import Roles, plain


@dataclass(frozen=True)
class Stretch:
    """A node that may be a row-structural op on `source`.

    Args:
        move: what it does, None if that depends on the roles.
    """

    source: Node
    node: Node
    move: Move | None = None


def steps_of(
    matmul: Matmul, stretches: Sequence[Stretch], world: int
) -> tuple[tuple[Step, ...], Roles] | Reason:
    """The stretches as steps of the product, and its roles behind them; or why they are none."""
    roles = plain(tensor(matmul.node).dim())
    steps = []
    for stretch in stretches:
        step = _step(stretch, roles, world)
        if step is None:
            shape = shape_text(tensor(stretch.source).shape)
            text = (
                f"{stretch.node.name} ({stretch.node.target}) does not keep the rows of the product {shape}"
            )
            return Reason("no-matmul", f"the scattered tensor is no product: {text}")
        steps.append(step)
        roles = step.after
    scales = [step for step in steps if step.move in (Move.SCALE, Move.COLUMNS)]
    if scales and tensor(matmul.lhs).dtype == torch.float16:
        text = f"{scales[0].node.name} scales the fp16 product; an operand scaled instead may leave the range"
        return Reason("factor", text)
    rows = product(tensor(matmul.lhs).shape[:-1])
    if any(step.move is Move.COLUMNS for step in scales) and below(rows, matmul.depth):
        text = f"{matmul.node.name} has fewer rows than its weight: to scale that instead costs more"
        return Reason("factor", text)
    return tuple(steps), roles


def _step(stretch: Stretch, roles: Roles, world: int) -> Step | None:
    if stretch.move is None:
        return follow(stretch.source, stretch.node, roles, world)
    before, after = tensor(stretch.source).shape, tensor(stretch.node).shape
    changed = [dim for dim in range(len(roles)) if not equal(before[dim], after[dim])]
    if any(roles[dim] for dim in changed):
        return None
    return Step(stretch.node, stretch.source, stretch.move, roles, roles)


# ---------------------------------------------------------------- what is added


@dataclass(frozen=True)
class Addition:
    """What is added on the way: steps(scale * expand(value)).

    Args:
        like: the node to whose shape it is expanded.
        steps: how many steps of the way follow.
    """

    value: Node | float
    like: Node
    steps: int
    scale: float


@dataclass(frozen=True)
class Summand:
    """An addition with the steps that are still taken on it.

    Args:
        is_bias: whether it has one entry a column of the op's product, or one at all.
    """

    addition: Addition
    steps: Sequence[Step]
    is_bias: bool


def summand_of(addition: Addition, steps: Sequence[Step], roles: Roles) -> Summand:
    """The addition on a way of these steps, to a tensor of these roles."""
    rest = steps[len(steps) - addition.steps :]
    at = rest[0].before if rest else roles
    return Summand(addition, rest, _is_bias(addition, rest, at))


def _is_bias(addition: Addition, steps: Sequence[Step], roles: Roles) -> bool:
    if roles != plain(len(roles)) or any(step.move in (Move.PAD, Move.SCALE) for step in steps):
        return False
    if not isinstance(addition.value, Node):
        return True
    *rows, columns = (1, *tensor(addition.value).shape)
    return all(equal(size, 1) for size in rows) and (
        equal(columns, 1) or equal(columns, tensor(addition.like).shape[-1])
    )
