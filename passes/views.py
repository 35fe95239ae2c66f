"""Views of a matrix: which dims are its rows and which its columns, and what reshapes do to them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias, cast

import torch
from torch.fx import Node

from flux_inductor.passes.sizes import Size, equal, product, tensor

aten = torch.ops.aten
RESHAPES = (aten.reshape.default, aten.view.default, aten._unsafe_view.default)
PERMUTES = (aten.permute.default, aten.transpose.int)
SQUEEZES = (aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)

Roles: TypeAlias = tuple[bool, ...]  # for each dim, whether it belongs to the columns


def plain(dims: int) -> Roles:
    """The roles of a matmul's operand and result."""
    return (*(False for _ in range(dims - 1)), True)


def row_index(roles: Roles, dim: int) -> int:
    """Which of the dims of rows `dim` is."""
    return sum(not columns for columns in roles[:dim])


def row_sizes(node: Node, roles: Roles) -> list[Size]:
    return [size for size, columns in zip(tensor(node).shape, roles, strict=True) if not columns]


def _dim(dim: object, dims: int) -> int:
    return cast(int, dim) % dims


def regrouped(before: Sequence[Size], roles: Roles, after: Sequence[Size]) -> Roles | None:
    """The roles after a reshape; None if it mixes rows and columns.

    Neighbouring dims of one role are a group. If the dims afterwards fall into groups of the same sizes, each
    group was reshaped by itself. Dims of size 1 belong to no group and count as rows.
    """
    if roles == plain(len(before)) and len(after) > 1 and equal(before[-1], after[-1]):
        return plain(len(after))
    groups = _groups(before, roles)
    result = []
    columns, left = next(groups, (False, 1))
    gone: Size = 1
    for size in after:
        if equal(size, 1):
            result.append(False)
            continue
        result.append(columns)
        gone = gone * size
        if equal(gone, left):
            gone = 1
            columns, left = next(groups, (False, 1))
    complete = equal(gone, 1) and equal(left, 1) and any(result)
    return tuple(result) if complete else None


def _groups(shape: Sequence[Size], roles: Roles) -> Iterator[tuple[bool, Size]]:
    """(whether columns, elements) of each run of dims of one role, without dims of size 1."""
    dims = [(columns, size) for columns, size in zip(roles, shape, strict=True) if not equal(size, 1)]
    start = 0
    for stop in range(1, len(dims) + 1):
        if stop == len(dims) or dims[stop][0] != dims[start][0]:
            yield dims[start][0], product(size for _, size in dims[start:stop])
            start = stop


def squeezed(node: Node) -> list[int]:
    """The dims that a squeeze removes."""
    shape = tensor(cast(Node, node.args[0])).shape
    if node.target is aten.squeeze.default:
        asked = list(range(len(shape)))
    elif node.target is aten.squeeze.dim:
        asked = [_dim(node.args[1], len(shape))]
    else:
        asked = [_dim(dim, len(shape)) for dim in cast(list[int], node.args[1])]
    return [dim for dim in asked if equal(shape[dim], 1)]


def permutation(node: Node) -> list[int]:
    """Which dim of its input each dim of a permuted tensor is."""
    dims = tensor(node).dim()
    if node.target is aten.permute.default:
        return [_dim(dim, dims) for dim in cast(list[int], node.args[1])]
    order = list(range(dims))
    first, second = (_dim(dim, dims) for dim in node.args[1:3])
    order[first], order[second] = second, first
    return order
