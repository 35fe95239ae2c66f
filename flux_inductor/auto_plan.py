"""Plan "auto", which functions that are called by name pass: the strategy's choice, made when the op runs.

Not when it is called: a trace (torch.compile, make_fx) may have no sizes to choose by, and must not wait for
peers to say which hosts they run on. ops.py remembers the choice with the call that it was made for.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from flux_inductor.options import current
from flux_inductor.planning.architecture import Architecture
from flux_inductor.planning.architectures import KINDS
from flux_inductor.planning.ops.call import Call
from flux_inductor.planning.plan import PlanTable, parse_plan
from flux_inductor.planning.strategy import choose
from flux_inductor.planning.topology import Device, Topology
from flux_inductor.runtime.detect import topology_of
from flux_inductor.runtime.engine import installed
from flux_inductor.runtime.plain_collectives import communicators_seen

AUTO = "auto"


def plan_call(call: Call, group: str, device: str) -> PlanTable:
    """The plan of a call that was checked before.

    Raises:
        ValueError: a bad option, or no engine for the device.
    """
    options = current()
    written = Topology.parse(options.topology) if options.topology else None
    topology = written if written and written.ranks == call.world else topology_of(group, device)
    decision = choose(
        call.problem, topology, options.strategy, installed=installed(), reserve=_reserve(group, device)
    )
    return decision.plan


def plan_by_hand(text: str, group: str, device: str) -> PlanTable:
    """A plan that the caller wrote. On CUDA, one without a reserve leaves SMs to what may be in flight (R2).

    Raises:
        ValueError: see `parse_plan`.
    """
    table = parse_plan(text)
    reserve = _reserve(group, device)
    if not reserve:
        return table
    return PlanTable(
        tuple(
            (bound, plan if plan.reserve or not plan.fused else replace(plan, reserve=reserve))
            for bound, plan in table.entries
        )
    )


def _reserve(group: str, device: str) -> int | None:
    """The option, or SMs for the plain collectives of these ranks that have been seen; None: neither."""
    architecture = _architecture(device)
    if architecture is None or not architecture.reserve:
        return None
    chosen = current().reserve
    if chosen is not None:
        return chosen
    seen = communicators_seen(group)
    return seen * architecture.reserve if seen else None


def _architecture(device: str) -> type[Architecture] | None:
    """None for devices that no plan is made for."""
    return KINDS.get(cast(Device, device))
