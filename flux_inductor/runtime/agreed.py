"""The plan that a call really runs by, after ranks have agreed on it (agreement.py)."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch

from flux_inductor.planning.exchange import Site, adopted, digest_of, exchange_of, geometry, moves_text
from flux_inductor.planning.ops.call import Call
from flux_inductor.planning.ops.op import Op
from flux_inductor.planning.plan import UNFUSED, PlanTable, single
from flux_inductor.planning.topology import Device
from flux_inductor.runtime.agreement import Agreement, CallAgreement
from flux_inductor.runtime.engine import engine_choice
from flux_inductor.runtime.groups import state_of

Run = TypeVar("Run", bound=Callable[..., Any])
_capturing: Callable[[], bool] = getattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False)


@dataclass(frozen=True)
class Agreed:
    """What ranks have agreed on.

    Args:
        table: the plan.
        count: tells the others about a later run; None where the graph does that.
    """

    table: PlanTable
    count: Callable[[], None] | None = None

    def counted(self, run: Run) -> Run:
        """The call, which tells the others that it runs."""
        count = self.count
        if count is None:
            return run

        def counted(*operands: Any) -> Any:
            count()
            return run(*operands)

        return cast(Run, counted)


def captures(device: str) -> bool:
    """Whether what runs now on such a device goes into a CUDA graph."""
    return device == "cuda" and _capturing()


def agree_on_place(table: PlanTable, op: Op, place: str, group: str, device: str) -> Agreed:
    """For an op of a compiled graph. Calls by hand, which have no place and a plan of their own, keep that.

    Raises:
        FusedOpError, ValueError: see `Agreement.verdict`.
    """
    agreement = state_of(group, Agreement) if place and table.fused and not _reference() else None
    if agreement is None or agreement.alone:
        return Agreed(table)
    verdict = agreement.verdict(place, captures(device))
    if not verdict.fused:
        return Agreed(single(UNFUSED))
    return Agreed(adopted(table, op, cast(Device, device), verdict.plan))


def agree_on_call(call: Call, table: PlanTable, group: str, device: str) -> Agreed:
    """For a call whose plan is chosen when it runs: it stands for itself.

    All that this rank alone sees of it tells it from others: they may meet other calls elsewhere.

    Raises:
        FusedOpError, ValueError: see `Agreement.verdict`.
    """
    agreement = state_of(group, CallAgreement)
    if agreement.alone or _reference():
        return Agreed(table)
    exchange = exchange_of(table, call.op, cast(Device, device))
    problem, moves = call.problem, moves_text(*call.moves)
    text = str(Site(moves, geometry(problem), exchange) if exchange else Site(moves))
    digest = digest_of(f"{problem} {table}\n{text}")

    def count() -> None:
        agreement.begin(digest, text, captures(device))

    count()
    if not exchange:
        return Agreed(table, count=count)
    verdict = agreement.verdict(f"{digest}/0", captures(device))
    if not verdict.fused:
        return Agreed(single(UNFUSED), count=count)
    return Agreed(adopted(table, call.op, cast(Device, device), verdict.plan), count)


def _reference() -> bool:
    choice = engine_choice()
    return choice is not None and os.fsdecode(choice) == "reference"
