"""Row-structural ops: those that move, cut, pad or scale whole rows [K] of a tensor and leave each intact.

They commute with a product that contracts the rows, steps(x) @ W == steps(x @ W). So a chain of them may
stand on either side of a matmul, and a pass may replay it there (replay.py) on a tensor with other columns.

A matrix need not look like one on the way: its columns may be several dims, such as heads, and stand before
its rows. So every tensor has roles: which of its dims are columns. A matmul takes and makes plain roles, one
last dim of columns.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from enum import Enum, auto
from typing import cast

import torch
from torch._inductor.fx_passes import post_grad
from torch.fx import Node

from flux_inductor.passes.cuts import PAD, few, padding, pads_zeros, slice_bounds
from flux_inductor.passes.sizes import below, equal, is_tensor, same, tensor
from flux_inductor.passes.views import (
    PERMUTES,
    RESHAPES,
    SQUEEZES,
    Roles,
    permutation,
    plain,
    regrouped,
    squeezed,
)

aten = torch.ops.aten
CONVERT = torch.ops.prims.convert_element_type.default
_COPIES = (aten.clone.default, aten.alias.default, aten.detach.default, aten.lift_fresh_copy.default)
_PRODUCTS = (aten.mul.Tensor, aten.mul.Scalar)
_QUOTIENTS = (aten.div.Tensor, aten.div.Scalar)
_STRUCTURAL = (
    *RESHAPES,
    *PERMUTES,
    *SQUEEZES,
    *_COPIES,
    aten.unsqueeze.default,
    aten.slice.Tensor,
    aten.expand.default,
    CONVERT,
    PAD,
)


class Move(Enum):
    """What a row-structural op does to the rows."""

    RESHAPE = auto()  # keeps their order and shapes the dims anew
    PERMUTE = auto()  # permutes the dims of rows
    TRIM = auto()  # drops less than a shard's rows
    PAD = auto()  # adds rows of zeros
    COPY = auto()  # keeps everything: a copy, or nothing at all
    CAST = auto()  # converts to another dtype
    SCALE = auto()  # multiplies each row by a number
    COLUMNS = auto()  # multiplies each column by a number: no matter of rows, but of the matmul's weight


KEEPS_ORDER = (Move.RESHAPE, Move.COPY, Move.CAST, Move.COLUMNS)


@dataclass(frozen=True)
class Step:
    """One row-structural op on the way of a matrix.

    Args:
        before, after: the roles of `source` and of `node`.
    """

    node: Node
    source: Node
    move: Move
    before: Roles
    after: Roles

    @property
    def factor(self) -> float | Node | None:
        """By what it multiplies, or divides if the op is a division."""
        return factor_of(self.source, self.node)


def source_of(node: Node) -> Node | None:
    """The tensor of which a row-structural op may make `node`; None if it is no such op."""
    first = node.args[0] if node.op == "call_function" and node.args else None
    if node.target in (*_PRODUCTS, *_QUOTIENTS, aten.neg.default):
        shape = tensor(node).shape
        wide = [one for one in node.args[:2] if is_tensor(one) and same(tensor(one).shape, shape)]
        return wide[0] if len(wide) == 1 and factor_of(wide[0], node) is not None else None
    structural = node.target in _STRUCTURAL or _is_merged_split(node.target)
    return first if structural and is_tensor(first) else None


def follow(source: Node, user: Node, roles: Roles, world: int) -> Step | None:
    """The step by which `user` makes its result of all rows of `source`; None if it is no such op."""
    if source_of(user) is not source:
        return None
    found = _followed(source, user, roles, world)
    return None if found is None else Step(user, source, found[0], roles, found[1])


def _followed(source: Node, user: Node, roles: Roles, world: int) -> tuple[Move, Roles] | None:
    target, before, after = user.target, tensor(source), tensor(user)
    if target in RESHAPES:
        anew = regrouped(before.shape, roles, after.shape)
        return None if anew is None else (Move.RESHAPE, anew)
    if target is aten.unsqueeze.default:
        dim = cast(int, user.args[1]) % (len(roles) + 1)
        return Move.RESHAPE, (*roles[:dim], False, *roles[dim:])
    if target in SQUEEZES:
        gone = squeezed(user)
        kept = tuple(columns for dim, columns in enumerate(roles) if dim not in gone)
        whole = len(kept) == after.dim() and not any(roles[dim] for dim in gone)
        return (Move.RESHAPE, kept) if whole else None
    if target in PERMUTES:
        return _permuted(user, roles)
    move = _kept_dims(source, user, roles, world)
    return None if move is None else (move, roles)


def _kept_dims(source: Node, user: Node, roles: Roles, world: int) -> Move | None:
    """The move of an op that leaves the dims as they are, but for their sizes."""
    target, before = user.target, tensor(source)
    if target is aten.slice.Tensor:
        return _follow_slice(user, roles, world)
    if target is PAD:
        pads = [(dim, pad) for dim, both in padding(user) for pad in both if not equal(pad, 0)]
        grows = all(not roles[dim] and below(0, pad) for dim, pad in pads)
        return Move.PAD if grows and pads_zeros(user) else None
    if target is aten.expand.default:
        return Move.COPY if same(before.shape, tensor(user).shape) else None
    if target in _COPIES or _is_merged_split(target):
        return Move.COPY
    if target is CONVERT:
        return Move.COPY if tensor(user).dtype == before.dtype else Move.CAST
    return _follow_factor(source, user, roles)


def _is_merged_split(target: object) -> bool:
    """Whether Inductor has replaced a split and the concatenation of all its parts by this identity."""
    merged = getattr(post_grad, "splitwithsizes_cat_replace", None)
    return merged is not None and isinstance(target, functools.partial) and target.func is merged


def _permuted(node: Node, roles: Roles) -> tuple[Move, Roles] | None:
    order = permutation(node)
    rows = [dim for dim in order if not roles[dim]]
    columns = [dim for dim in order if roles[dim]]
    if columns != sorted(columns):
        return None
    move = Move.RESHAPE if rows == sorted(rows) else Move.PERMUTE
    return move, tuple(roles[dim] for dim in order)


def _follow_slice(node: Node, roles: Roles, world: int) -> Move | None:
    bounds = slice_bounds(node)
    if bounds is None or roles[bounds.dim] or not equal(bounds.start, 0):
        return None
    size = tensor(cast(Node, node.args[0])).shape[bounds.dim]
    dropped = size - bounds.stop
    if equal(dropped, 0):
        return Move.COPY
    return Move.TRIM if few(dropped, size, world) else None


# ---------------------------------------------------------------- factors


def factor_of(source: Node, user: Node) -> float | Node | None:
    """By what `user` multiplies `source`, or divides it; None if it does something else."""
    if user.target is aten.neg.default:
        return -1.0
    if user.target in _QUOTIENTS and user.args[0] is source:
        factor = user.args[1] if user.args[1] != 0 else None
    elif user.target in _PRODUCTS and source in user.args:
        factor = user.args[1] if user.args[0] is source else user.args[0]
    else:
        return None
    return factor if isinstance(factor, (int, float, Node)) and factor is not source else None


def is_quotient(node: Node) -> bool:
    return node.target in _QUOTIENTS


def is_exact(step: Step) -> bool:
    """Whether a scale rounds nothing and leaves no range: a change of sign."""
    return step.factor in (1, -1)


def _follow_factor(source: Node, user: Node, roles: Roles) -> Move | None:
    if tensor(user).dtype != tensor(source).dtype:
        return None
    factor = factor_of(source, user)
    if not is_tensor(factor):
        return Move.SCALE
    shape = tensor(factor).shape
    places = zip(roles[len(roles) - len(shape) :], shape, strict=True)
    varying = {columns for columns, size in places if not equal(size, 1)}
    if not varying:
        return Move.SCALE
    if len(varying) > 1 or roles != plain(len(roles)):
        return None
    return Move.COLUMNS if varying == {True} else Move.SCALE
