"""The work on one graph: what the passes of pass_list.py know of it, and hand on to each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch.fx import Graph, Node

from flux_inductor.passes.agreement import Part
from flux_inductor.passes.collectives import WAIT, Collective
from flux_inductor.passes.decide import Setting
from flux_inductor.passes.in_flight import FusedOp
from flux_inductor.passes.reasons import Reason
from flux_inductor.passes.record import CollectiveRecord
from flux_inductor.planning.strategy import Decision


@dataclass
class Work:
    """One graph on its way through the passes.

    Args:
        graph: as the passes so far have left it.
        name: of the graph, for the records.
        setting: what all pairs are decided by.
        identity: of the graph as it was recognised: two graphs whose collectives look alike may meet
            different ones elsewhere.
        collectives: as they were before the first was rewritten, in the order of the graph.
        parts: of these, what ranks compare (agreement.py).
        records: by the node of the collective, which may be gone.
        fused: the ops that were made, by the node of the collective that each replaces.
        ops: how each of them was decided.
        chain: all that communicates, in its order.
        waits: nodes that must come before ops.
        tellers: ops that tell other ranks what the graph is about to run.
    """

    graph: Graph
    name: str
    setting: Setting
    identity: str = ""
    collectives: Sequence[Collective] = ()
    parts: dict[Node, Part] = field(default_factory=dict)
    records: dict[Node, CollectiveRecord] = field(default_factory=dict)
    fused: dict[Node, Node] = field(default_factory=dict)
    ops: dict[Node, FusedOp] = field(default_factory=dict)
    chain: list[Node] = field(default_factory=list)
    waits: dict[Node, tuple[Node, ...]] = field(default_factory=dict)
    tellers: list[Node] = field(default_factory=list)

    @property
    def members(self) -> list[Node]:
        """All that communicates, in the order of the unfused program, as it is now."""
        nodes = (one.node for one in self.collectives if one.node.target is not WAIT)
        return [self.fused.get(node, node) for node in nodes]

    def leave(self, one: Collective, why: Reason, shapes: str, decision: Decision | None = None) -> None:
        """Says why a collective stays."""
        self._record(one, shapes, decision, code=why.code, reason=why.text)

    def tell(self, one: Collective, shapes: str, decision: Decision, note: str = "") -> None:
        """Says that a collective was fused."""
        reason = f"{decision.reason}; {note}" if note else decision.reason
        self._record(one, shapes, decision, plan=str(decision.plan), reason=reason)

    def _record(
        self,
        one: Collective,
        shapes: str,
        decision: Decision | None,
        *,
        reason: str,
        plan: str = "",
        code: str = "",
    ) -> None:
        self.records[one.node] = CollectiveRecord(
            graph=self.name,
            node=one.node.name,
            op=one.op,
            group=one.group if isinstance(one.group, str) else "",
            world=one.world,
            shapes=shapes,
            fused=not code,
            plan=plan,
            fused_us=decision.fused_us if decision is not None else None,
            unfused_us=decision.unfused_us if decision is not None else None,
            code=code,
            reason=reason,
        )
