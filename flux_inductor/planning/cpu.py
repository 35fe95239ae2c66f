"""Ranks of one host that share memory: a thread moves chunks, torch multiplies them."""

from __future__ import annotations

from collections.abc import Sequence

from flux_inductor.planning.architecture import Architecture, cuts, powers
from flux_inductor.planning.machine import CPU
from flux_inductor.planning.plan import Plan
from flux_inductor.planning.problem import Problem
from flux_inductor.planning.table import MOST_ROWS


class Cpu(Architecture):
    device = "cpu"
    machine = CPU
    reserve = 0

    def limit(self, problem: Problem) -> str:
        return ""

    def chunks(self, problem: Problem) -> list[int]:
        granule = int(CPU.granule.value)
        if isinstance(problem.extent, int):
            return cuts(problem.extent, granule)
        return powers(granule, MOST_ROWS)

    def completed(self, problem: Problem, plans: Sequence[Plan]) -> tuple[Plan, ...]:
        return tuple(plans)

    def fused_us(self, problem: Problem, plan: Plan) -> float | None:
        return None
