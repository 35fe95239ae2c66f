"""Room for plain collectives that run beside a fused op (rule R2).

A plain collective that was started before a fused op, and is not known to be waited for before it, may be in
flight while the op runs. On a GPU it needs SMs, which the op's kernel holds until its end:

    rank 0: all_reduce starts, the fused op waits for rank 1's part
    rank 1: all_reduce starts, is waited for before the fused op, and never ends: rank 0 has no SM for it

So either the op leaves it some SMs, or it is waited for first: whichever the cost model finds cheaper. A wait
in a later graph cannot move, so its collective gets SMs. What an earlier graph has started is waited for.
Whoever asks for a number of SMs gets just that: if it is less than needed, waits move.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch.fx import Graph, Node

from flux_inductor.options import Strategy
from flux_inductor.passes.collectives import WAIT, Collective
from flux_inductor.passes.decide import Setting, decide, topology_for
from flux_inductor.passes.sizes import is_tensor, tensor
from flux_inductor.planning.architectures import architecture_of
from flux_inductor.planning.cost import plain_collective_us
from flux_inductor.planning.problem import Problem
from flux_inductor.planning.strategy import Decision, reserve_of
from flux_inductor.planning.topology import Topology


@dataclass(frozen=True)
class FusedOp:
    """A fused op, the collective that it replaces, and how it was decided."""

    collective: Collective
    problem: Problem
    device: str
    decision: Decision


@dataclass(frozen=True)
class Room:
    """What a fused op does for collectives in flight.

    Args:
        decision: with the plan that it gets.
        waits: nodes that must come before it.
        note: a sentence for people.
    """

    decision: Decision
    waits: tuple[Node, ...]
    note: str


@dataclass(frozen=True)
class _Flight:
    """A plain collective from its start to one of its waits, None if that is in another graph."""

    collective: Collective
    wait: Node | None

    @property
    def started_before(self) -> bool:
        """Whether another graph has started it."""
        return self.collective.node.target is WAIT


def make_room(
    graph: Graph,
    chain: Sequence[Node],
    ops: Mapping[Node, FusedOp],
    plain: Sequence[Collective],
    setting: Setting,
) -> dict[Node, Room]:
    """The room that fused ops need, by op; those that need none are left out.

    Args:
        graph: in topological order.
        chain: all that communicates, in order.
        ops: the fused ones of the chain.
        plain: collectives that stay, and waits for those of earlier graphs.
    """
    on_gpu = {node for node, op in ops.items() if _topology(op, setting).device == "cuda"}
    flights = [flight for one in plain if one.world != 1 for flight in _flights(one)]
    if not on_gpu or not flights:
        return {}
    ended_before = _ended_before(graph, flights)
    rooms: dict[Node, Room] = {}
    clock, ended = 0.0, 0
    # When each flight starts, by the clock of fused ops: those of earlier graphs have started before all.
    started = {number: 0.0 for number, one in enumerate(flights) if one.started_before}
    for node in chain:
        ended |= ended_before[node]
        started |= {n: clock for n, one in enumerate(flights) if one.collective.node is node}
        if node not in ops:
            continue
        beside = [number for number in started if not ended >> number & 1]
        if node in on_gpu and beside:
            elapsed = [clock - started[number] for number in beside]
            room = _room(ops[node], [flights[number] for number in beside], elapsed, setting)
            if room is not None:
                rooms[node] = room
                ended |= sum(1 << number for number in beside if flights[number].wait in room.waits)
        clock += ops[node].decision.fused_us or 0.0
    return rooms


def _topology(op: FusedOp, setting: Setting) -> Topology:
    return topology_for(op.collective, op.device, setting)


def _flights(one: Collective) -> list[_Flight]:
    if one.node.target is WAIT:
        return [_Flight(one, one.node)]
    # Coalesced collectives make several tensors, each with a wait of its own.
    users = {user for source in (one.node, *one.node.users) for user in source.users if user.target is WAIT}
    return [_Flight(one, wait) for wait in sorted(users)] or [_Flight(one, None)]


def _ended_before(graph: Graph, flights: Sequence[_Flight]) -> dict[Node, int]:
    """For each node the flights whose waits it depends on, as bits."""
    bit = {flight.wait: 1 << number for number, flight in enumerate(flights)}
    ended: dict[Node, int] = {}
    for node in graph.nodes:
        bits = bit.get(node, 0)
        for source in node.all_input_nodes:
            bits |= ended[source]
        ended[node] = bits
    return ended


def _room(op: FusedOp, beside: list[_Flight], elapsed: list[float], setting: Setting) -> Room | None:
    asked = setting.options.reserve
    topology = _topology(op, setting)
    has = reserve_of(topology) if asked is None else asked
    if has >= _sms_for(beside, topology):
        return None
    # What an earlier graph has started has most likely ended: to wait for it costs next to nothing.
    old = [one for one in beside if one.started_before]
    new = [one for one in beside if not one.started_before]
    if has < _sms_for(new, topology):
        since = [us for us, one in zip(elapsed, beside, strict=True) if one in new]
        room = (
            _kept_number(op, new, has, topology) if asked is not None else _cheaper(op, new, since, setting)
        )
    else:
        room = Room(op.decision, (), "")
    if not old:
        return room
    note = f"{_names(old)} of an earlier graph is waited for first"
    return Room(room.decision, (*room.waits, *_waits(old)), f"{room.note}; {note}" if room.note else note)


def _kept_number(op: FusedOp, beside: list[_Flight], asked: int, topology: Topology) -> Room:
    """The SMs that the user asks for, and waits before the op in place of the others."""
    waits, needed = _waits(beside), _sms_for(beside, topology)
    note = f"{asked} SMs are reserved, as asked for, where {_names(beside)} may need {needed}"
    return Room(op.decision, waits, f"{note}: waited for first" if waits else note)


def _cheaper(op: FusedOp, beside: list[_Flight], elapsed: list[float], setting: Setting) -> Room:
    """SMs, or waits before the op."""
    waits, needed = _waits(beside), _sms_for(beside, _topology(op, setting))
    movable = len(waits) == len(beside)
    roomy = _with_reserve(op, needed, setting, setting.options.strategy)
    if not roomy.fused and not movable:
        roomy = _with_reserve(op, needed, setting, "always")
    for_wait = sum(
        max(_price(one, op.device, setting) - before, 0.0)
        for one, before in zip(beside, elapsed, strict=True)
    )
    if roomy.fused:
        assert roomy.fused_us is not None
        assert op.decision.fused_us is not None
        for_sms = roomy.fused_us - op.decision.fused_us
    else:
        for_sms = math.inf
    figures = f"predicted {for_sms:.0f} us for SMs against {for_wait:.0f} us for the wait"
    if not roomy.fused or (movable and for_wait < for_sms):
        return Room(op.decision, waits, f"{_names(beside)} is waited for first: {figures}")
    return Room(roomy, (), f"{needed} SMs are reserved for {_names(beside)}: {figures}")


def _waits(flights: Sequence[_Flight]) -> tuple[Node, ...]:
    return tuple(one.wait for one in flights if one.wait is not None)


def _names(flights: Sequence[_Flight]) -> str:
    return ", ".join(sorted({one.collective.node.name for one in flights}))


def _sms_for(beside: Sequence[_Flight], topology: Topology) -> int:
    """SMs that collectives in flight need. Those of one group run one after the other."""
    groups = {one.collective.group for one in beside}
    architecture = architecture_of(topology)
    return min(architecture.reserve * len(groups), architecture.most_reserve)


def _with_reserve(op: FusedOp, reserve: int, setting: Setting, strategy: Strategy) -> Decision:
    options = replace(setting.options, reserve_sms=reserve, strategy=strategy)
    decision = decide(op.problem, op.collective, op.device, replace(setting, options=options))
    assert isinstance(decision, Decision), decision
    return decision


def _price(flight: _Flight, device: str, setting: Setting) -> float:
    """Predicted time of the collective alone; infinite where that is not known."""
    one = flight.collective
    if flight.wait is None or not isinstance(one.group, str) or not one.group:
        return math.inf
    try:
        topology = topology_for(one, device, setting)
    except ValueError:
        return math.inf
    sizes = [tensor(node).nbytes for node in one.node.all_input_nodes if is_tensor(node)]
    if topology.nodes > 1 or topology.link != "nvlink" or not all(isinstance(size, int) for size in sizes):
        return math.inf
    return plain_collective_us(one.op, sum(sizes), one.world, architecture_of(topology).machine)
