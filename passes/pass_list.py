"""The graph passes, in the order in which they run.

Each is a function of the work on one graph, which it changes, and says how much it did. PASSES alone names
the order; a further pass is one entry more. `run_passes` times each, counts what it did, and shows the graph
to a debug log before the first and after each that changed it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from torch._inductor.pattern_matcher import stable_topological_sort
from torch.fx import Graph

from flux_inductor.passes.agreement import add_agreement, parts_of, site_of
from flux_inductor.passes.build import set_argument
from flux_inductor.passes.chain import arrange, chain_of
from flux_inductor.passes.collectives import find_collectives, merge_waits
from flux_inductor.passes.decide import Setting
from flux_inductor.passes.fuse import fuse_gathers, fuse_scatters, leave_others
from flux_inductor.passes.in_flight import make_room
from flux_inductor.passes.order import pin_order
from flux_inductor.passes.record import CollectiveRecord
from flux_inductor.passes.work import Work

logger = logging.getLogger("flux_inductor.passes")


@dataclass(frozen=True)
class GraphPass:
    """One step.

    Args:
        run: changes the work; returns how many things it changed, of those that `counts` names.
    """

    name: str
    counts: str
    run: Callable[[Work], int]


@dataclass(frozen=True)
class PassRun:
    """What one pass did in one graph."""

    graph: str
    name: str
    counts: str
    count: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.name}: {self.count} {self.counts} in {1e3 * self.seconds:.1f} ms ({self.graph})"


def tidy(work: Work) -> int:
    """Sorts the graph, which a user's pass may have left unsorted, without what nobody needs."""
    before = len(work.graph.nodes)
    stable_topological_sort(work.graph)
    work.graph.eliminate_dead_code()
    merge_waits(work.graph)
    return before - len(work.graph.nodes)


def find(work: Work) -> int:
    """Lists the collectives, and what of them ranks compare, while all are as the program has them."""
    work.collectives = list(find_collectives(work.graph))
    work.parts = parts_of(work.collectives)
    work.identity = f"{work.name}\n{work.graph}"
    return len(work.collectives)


def sort_and_check(work: Work) -> int:
    """Sorts the rewritten graph. A collective that is reported as fused must not run as well."""
    if work.fused:
        stable_topological_sort(work.graph)
    still = work.fused.keys() & set(work.graph.nodes)
    assert not still, f"reported as fused, and still in the graph: {still}"
    return len(work.fused)


def leave_room(work: Work) -> int:
    """Plans with SMs for other communication, or waits that move in front of ops."""
    work.chain = chain_of(work.graph, work.members, set(work.fused.values()))
    plain = [one for one in work.collectives if one.node not in work.fused]
    rooms = make_room(work.graph, work.chain, work.ops, plain, work.setting)
    for node, room in rooms.items():
        one, decision = work.ops[node].collective, room.decision
        set_argument(node, "plan", str(decision.plan))
        work.ops[node] = replace(work.ops[node], decision=decision)
        work.tell(one, work.records[one.node].shapes, decision, room.note)
        work.waits[node] = room.waits
    return len(rooms)


def agree(work: Work) -> int:
    """Adds what tells other ranks of this graph's collectives, and its place to each fused op."""
    sites = {
        node: (site_of(work.parts[node], work.ops[op].problem, work.ops[op].decision.plan), op)
        for node, op in work.fused.items()
    }
    work.tellers, places = add_agreement(work.graph, work.identity, work.parts, sites)
    for node, place in places.items():
        work.records[node] = replace(work.records[node], place=place)
    return len(work.tellers)


def pin(work: Work) -> int:
    """Makes the order of all that communicates one that Inductor keeps."""
    if not work.fused and not work.tellers:
        return 0
    arrange(work.graph, work.chain, work.waits)
    chain = [*work.tellers, *work.chain]
    pinned = pin_order(work.graph, chain, {*work.fused.values(), *work.tellers}, work.waits)
    return sum(before is not now for before, now in zip(chain, pinned, strict=True))


PASSES = (
    GraphPass("tidy", "nodes removed", tidy),
    GraphPass("find", "collectives", find),
    GraphPass("fuse gathers", "fused", fuse_gathers),
    GraphPass("fuse scatters", "fused", fuse_scatters),
    GraphPass("leave others", "left", leave_others),
    GraphPass("sort and check", "fused ops", sort_and_check),
    GraphPass("make room", "ops changed", leave_room),
    GraphPass("agree", "groups", agree),
    GraphPass("pin order", "nodes pinned", pin),
)


def run_passes(graph: Graph, name: str, setting: Setting) -> tuple[list[CollectiveRecord], list[PassRun]]:
    """Rewrites the graph in place and leaves it in topological order.

    Args:
        name: of the graph, for the records.

    Returns:
        One record a collective, in the order of the graph as it was given, and what each pass did.
    """
    if not any(find_collectives(graph)):
        return [], []
    work = Work(graph, name, setting)
    logger.debug("graph %s before all passes:\n%s", name, graph)
    runs = [_run(one, work) for one in PASSES]
    return [work.records[one.node] for one in work.collectives], runs


def _run(one: GraphPass, work: Work) -> PassRun:
    shown = logger.isEnabledFor(logging.DEBUG)
    before = str(work.graph) if shown else ""
    start = time.perf_counter()
    count = one.run(work)
    ran = PassRun(work.name, one.name, one.counts, count, time.perf_counter() - start)
    logger.debug("%s", ran)
    if shown and str(work.graph) != before:
        logger.debug("graph %s after %s:\n%s", work.name, one.name, work.graph)
    return ran
