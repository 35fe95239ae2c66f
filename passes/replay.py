"""Takes the steps of a way (rows.py) once more, on another tensor than the one they were written for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch.fx import Node

from flux_inductor.passes import pieces
from flux_inductor.passes.build import call, size_argument
from flux_inductor.passes.cuts import PAD, slice_bounds
from flux_inductor.passes.rows import (
    CONVERT,
    Move,
    Step,
    is_quotient,
)
from flux_inductor.passes.sizes import same, tensor
from flux_inductor.passes.views import (
    PERMUTES,
    RESHAPES,
    SQUEEZES,
    Roles,
    permutation,
    plain,
    row_index,
    row_sizes,
    squeezed,
)

aten = torch.ops.aten
_UNCHANGED = (Move.COPY, Move.CAST, Move.COLUMNS)


def replay(anchor: Node, step: Step, value: Node, last: int | Node) -> Node:
    """The step, before `anchor`, on `value`: dims of rows like those of its input, then `last` columns."""
    node = step.node
    if step.move in _UNCHANGED:
        return value
    if step.move is Move.SCALE:
        return scaled(anchor, step, value)
    if node.target in PERMUTES:
        rows = [row_index(step.before, dim) for dim in permutation(node) if not step.before[dim]]
        order = [*rows, len(rows)]
        return value if order == sorted(order) else call(anchor, aten.permute.default, value, order)
    if node.target in RESHAPES:
        if same(row_sizes(step.source, step.before), row_sizes(node, step.after)):
            return value
        sizes = cast(list[int | Node], node.args[1])
        leading = [size for size, columns in zip(sizes, step.after, strict=True) if not columns]
        return call(anchor, aten.reshape.default, value, [*leading, last])
    if node.target is aten.unsqueeze.default:
        dim = cast(int, node.args[1]) % len(step.after)
        return call(anchor, aten.unsqueeze.default, value, row_index(step.after, dim))
    if node.target in SQUEEZES:
        return call(anchor, aten.squeeze.dims, value, [row_index(step.before, dim) for dim in squeezed(node)])
    return _resized(anchor, step, value, lambda dim: row_index(step.before, dim))


def repeat(anchor: Node, step: Step, value: Node) -> Node:
    """The step, before `anchor`, on `value`, of the shape of the step's input."""
    node = step.node
    if step.move in (Move.COPY, Move.CAST):
        return value
    if step.move in (Move.SCALE, Move.COLUMNS):
        return scaled(anchor, step, value)
    if node.target is pieces.CAT or node.target is PAD:
        return _resized(anchor, step, value, lambda dim: dim)
    # A view of the original may be no view of this tensor, whose strides are others.
    target = aten.reshape.default if node.target in RESHAPES else node.target
    return call(anchor, target, value, *node.args[1:], **node.kwargs)


def scaled(anchor: Node, step: Step, value: Node, sizes: list[int] | None = None) -> Node:
    """`value` scaled as the step does it, in the dtype that it has.

    Args:
        sizes: of the factor, None to leave it as it is.
    """
    target = aten.div.Tensor if is_quotient(step.node) else aten.mul.Tensor
    factor, dtype = step.factor, tensor(value).dtype
    if sizes is not None:
        factor = call(anchor, aten.reshape.default, factor, sizes)
    result = call(anchor, target, value, factor)
    return result if tensor(result).dtype == dtype else call(anchor, CONVERT, result, dtype)


def _resized(anchor: Node, step: Step, value: Node, place: Callable[[int], int]) -> Node:
    """Trims and paddings: `place` says which dim of `value` a dim of the step's input is."""
    node = step.node
    if node.target is pieces.CAT:
        whole = pieces.concatenation_of(node)
        assert whole is not None
        dim = place(whole.dim)
        parts = [_piece(anchor, piece, value, dim) for piece in whole.pieces]
        return call(anchor, pieces.CAT, parts, dim)
    if node.target is PAD:
        return _padded(anchor, step, value, place)
    bounds = slice_bounds(node)
    assert bounds is not None
    others = {name: given for name, given in node.kwargs.items() if name != "dim"}
    return call(anchor, aten.slice.Tensor, value, place(bounds.dim), *node.args[2:], **others)


def _piece(anchor: Node, piece: pieces.Piece, value: Node, dim: int) -> Node:
    part = call(anchor, aten.slice.Tensor, value, dim, piece.start, piece.stop)
    if piece.padding == 0:
        return part
    behind = [0, 0] * (tensor(value).dim() - 1 - dim)
    return call(anchor, PAD, part, [*behind, 0, piece.padding])


def _padded(anchor: Node, step: Step, value: Node, place: Callable[[int], int]) -> Node:
    """The padding of dims of rows, as arguments: they may be symbols."""
    given = cast(list[int | Node], step.node.args[1])
    dims = len(step.before)
    pads: list[int | Node] = [0] * (2 * tensor(value).dim())
    for pair in range(len(given) // 2):
        dim = dims - 1 - pair
        if not step.before[dim]:
            first = 2 * (tensor(value).dim() - 1 - place(dim))
            pads[first : first + 2] = given[2 * pair : 2 * pair + 2]
    return call(anchor, PAD, value, pads)


# ---------------------------------------------------------------- roles


def arranged(anchor: Node, value: Node, roles: Roles) -> Node:
    """A tensor of these roles with plain ones: dims of rows in their order, then one dim of columns."""
    order = _order(roles)
    if order != sorted(order):
        value = call(anchor, aten.permute.default, value, order)
    if sum(roles) == 1:
        return value
    rows = [size_argument(anchor, value, dim) for dim in range(len(roles) - sum(roles))]
    return call(anchor, aten.reshape.default, value, [*rows, -1])


def restored(anchor: Node, value: Node, roles: Roles, columns: Sequence[int | Node]) -> Node:
    """The inverse: `value`, of plain roles, with these roles and, if several, these dims of columns."""
    if roles == plain(len(roles)):
        return value
    if len(columns) > 1:
        rows = [size_argument(anchor, value, dim) for dim in range(len(roles) - len(columns))]
        value = call(anchor, aten.reshape.default, value, [*rows, *columns])
    order = _order(roles)
    if order == sorted(order):
        return value
    return call(anchor, aten.permute.default, value, [order.index(dim) for dim in range(len(order))])


def _order(roles: Roles) -> list[int]:
    dims = range(len(roles))
    return [*(dim for dim in dims if not roles[dim]), *(dim for dim in dims if roles[dim])]
