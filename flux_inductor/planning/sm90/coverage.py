"""Whether tiles and blocks make up a whole, each part once."""

from __future__ import annotations

from collections.abc import Sequence

from flux_inductor.planning.checker import difference
from flux_inductor.planning.plan import Plan
from flux_inductor.planning.problem import Problem
from flux_inductor.planning.sm90.tiles import known


def tiles_fault(problem: Problem, plan: Plan, tiles: list[tuple[int, int, int, int]]) -> str | None:
    """The first tile that is missing, not there, or multiplied twice; several weights have their own each."""
    tile, strips = plan.kernel_tile, known(problem.strips)
    down = -(-known(problem.rows) // tile.m)
    done = 0
    for columns in map(known, problem.columns):
        across = -(-columns // tile.n)
        count = problem.world * strips * down * across
        every = {
            (part, strip, m, n)
            for part in range(problem.world)
            for strip in range(strips)
            for m in range(down)
            for n in range(across)
        }
        fault = difference(every, tiles[done : done + count])
        if fault is not None:
            return f"tiles (part, strip, m, n): {fault}"
        done += count
    return None if done == len(tiles) else f"{len(tiles) - done} tiles too many"


def covers(blocks: Sequence[tuple[int, int, int, int]], rows: int, columns: int) -> bool:
    """Whether blocks (first and last row, first and last column) make up the whole, without overlap."""
    inside = all(0 <= a < b <= rows and 0 <= c < d <= columns for a, b, c, d in blocks)
    area = sum((b - a) * (d - c) for a, b, c, d in blocks)
    apart = not any(overlap(x, y) for i, x in enumerate(blocks) for y in blocks[:i])
    return inside and apart and area == rows * columns


def overlap(x: Sequence[int], y: Sequence[int]) -> bool:
    return max(x[0], y[0]) < min(x[1], y[1]) and max(x[2], y[2]) < min(x[3], y[3])
