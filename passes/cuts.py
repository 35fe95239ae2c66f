"""What slices and paddings of a tensor cut out and add."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch.fx import Node

from flux_inductor.passes.sizes import Size, below, tensor, value_of

PAD = torch.ops.aten.constant_pad_nd.default


def few(dropped: Size, size: Size, world: int) -> bool:
    """Whether so many of `size` rows are padding of an uneven shard: fewer than ranks, or than a shard.

    To drop more is no trim but a choice of shards, for which a product of all rows would be a waste. What is
    dropped by a symbol is judged by the sizes that are compiled for: it only decides how much is wasted.
    """
    dropped, size = _hinted(dropped), _hinted(size)
    return below(dropped, world) or below(dropped * world, size)


def _hinted(size: Size) -> Size:
    hint = None if isinstance(size, int) else size.node.hint
    return size if hint is None else int(hint)


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
    dim = cast(int, dim) % source.dim()
    first = value_of(start or 0)
    if isinstance(first, int) and first < 0:
        first = first + source.shape[dim]
    if step != 1 or below(first, 0) or not below(-1, first):
        return None
    # A stop beyond the end is legal: the result's size says where the slice really ends.
    return Bounds(dim, first, first + tensor(node).shape[dim])


def padding(node: Node) -> list[tuple[int, tuple[Size, Size]]]:
    """(dim, (before, after)) of each dim that a constant_pad_nd names."""
    pads = [value_of(pad) for pad in cast(list[object], node.args[1])]
    last = tensor(node).dim() - 1
    return [(last - pair, (pads[2 * pair], pads[2 * pair + 1])) for pair in range(len(pads) // 2)]


def pads_zeros(node: Node) -> bool:
    """Whether a constant_pad_nd adds zeros."""
    return bool((node.args[2] if len(node.args) > 2 else node.kwargs.get("value", 0)) == 0)
