"""Parts of a tensor along one dim, and what it means to concatenate them again.

A gather along an inner dim, a dist.all_gather into a list, and the cut before a reduce_scatter are all
written as parts and a concatenation. Only the ranges say whether the ranks' order was kept: they are always
checked.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import cast

import torch
from torch.fx import Node

from flux_inductor.passes.cuts import PAD, few, padding, pads_zeros, slice_bounds
from flux_inductor.passes.reasons import Reason
from flux_inductor.passes.sizes import Size, below, equal, shape_text, tensor

aten = torch.ops.aten
SPLITS = (aten.split.Tensor, aten.split_with_sizes.default, aten.split.sizes, aten.unbind.int)
CUTS = (aten.slice.Tensor, aten.select.int)
CAT = aten.cat.default


@dataclass(frozen=True)
class Piece:
    """Rows start to stop, along `dim`, of the tensor that `source` makes.

    Args:
        without_dim: whether it is one row, and a tensor without that dim.
        padding: rows of zeros behind them.
    """

    source: Node
    dim: int
    start: Size
    stop: Size
    without_dim: bool = False
    padding: Size = 0


def piece_of(node: Node) -> Piece | None:
    """The piece that `node` is, None if it is none."""
    if node.target is operator.getitem:
        split, position = cast(tuple[Node, int], node.args)
        if split.target not in SPLITS:
            return None
        source = cast(Node, split.args[0])
        place = 1 if split.target is aten.unbind.int else 2
        dim = split.args[place] if len(split.args) > place else split.kwargs.get("dim", 0)
        dim = cast(int, dim) % tensor(source).dim()
        if split.target is aten.unbind.int:
            return Piece(source, dim, position, position + 1, without_dim=True)
        sizes = [part.shape[dim] for part in split.meta["val"]]
        start = sum(sizes[:position])
        return Piece(source, dim, start, start + sizes[position])
    if node.target is aten.select.int:
        source, dim, position = cast(tuple[Node, int, int], node.args)
        known = isinstance(position, int) and position >= 0
        return Piece(source, dim % tensor(source).dim(), position, position + 1, True) if known else None
    if node.target is aten.slice.Tensor:
        bounds = slice_bounds(node)
        if bounds is not None:
            return Piece(cast(Node, node.args[0]), bounds.dim, bounds.start, bounds.stop)
    return _padded_piece(node) if node.target is PAD else None


def _padded_piece(node: Node) -> Piece | None:
    piece = piece_of(cast(Node, node.args[0]))
    if piece is None or piece.without_dim or not pads_zeros(node):
        return None
    wanted = [(dim, pads) for dim, pads in padding(node) if not (equal(pads[0], 0) and equal(pads[1], 0))]
    if len(wanted) != 1:
        return None
    dim, (before, after) = wanted[0]
    fits = dim == piece.dim and equal(before, 0) and below(0, after) and piece.padding == 0
    return replace(piece, padding=after) if fits else None


@dataclass(frozen=True)
class Concatenation:
    """Pieces of one tensor, concatenated along `dim`."""

    node: Node
    pieces: tuple[Piece, ...]
    dim: int

    @property
    def source(self) -> Node:
        return self.pieces[0].source

    @property
    def cut(self) -> int:
        """The dim along which the source was cut."""
        return self.pieces[0].dim

    @property
    def without_dim(self) -> bool:
        """Whether the pieces lack the dim along which they were cut."""
        return self.pieces[0].without_dim

    def is_identity(self) -> bool:
        """Whether the result is known to equal the source."""
        return self.cut == self.dim and not self.without_dim and self._covers() and not self._pads()

    def is_trim(self, world: int) -> bool:
        """Whether the result is known to be the source without a few of its rows, in their order."""
        if self.cut != self.dim or self.without_dim or self._pads() or not self._in_order():
            return False
        size = tensor(self.source).shape[self.cut]
        return few(size - tensor(self.node).shape[self.cut], size, world)

    def is_padding(self) -> bool:
        """Whether the result is known to be the source with rows of zeros in between or behind."""
        return self.cut == self.dim and self._covers() and self._pads() and self._in_order()

    def is_by_shards(self, world: int) -> bool:
        """Whether the pieces are known to be the `world` equal parts of the source, in order."""
        size = tensor(self.source).shape[self.cut]
        sizes = [piece.stop - piece.start for piece in self.pieces]
        even = len(self.pieces) == world and all(equal(part * world, size) for part in sizes)
        return even and self._covers() and not self._pads()

    def _pads(self) -> bool:
        return any(not equal(piece.padding, 0) for piece in self.pieces)

    def _in_order(self) -> bool:
        bounds = [bound for piece in self.pieces for bound in (piece.start, piece.stop)]
        known = all(isinstance(bound, int) for bound in bounds)
        return known and all(a <= b for a, b in pairwise(bounds))

    def _covers(self) -> bool:
        ends = equal(self.pieces[0].start, 0) and equal(
            self.pieces[-1].stop, tensor(self.source).shape[self.cut]
        )
        return ends and all(equal(a.stop, b.start) for a, b in pairwise(self.pieces))

    def complaint(self, world: int) -> Reason:
        """Why this is neither the identity nor one part a rank in the ranks' order."""
        ranges = ", ".join(f"{piece.start}:{piece.stop}" for piece in self.pieces)
        shape = shape_text(tensor(self.source).shape)
        text = (
            f"{self.node.name} joins, along dim {self.dim}, the parts {ranges} of dim {self.cut} of {shape}; "
            f"they must be {world} equal parts, each once and in the ranks' order"
        )
        return Reason("chunk-order", text)


def concatenation_of(node: Node) -> Concatenation | None:
    """The concatenation that `node` is, None if not all of it are pieces of one tensor along one dim."""
    if node.target is not CAT:
        return None
    inputs = cast(Sequence[Node], node.args[0])
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    pieces = [piece_of(part) for part in inputs]
    known = [piece for piece in pieces if piece is not None]
    kinds = {(piece.source, piece.dim, piece.without_dim) for piece in known}
    if len(known) < len(pieces) or len(kinds) != 1:
        return None
    return Concatenation(node, tuple(known), cast(int, dim) % tensor(node).dim())
