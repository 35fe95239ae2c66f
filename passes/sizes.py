"""Sizes that may be symbolic: compared only as far as is known, so that no guard is ever added."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias, TypeGuard

import sympy
import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from flux_inductor.dtypes import DTYPE_NAMES
from flux_inductor.planning.problem import Layout

Size: TypeAlias = int | torch.SymInt


def equal(a: Size, b: Size) -> bool:
    """Whether the sizes are known to be equal."""
    return bool(statically_known_true(a == b))


def below(a: Size, b: Size) -> bool:
    """Whether `a` is known to be less than `b`."""
    return bool(statically_known_true(a < b))


def divides(divisor: int, size: Size) -> bool:
    """Whether `size` is known to be a multiple of `divisor`."""
    return bool(statically_known_true(size % divisor == 0))


def same(a: Sequence[Size], b: Sequence[Size]) -> bool:
    """Whether the shapes are known to be equal."""
    return len(a) == len(b) and all(map(equal, a, b))


def product(sizes: Iterable[Size]) -> Size:
    total: Size = 1
    for size in sizes:
        total = total * size
    return total


def as_expression(size: Size) -> int | sympy.Expr:
    """The size as planning takes it."""
    return size if isinstance(size, int) else size.node.expr


def value_of(argument: object) -> Size:
    """The size behind an argument of a node: a number, or the node of a symbolic one."""
    if isinstance(argument, Node):
        argument = argument.meta["val"]
    assert isinstance(argument, (int, torch.SymInt)), argument
    return argument


def tensor(node: Node) -> torch.Tensor:
    """The fake tensor that a node makes."""
    value = node.meta["val"]
    assert isinstance(value, torch.Tensor), (node, type(value))
    return value


def is_tensor(node: object) -> TypeGuard[Node]:
    """Whether this is a node that makes one tensor: graphs also hold sizes, meshes and tuples."""
    return isinstance(node, Node) and isinstance(node.meta.get("val"), torch.Tensor)


def layout_of(weights: Iterable[Node]) -> Layout:
    """How the weights [K, N] lie: column by column, all of them, or not."""
    return "k_major" if all(equal(tensor(weight).stride(-2), 1) for weight in weights) else "n_major"


def shape_text(shape: Sequence[Size]) -> str:
    """A shape for people, such as [64,256] or [2*s0,256]."""
    return f"[{','.join(str(size) for size in shape)}]"


def dtype_text(dtype: torch.dtype) -> str:
    return DTYPE_NAMES.get(dtype, str(dtype).removeprefix("torch."))
