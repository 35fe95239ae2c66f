"""Proof that the CUDA kernels' own order cannot deadlock (rule R1) and computes every result exactly once.

The orders of all ranks come from the compiled core, tile by tile, copy by copy: what the kernels and the copy
engine run. First they must be whole (gather_checker.py, scatter_checker.py): every tile is multiplied once,
every byte moved once, and a tile waits for all that it reads. Then they must come to their ends, by what
waits for what (kernel_queues.py) and a simulation (progress.py).

Two ranks that a wrong order stops (each is a test)
    Own tiles before what the peers wait for: each rank holds an own tile and has not begun the other's.
    Fixed shares in a reduce_scatter: a rank's second cluster is not resident, and its share of the tiles for
    the peer is what the peer's first cluster waits for; likewise on the other rank.
"""

from __future__ import annotations

from collections.abc import Sequence

from flux_inductor.planning.plan import Plan
from flux_inductor.planning.problem import Problem
from flux_inductor.planning.sm90.fit import KERNELS


def counter_example(
    problem: Problem, plan: Plan, at_once: Sequence[int], resident: Sequence[int] | None = None
) -> str | None:
    """What is wrong with the kernels' order, naming ranks and tiles; None when it is right.

    Args:
        plan: that `fitted` has completed.
        at_once: clusters with which each rank's kernel is launched.
        resident: of these, how many each rank's device holds; None means one each, which proves all others.
    """
    return KERNELS[problem.op].fault(problem, plan, at_once, resident)
