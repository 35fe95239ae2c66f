"""A plan for every M: ranges of sizes, each with a plan that is fastest there or nearly so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

import sympy

from flux_inductor.planning.plan import Plan, PlanTable
from flux_inductor.planning.problem import Problem

# A table distinguishes products of up to this many rows; its last entry holds for all larger ones.
MOST_ROWS = 1 << 20
# A plan stays in force until another one is faster by more than this share: short tables, same speed.
TOLERANCE = 0.03


class SizesOfM:
    """The concrete problems that a symbolic M stands for, numbered from 1 to `count`; M = unit * number.

    M varies through `rows` when that is symbolic, else through `strips`; every other size must be known.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._varies = "rows" if isinstance(problem.rows, sympy.Expr) else "strips"
        self.unit = cast(int, self.problem(1).m)
        self.count = max(MOST_ROWS // self.unit, 1)

    def problem(self, number: int) -> Problem:
        if self._varies == "rows":
            return replace(self._problem, rows=number)
        return replace(self._problem, strips=number)


def table_by_m(sizes: SizesOfM, plans: Sequence[Plan], time: Callable[[Problem, Plan], float]) -> PlanTable:
    """The plans by ranges of M.

    Tries powers of two, and the sizes one above them, where new rows of tiles begin, until the plan in force
    no longer holds; then bisects for the size where that begins. A plan that loses and wins again in between
    goes unseen, such as one row into a third row of tiles: that costs up to a fifth there.
    """

    def least(number: int) -> tuple[float, Plan]:
        problem = sizes.problem(number)
        return min(((time(problem, plan), plan) for plan in plans), key=lambda timed: timed[0])

    def holds(plan: Plan, number: int) -> bool:
        return time(sizes.problem(number), plan) <= least(number)[0] * (1 + TOLERANCE)

    entries: list[tuple[int | None, Plan]] = []
    number, plan = 1, least(1)[1]
    while number < sizes.count:
        above_power = number > 1 and number & (number - 1) == 0
        probe = min(number + 1 if above_power else 1 << number.bit_length(), sizes.count)
        if holds(plan, probe):
            number = probe
            continue
        good, bad = number, probe
        while bad - good > 1:
            middle = (good + bad) // 2
            good, bad = (middle, bad) if holds(plan, middle) else (good, middle)
        entries.append((good * sizes.unit, plan))
        number, plan = bad, least(bad)[1]
    return PlanTable((*entries, (None, plan)))
