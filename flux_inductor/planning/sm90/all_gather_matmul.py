"""The all_gather_matmul kernels of sm_90: order, chunks and time.

Orders are those of the compiled core (csrc/core): kernels and copy engine run them, the timeline prices them,
the checker proves that they cannot deadlock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from flux_inductor._core import GatherSchedule, sm90
from flux_inductor.planning.plan import Plan
from flux_inductor.planning.problem import Problem
from flux_inductor.planning.sm90.gather_checker import gather_fault
from flux_inductor.planning.sm90.kernel_queues import GatherRank
from flux_inductor.planning.sm90.op_kernels import OpKernels
from flux_inductor.planning.sm90.sweep import best_sweep
from flux_inductor.planning.sm90.tiles import Grid, Menu, keep_rate, known, parsed
from flux_inductor.planning.sm90.timeline import Gathered, Rounds, gather_us
from flux_inductor.planning.tile import Tile

MENU: Menu = parsed(sm90.GATHER_TILES)


@dataclass(frozen=True)
class GatherKernels(OpKernels):
    last_chunk: ClassVar = True

    def menu(self, problem: Problem) -> Menu:
        return MENU

    def best_chunks_first(self, problem: Problem, sizes: Sequence[int]) -> list[int]:
        return sorted(sizes, reverse=True)

    def complete(self, problem: Problem, plan: Plan, tiles: Grid) -> Plan:
        return replace(plan, tile=tiles.tile, sweep=plan.sweep or best_sweep(tiles, plan.chunk))

    def epilogue_us(self, problem: Problem, tile: Tile) -> float:
        return 0.0  # the time of a tile was fitted without one

    def time_us(self, problem: Problem, plan: Plan, launches: Sequence[Rounds]) -> tuple[float, int]:
        shards = _shards(problem, plan)
        keep = keep_rate(plan.kernel_tile, launches[0].at_once) if problem.return_gathered else 0.0
        copies = sum(chunk.slices for shard in shards for chunk in shard)
        return gather_us(launches, shards, keep=keep), copies

    def fault(
        self, problem: Problem, plan: Plan, at_once: Sequence[int], resident: Sequence[int] | None
    ) -> str | None:
        ranks = []
        for rank in range(problem.world):
            orders = [gather_order(problem, plan, rank, known(columns)) for columns in problem.columns]
            clusters = [cluster for order in orders for cluster in order.clusters()]
            ranks.append(GatherRank(clusters, orders[0].copies()))
        return gather_fault(problem, plan, ranks, at_once, resident)


def gather_order(problem: Problem, plan: Plan, rank: int, columns: int) -> GatherSchedule:
    """Of an all_gather_matmul with one weight of so many columns, by a plan that `fitted` has completed."""
    strips, rows, depth = known(problem.strips), known(problem.rows), known(problem.depth)
    return GatherSchedule(
        problem.world,
        rank,
        strips,
        rows,
        columns,
        depth,
        plan.kernel_tile.shape,
        min(plan.sweep, strips * rows),  # what is larger than the whole counts as the whole
        min(plan.chunk, rows),
        min(plan.last, rows),
        min(max(plan.slices, 1), depth),
    )


def _shards(problem: Problem, plan: Plan) -> list[list[Gathered]]:
    """The chunks of the peers' shards as rank 0 receives them; the last shard may be cut otherwise."""
    orders = [gather_order(problem, plan, 0, known(columns)) for columns in problem.columns]
    row_bytes = known(problem.shard_bytes) // known(problem.extent)

    def shard(source: int) -> list[Gathered]:
        launches = (order.chunks(source) for order in orders)
        return [
            Gathered((stop - start) * row_bytes, tuple(before for *_, before in chunk), slices)
            for chunk in zip(*launches, strict=True)
            for start, stop, slices, _ in chunk[:1]
        ]

    return [*[shard(1)] * (problem.world - 2), shard(problem.world - 1)]
