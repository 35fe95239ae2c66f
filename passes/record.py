"""What a pass says about one collective: fused with which plan, or left alone and why."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CollectiveRecord:
    """The fate of one collective of one graph.

    Args:
        graph: which graph, such as "forward 0", "backward 0" or "inference 1".
        node: the collective's name in the graph that the pass was given.
        op: "all_gather", "reduce_scatter", "all_reduce", or the name of another collective.
        group: name of the process group; "" if the graph holds it as a value that has no name.
        world: ranks of the group; 0 if unknown.
        shapes: of the whole pair, such as "[64,256] x [256,512] bf16"; of the collective's input if no
            matmul was found.
        fused: whether it became part of a fused op.
        plan: text of that op's plan, "" if unfused.
        fused_us: predicted time of the fused op, in microseconds; None if the strategy was not asked.
        unfused_us: likewise of collective and matmul one after the other.
        code: "" if fused, else one of the codes of reasons.py.
        reason: a sentence for people.
        place: of the fused op in what ranks agree on, "" if there is none.
    """

    graph: str
    node: str
    op: str
    group: str
    world: int
    shapes: str
    fused: bool
    plan: str
    fused_us: float | None
    unfused_us: float | None
    code: str
    reason: str
    place: str = ""
