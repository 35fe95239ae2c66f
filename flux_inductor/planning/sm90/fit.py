"""What a CUDA kernel needs of a plan beyond its chunks: tile, sweep, width; all chosen by the timeline.

The sweep follows from the cache, chunks of a reduce_scatter from the sweep, and of all tiles the one is taken
whose kernel is predicted to end first, waits and transfers included.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from flux_inductor.planning.machine import CUDA
from flux_inductor.planning.ops import ALL_GATHER_MATMUL, MATMUL_REDUCE_SCATTER
from flux_inductor.planning.ops.op import Op
from flux_inductor.planning.plan import Plan
from flux_inductor.planning.problem import Problem
from flux_inductor.planning.sm90.all_gather_matmul import GatherKernels
from flux_inductor.planning.sm90.matmul_reduce_scatter import ScatterKernels
from flux_inductor.planning.sm90.model import KERNEL
from flux_inductor.planning.sm90.op_kernels import OpKernels
from flux_inductor.planning.sm90.sweep import sweep_loss
from flux_inductor.planning.sm90.tiles import Grid, Menu, grid, known, multiply_us
from flux_inductor.planning.sm90.timeline import Rounds
from flux_inductor.planning.tile import Tile

KERNELS: Mapping[Op, OpKernels] = {
    ALL_GATHER_MATMUL: GatherKernels(),
    MATMUL_REDUCE_SCATTER: ScatterKernels(),
}


def menu_of(problem: Problem) -> Menu:
    """The tiles for a problem, compiled or not."""
    return KERNELS[problem.op].menu(problem)


@lru_cache(maxsize=4096)
def fitted(problem: Problem, plan: Plan, menu: Menu, sms: int) -> Plan:
    """The plan with everything that the kernel needs: tile, sweep and, for a reduce_scatter, width.

    What the plan says already stays. All sizes must be known, and the answer is the same on all ranks whose
    devices have as many SMs.

    Raises:
        ValueError: the plan's tile is not on the menu, or the menu is empty.
    """
    if not menu:
        raise ValueError(f"no {problem.op.name} kernel was compiled for {problem.dtype}")
    if plan.tile:
        if plan.tile not in menu:
            valid = ", ".join(map(str, menu))
            raise ValueError(
                f"plan '{plan}': there is no kernel with tile {plan.tile} for {problem.dtype}; valid: {valid}"
            )
        return _with_tile(problem, plan, plan.tile, sms)
    # A tile twice as wide as the product multiplies nothing with half of its columns; another covers it.
    narrow = [tile for tile in menu if tile.n < 2 * max(map(known, problem.columns))]
    plans = [_with_tile(problem, plan, tile, sms) for tile in narrow or menu]
    return min(plans, key=lambda each: op_us(problem, each, sms))


@lru_cache(maxsize=16384)
def op_us(problem: Problem, plan: Plan, sms: int) -> float:
    """The fused op by a plan that `fitted` has completed, microseconds."""
    grids = [grid(plan.kernel_tile, problem, known(columns), sms) for columns in problem.columns]
    launches = [_rounds(problem, each, plan.reserve, sweep_loss(each, plan.sweep)) for each in grids]
    device_us, copies = KERNELS[problem.op].time_us(problem, plan, launches)
    return max(device_us, _least_us(problem, copies))


def _rounds(problem: Problem, tiles: Grid, reserve: int, loss: float = 0.0) -> Rounds:
    """One launch; `loss` is that of its sweep."""
    one = multiply_us(tiles.tile, known(problem.depth))
    one += KERNELS[problem.op].epilogue_us(problem, tiles.tile)
    one *= 1 + KERNEL.sweep.value * loss
    return Rounds(problem.world, tiles.rows * tiles.columns, tiles.at_once(reserve), one)


def product_us(problem: Problem, reserve: int, menu: Menu, sms: int) -> float:
    """The kernel's time with the best of the tiles if it waited for nothing, microseconds."""

    def time(tile: Tile) -> float:
        grids = (grid(tile, problem, known(columns), sms) for columns in problem.columns)
        rounds = (_rounds(problem, tiles, reserve) for tiles in grids)
        return sum(KERNEL.launch.value + each.time(each.all_tiles) for each in rounds)

    return min(map(time, menu))


def _least_us(problem: Problem, copies: int) -> float:
    """The host's time, or that of reading the weights, which nothing hides when the product is small."""
    weight_bytes = sum(map(known, problem.columns)) * known(problem.depth) * problem.itemsize
    host = KERNEL.host.value + copies * KERNEL.copy.value
    return max(host, KERNEL.launch.value + weight_bytes / (1e3 * CUDA.memory.value))


def _with_tile(problem: Problem, plan: Plan, tile: Tile, sms: int) -> Plan:
    tiles = grid(tile, problem, max(map(known, problem.columns)), sms)
    return KERNELS[problem.op].complete(problem, plan, tiles)
