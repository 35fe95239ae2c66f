"""The matmul_reduce_scatter kernels of sm_90: order, chunks and time.

Orders are those of the compiled core, as in all_gather_matmul.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

from flux_inductor._core import ScatterSchedule, sm90
from flux_inductor.planning.plan import Plan
from flux_inductor.planning.problem import Problem
from flux_inductor.planning.sm90.kernel_queues import ScatterRank
from flux_inductor.planning.sm90.model import KERNEL
from flux_inductor.planning.sm90.op_kernels import OpKernels
from flux_inductor.planning.sm90.scatter_checker import scatter_fault
from flux_inductor.planning.sm90.sweep import sweep_loss, sweeps
from flux_inductor.planning.sm90.tiles import Grid, Menu, known, parsed
from flux_inductor.planning.sm90.timeline import Rounds, Turns, push_us, store_us
from flux_inductor.planning.tile import Tile

MENU: Menu = parsed(sm90.SCATTER_TILES)
FP32_MENU: Menu = parsed(sm90.SCATTER_FP32_TILES)
# Signals of a part that the kernel stores: so many a round, since own tiles follow a round and a chunk behind
# (more and fewer were measured no faster); and not more than this.
SIGNALS = 8
MOST_SIGNALS = 128
# Transfers of one op, about, where more and fewer cost the same.
TRANSFERS = 8


@dataclass(frozen=True)
class ScatterKernels(OpKernels):
    # Scatters whose link is the bound are stored by their kernel, which copies no chunks.
    last_chunk: ClassVar = False

    def menu(self, problem: Problem) -> Menu:
        return FP32_MENU if problem.result else MENU

    def best_chunks_first(self, problem: Problem, sizes: Sequence[int]) -> list[int]:
        moved = (problem.world - 1) * known(problem.extent)
        largest_first = sorted(sizes, reverse=True)
        return sorted(largest_first, key=lambda size: abs(moved / size - TRANSFERS))

    def complete(self, problem: Problem, plan: Plan, tiles: Grid) -> Plan:
        tile = tiles.tile
        cut_sweep, cut_columns = _cut(tiles, _chunks_wanted(problem, plan, tiles))
        sweep, width = plan.sweep or cut_sweep, plan.width or cut_columns * tile.n * tile.cluster_n
        chunk = min(sweep * tiles.height, known(problem.strips) * known(problem.rows))
        return replace(plan, chunk=chunk, tile=tile, sweep=sweep, width=width)

    def epilogue_us(self, problem: Problem, tile: Tile) -> float:
        """An estimate for results of other than two bytes. Pingpong tiles have the handover instead."""
        return 0.0 if tile.pingpong else KERNEL.epilogue.value * problem.result_itemsize / 2

    def time_us(self, problem: Problem, plan: Plan, launches: Sequence[Rounds]) -> tuple[float, int]:
        (rounds,), tile = launches, plan.kernel_tile
        order = scatter_order(problem, plan, 0)
        tile_bytes = problem.result_itemsize * tile.m * tile.n * tile.cluster_m * tile.cluster_n
        addition = KERNEL.addition.value + (problem.world - 2) * KERNEL.partial.value
        addition *= problem.result_itemsize / 2  # fitted to two bytes
        if plan.direction == "store":
            return store_us(rounds, Turns(*order.turns(rounds.at_once)), tile_bytes, addition), 0
        chunks = order.clusters_of_chunks()
        return push_us(rounds, chunks, tile_bytes, addition), (problem.world - 1) * len(chunks)

    def fault(
        self, problem: Problem, plan: Plan, at_once: Sequence[int], resident: Sequence[int] | None
    ) -> str | None:
        ranks = []
        for rank, clusters_at_once in zip(range(problem.world), at_once, strict=True):
            order = scatter_order(problem, plan, rank)
            ranks.append(ScatterRank(order.clusters(clusters_at_once), order.chunks()))
        return scatter_fault(problem, plan, ranks, resident)


def scatter_order(problem: Problem, plan: Plan, rank: int) -> ScatterSchedule:
    """Of a matmul_reduce_scatter by a plan that `fitted` has completed."""
    tile, columns = plan.kernel_tile, known(problem.columns[0])
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


def _chunks_wanted(problem: Problem, plan: Plan, tiles: Grid) -> int:
    """Of a part. Where nothing is paid for a chunk, there are several a round."""
    if plan.direction != "store":
        return -(-known(problem.extent) // plan.chunk)
    rounds = tiles.rows * tiles.columns / tiles.at_once(plan.reserve)
    return min(max(round(SIGNALS * rounds), 1), MOST_SIGNALS)


@lru_cache(maxsize=4096)
def _cut(tiles: Grid, chunks: int) -> tuple[int, int]:
    """(sweep, columns of clusters in a chunk) that cut a part into about `chunks` chunks.

    A chunk is a run of the kernel's own order: the rows of one sweep, cut along the columns. Cutting a sweep
    costs the kernel nothing; so the sweep is what its loads want, unless that cannot be cut finely enough.
    """

    def cost(sweep: int) -> tuple[float, int]:
        groups = -(-tiles.rows // sweep)
        pieces = min(max(round(chunks / groups), 1), tiles.columns)
        return abs(groups * pieces - chunks) / chunks + 10 * sweep_loss(tiles, sweep), sweep

    sweep = min(sweeps(tiles), key=cost)
    pieces = min(max(round(chunks / -(-tiles.rows // sweep)), 1), tiles.columns)
    return sweep, -(-tiles.columns // pieces)
