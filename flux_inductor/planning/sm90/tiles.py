"""Tiles of the CUDA kernels, how many a product has, and how long one takes. Which one a plan gets: fit.py.

Rounds: a persistent kernel gives each of the device's SMs one tile at a time, so a product takes
as many rounds as its tiles fill, and the last one may be almost empty. A tile that divides the product well
beats a more efficient one that does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from flux_inductor._core import clusters_of
from flux_inductor.planning.problem import Problem
from flux_inductor.planning.sm90.model import KERNEL
from flux_inductor.planning.tile import Tile

Menu: TypeAlias = tuple[Tile, ...]

# Of all ops. Large tiles need the fewest bytes an operation, small ones fill the last wave; widths between
# powers of two suit the N of common layers. What is compiled: csrc/cuda/gemm/tile_menu.cuh.
COMMON: Menu = (
    Tile(256, 192, 64, 2, 1),
    Tile(128, 256, 64, 2, 1),
    Tile(256, 128, 64, 2, 1),
    Tile(128, 192, 64, 2, 1),
)

# Bytes of each of the two buffers through which an SM stores a gathered tensor that is kept: what
# the mainloop's stages leave of its shared memory (csrc/cuda/all_gather/keeping_epilogue.cuh).
_KEEPING_BUFFER = 8192
_SMALL_KEEPING_BUFFERS = {Tile(256, 160, 64, 2, 1): 896, Tile(128, 192, 64, 2, 1): 4992}


@dataclass(frozen=True)
class Grid:
    """The tiles of one part (the rows of one rank) of a product.

    Args:
        rows: of clusters in a part; its strips follow one another.
        columns: of clusters.
    """

    tile: Tile
    rows: int
    columns: int

    @property
    def height(self) -> int:
        """Rows of the product in a cluster."""
        return self.tile.m * self.tile.cluster_m


def at_once(tile: Tile, reserve: int = 0) -> int:
    """Clusters that the device holds when it leaves `reserve` SMs to others; at least one."""
    blocks = int(KERNEL.sms.value) - reserve
    return max(blocks // (tile.cluster_m * tile.cluster_n), 1)


def grid(tile: Tile, problem: Problem, columns: int) -> Grid:
    """The tiles of a product with `columns` columns. All sizes must be known."""
    return Grid(tile, *clusters_of(tile.shape, known(problem.strips), known(problem.rows), columns))


def multiply_us(tile: Tile, depth: int) -> float:
    """The product of one tile on one SM, microseconds, with what two warpgroups that take turns lose."""
    loads = 1 + KERNEL.traffic.value * (1 / tile.m + 1 / tile.n)
    multiply = 2 * tile.m * tile.n * depth / (1e6 * KERNEL.rate.value) * loads
    return multiply + (KERNEL.handover.value if tile.pingpong else 0.0)


def keep_rate(tile: Tile, reserve: int = 0) -> float:
    """At which the kernel of a tile stores a gathered tensor, GB/s: what is under way over how long it is."""
    blocks = at_once(tile, reserve) * tile.cluster_m * tile.cluster_n
    under_way = 2 * _SMALL_KEEPING_BUFFERS.get(tile, _KEEPING_BUFFER) * blocks
    return min(KERNEL.kept.value, under_way / (1e3 * KERNEL.keeping.value))


def known(size: object) -> int:
    """A size that the program has fixed."""
    assert isinstance(size, int), size
    return size
