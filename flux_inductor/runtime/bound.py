"""Calls of the fused ops that are bound to everything but their tensors, and remembered.

Checks, the choice of the engine and all that depends on shapes alone cost ten times what a call itself costs
the host. They are made once for each set of shapes, strides, dtypes, devices and options.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from flux_inductor import _core
from flux_inductor.planning.plan import Plan

GatherRun: TypeAlias = Callable[[Tensor, Sequence[Tensor], Sequence[Tensor | None]], list[Tensor]]
ScatterRun: TypeAlias = Callable[[Tensor, Tensor, Tensor | None, Tensor | None], Tensor]
Run = TypeVar("Run")
Value = TypeVar("Value")
OfGather = TypeVar("OfGather")
OfScatter = TypeVar("OfScatter")

REMEMBERED = 1024  # calls of one op and group; dynamic shapes bring many


# What bound calls depend on: of each operand (a tensor, a list of tensors, or None) the shape, strides, dtype
# and device, and whether its address is aligned. As bytes, since hashing them costs next to nothing.
describe = _core.describe
_core.use_exchange_table(torch.Tensor.__dlpack_c_exchange_api__)


@dataclass(slots=True)
class Tally:
    """How often an engine ran an op."""

    runs: int = 0


@dataclass(frozen=True, slots=True)
class BoundCall(Generic[Run]):
    """A call that lacks its tensors.

    Args:
        tally: of the op and the engine.
        run: takes tensors that `describe` finds like those it was bound with.
    """

    tally: Tally
    run: Run


class Executes(Protocol):
    """Executes the ops under one plan, at once. Arguments are the ops' own (see ops.py), checked before."""

    def all_gather_matmul(
        self,
        x: Tensor,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        group: str,
        plan: Plan,
        gather_dim: int,
        return_gathered: bool,
    ) -> list[Tensor]: ...

    def matmul_reduce_scatter(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        addend: Tensor | None,
        group: str,
        plan: Plan,
        scatter_dim: int,
        reduce_op: str,
        scale: float,
    ) -> Tensor: ...


class Remembered(Generic[OfGather, OfScatter]):
    """Of the calls of one process group. See `groups.GroupState`: it goes when the group goes."""

    def __init__(self, name: str, group: dist.ProcessGroup) -> None:
        self.gathers: dict[Hashable, OfGather] = {}
        self.scatters: dict[Hashable, OfScatter] = {}

    def close(self) -> None:
        self.gathers.clear()
        self.scatters.clear()


class BoundCalls(Remembered[BoundCall[GatherRun], BoundCall[ScatterRun]]):
    """The calls of one process group."""


def remember(known: dict[Hashable, Value], key: Hashable, value: Value) -> None:
    """Adds what is known of a call. All is forgotten when it is too much: to make it again costs little."""
    if len(known) >= REMEMBERED:
        known.clear()
    known[key] = value


class PreparesNothing:
    """For engines whose calls have no parts that could be made before."""

    def bind_gather(
        self: Executes,
        x: Tensor,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        group: str,
        plan: Plan,
        gather_dim: int,
        return_gathered: bool,
    ) -> GatherRun:
        return lambda x, weights, biases: self.all_gather_matmul(
            x, weights, biases, group, plan, gather_dim, return_gathered
        )

    def bind_scatter(
        self: Executes,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        addend: Tensor | None,
        group: str,
        plan: Plan,
        scatter_dim: int,
        reduce_op: str,
        scale: float,
    ) -> ScatterRun:
        return lambda x, weight, bias, addend: self.matmul_reduce_scatter(
            x, weight, bias, addend, group, plan, scatter_dim, reduce_op, scale
        )
