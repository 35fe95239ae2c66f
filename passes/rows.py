"""Row-structural ops: those that move, cut or copy whole rows [K] of a tensor [..., K] and leave each intact.

They commute with a product that contracts the last dim, steps(x) @ W == steps(x @ W). So a chain of them may
stand on either side of a matmul, and a pass may replay it there on a tensor with another last dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import cast

import torch
from torch.fx import Node

from flux_inductor.passes.build import call
from flux_inductor.passes.sizes import Size, below, equal, same, tensor, value_of

aten = torch.ops.aten
RESHAPES = (aten.reshape.default, aten.view.default, aten._unsafe_view.default)
CONVERT = torch.ops.prims.convert_element_type.default
_COPIES = (aten.clone.default, aten.alias.default, aten.detach.default, aten.lift_fresh_copy.default)


class Move(Enum):
    """What a row-structural op does to the rows."""

    RESHAPE = auto()  # keeps their order and shapes the leading dims anew
    PERMUTE = auto()  # permutes leading dims
    TRIM = auto()  # drops less than a shard's rows from the end of a leading dim
    COPY = auto()  # keeps everything: a copy, or nothing at all
    CAST = auto()  # converts to another dtype


KEEPS_ORDER = (Move.RESHAPE, Move.COPY, Move.CAST)


def follow(source: Node, user: Node, world: int) -> Move | None:
    """The move by which `user` makes its result from all rows of `source`; None if it is no such op."""
    if user.op != "call_function" or user.args[:1] != (source,):
        return None
    target, before = user.target, tensor(source)
    last = before.dim() - 1
    if target in RESHAPES:
        after = tensor(user).shape
        return Move.RESHAPE if len(after) > 1 and equal(before.shape[-1], after[-1]) else None
    if target is aten.unsqueeze.default:
        return Move.RESHAPE if _dim(user.args[1], last + 2) != last + 1 else None
    if target is aten.squeeze.dim:
        return Move.RESHAPE if _dim(user.args[1], last + 1) != last else None
    if target in (aten.permute.default, aten.transpose.int):
        return Move.PERMUTE if _permutation(user)[-1] == last else None
    if target is aten.slice.Tensor:
        return _follow_slice(user, last, world)
    if target is aten.expand.default:
        return Move.COPY if same(before.shape, tensor(user).shape) else None
    if target in _COPIES:
        return Move.COPY
    if target is CONVERT:
        return Move.COPY if tensor(user).dtype == before.dtype else Move.CAST
    return None


def _dim(dim: object, dims: int) -> int:
    return cast(int, dim) % dims


def _permutation(node: Node) -> list[int]:
    dims = tensor(node).dim()
    if node.target is aten.permute.default:
        return [_dim(dim, dims) for dim in cast(list[int], node.args[1])]
    order = list(range(dims))
    first, second = (_dim(dim, dims) for dim in node.args[1:3])
    order[first], order[second] = second, first
    return order


def _follow_slice(node: Node, last: int, world: int) -> Move | None:
    bounds = slice_bounds(node)
    if bounds is None or bounds.dim == last or not equal(bounds.start, 0):
        return None
    size = tensor(cast(Node, node.args[0])).shape[bounds.dim]
    dropped = size - bounds.stop
    if equal(dropped, 0):
        return Move.COPY
    # Padding of an uneven shard: fewer rows than ranks, or than a shard. To drop more is no trim but a choice
    # of shards, for which a product of all rows would be a waste.
    return Move.TRIM if below(dropped, world) or below(dropped * world, size) else None


@dataclass(frozen=True)
class Bounds:
    """Rows start to stop of a dim."""

    dim: int
    start: Size
    stop: Size


def slice_bounds(node: Node) -> Bounds | None:
    """What an aten.slice cuts out; None if its step is not 1 or its bounds are not known well enough."""
    source = tensor(cast(Node, node.args[0]))
    dim, start, _, step = (
        node.args[position] if position < len(node.args) else node.kwargs.get(name, default)
        for position, name, default in ((1, "dim", 0), (2, "start", 0), (3, "end", None), (4, "step", 1))
    )
    dim = _dim(dim, source.dim())
    first = value_of(start or 0)
    if isinstance(first, int) and first < 0:
        first = first + source.shape[dim]
    if step != 1 or below(first, 0) or not below(-1, first):
        return None
    # A stop beyond the end is legal: the result's size says where the slice really ends.
    return Bounds(dim, first, first + tensor(node).shape[dim])


def replay(anchor: Node, step: Node, move: Move, value: Node, last: int | Node) -> Node:
    """The step once more, before `anchor`, on `value`: like the step's input, but for the last dim."""
    if move in (Move.COPY, Move.CAST):
        return value
    if step.target in RESHAPES:
        *leading, _ = cast(list[int | Node], step.args[1])
        return call(anchor, aten.reshape.default, value, [*leading, last])
    return call(anchor, step.target, value, *step.args[1:], **step.kwargs)
