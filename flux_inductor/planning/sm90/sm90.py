"""Hopper GPUs as the strategy sees them."""

from __future__ import annotations

from collections.abc import Sequence

from flux_inductor.planning.architecture import Architecture, cuts, powers
from flux_inductor.planning.machine import CUDA
from flux_inductor.planning.plan import Plan
from flux_inductor.planning.problem import Problem
from flux_inductor.planning.sm90.fit import KERNELS, fitted, menu_of, op_us
from flux_inductor.planning.sm90.limits import UNPROVEN, kernel_limit
from flux_inductor.planning.sm90.model import KERNEL
from flux_inductor.planning.sm90.uneven import uneven
from flux_inductor.planning.table import MOST_ROWS

# Rows of the largest chunk of a plan for unknown M, but for a whole shard. Each size takes a while to price,
# and chunks of more rows than this are as good as whole shards.
LARGE_CHUNK = 8192


class Sm90(Architecture):
    device = "cuda"
    machine = CUDA
    reserve = int(KERNEL.reserve.value)

    def limit(self, problem: Problem) -> str:
        return kernel_limit(problem) or (UNPROVEN if problem.result else "")

    def chunks(self, problem: Problem) -> list[int]:
        granule = int(CUDA.granule.value)
        if isinstance(problem.extent, int):
            return KERNELS[problem.op].best_chunks_first(problem, cuts(problem.extent, granule))
        largest, *others = powers(granule, MOST_ROWS)
        return [largest, *(size for size in others if size <= LARGE_CHUNK)]

    def completed(self, problem: Problem, plans: Sequence[Plan]) -> tuple[Plan, ...]:
        """With tiles and sweeps, where the sizes are known; and with chunks that are uneven."""
        if problem.symbols:
            return tuple(plans)
        menu = menu_of(problem)
        # Different cuts may come out alike, since chunks follow the tiles.
        even = list(dict.fromkeys(fitted(problem, plan, menu, self.sms) for plan in plans))
        best = min(even, key=lambda plan: op_us(problem, plan, self.sms))
        return (*even, *uneven(problem, best, menu, self.sms))

    def fused_us(self, problem: Problem, plan: Plan) -> float | None:
        """By the timeline of the kernel that the plan will get, where sizes are known."""
        if problem.symbols:
            return None
        return op_us(problem, fitted(problem, plan, menu_of(problem), self.sms), self.sms)
