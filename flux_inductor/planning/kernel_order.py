"""The order of tiles, chunks and copies that the CUDA kernels run by a plan: that of the compiled core.

csrc/core says it once. Kernels and copy engine follow it, the timeline prices it (fit.py), and the checker
proves that it cannot deadlock (kernel_checker.py).
"""

from __future__ import annotations

from flux_inductor._core import GatherSchedule, ScatterSchedule
from flux_inductor.planning.plan import Plan
from flux_inductor.planning.problem import Problem
from flux_inductor.planning.tiles import Tile, known


def gather_order(problem: Problem, plan: Plan, rank: int, columns: int) -> GatherSchedule:
    """Of an all_gather_matmul with one weight of so many columns, by a plan that `fitted` has completed."""
    assert problem.kind == "all_gather_matmul", problem
    strips, rows, depth = known(problem.strips), known(problem.rows), known(problem.depth)
    return GatherSchedule(
        problem.world,
        rank,
        strips,
        rows,
        columns,
        depth,
        Tile.parse(plan.tile).shape,
        min(plan.sweep, strips * rows),  # what is larger than the whole counts as the whole
        min(plan.chunk, rows),
        min(plan.last, rows),
        min(max(plan.slices, 1), depth),
    )


def scatter_order(problem: Problem, plan: Plan, rank: int) -> ScatterSchedule:
    """Of a matmul_reduce_scatter by a plan that `fitted` has completed."""
    assert problem.kind == "matmul_reduce_scatter", problem
    tile, columns = Tile.parse(plan.tile), known(problem.columns[0])
    strips, rows = known(problem.strips), known(problem.rows)
    return ScatterSchedule(
        problem.world,
        rank,
        strips,
        rows,
        columns,
        tile.shape,
        min(plan.sweep, strips * rows),
        columns_of_chunk(tile, min(plan.width, columns)),
        plan.direction == "store",
    )


def columns_of_chunk(tile: Tile, width: int) -> int:
    """Of clusters, in a chunk of a matmul_reduce_scatter that is `width` columns wide; rounded up."""
    return -(-width // (tile.n * tile.cluster_n))
