"""Calls of the fused ops that are bound to everything but their tensors, and remembered.

Checks, the choice of the engine and all that depends on shapes alone cost ten times what a call itself costs
the host. They are made once for each set of shapes, strides, dtypes, devices and options.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from flux_inductor import _core

Run: TypeAlias = Callable[..., Any]  # takes the operands of an op, gives its results

REMEMBERED = 1024  # calls of one group; dynamic shapes bring many


# What bound calls depend on: of each operand (a tensor, a list of tensors, or None) the shape, strides, dtype
# and device, and whether its address is aligned. As bytes, since hashing them costs next to nothing.
describe = _core.describe
_core.use_exchange_table(torch.Tensor.__dlpack_c_exchange_api__)


@dataclass(slots=True)
class Tally:
    """How often an engine ran an op."""

    runs: int = 0


@dataclass(frozen=True, slots=True)
class BoundCall:
    """A call that lacks its tensors.

    Args:
        tally: of the op and the engine.
        run: takes tensors that `describe` finds like those it was bound with.
    """

    tally: Tally
    run: Run


class BoundCalls:
    """The calls of one process group. See `groups.GroupState`: it goes when the group goes."""

    # Calls that this rank has refused before an engine began them. Part of what ranks compare (rule R9).
    refused = 0

    def __init__(self, name: str, group: dist.ProcessGroup) -> None:
        self.known: dict[Hashable, BoundCall] = {}

    def close(self) -> None:
        self.known.clear()


def remember(known: dict[Hashable, BoundCall], key: Hashable, value: BoundCall) -> None:
    """Adds what is known of a call. All is forgotten when it is too much: to make it again costs little."""
    if len(known) >= REMEMBERED:
        known.clear()
    known[key] = value
