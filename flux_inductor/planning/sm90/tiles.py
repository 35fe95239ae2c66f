"""Tiles of the CUDA kernels, how many a product has, and how long one takes. Which one a plan gets: fit.py.

Rounds: a persistent kernel gives each of the device's SMs one tile at a time, so a product takes
as many rounds as its tiles fill, and the last one may be almost empty. A tile that divides the product well
beats a more efficient one that does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from flux_inductor._core import clusters_of, sm90
from flux_inductor.planning.problem import Problem
from flux_inductor.planning.sm90.model import KERNEL
from flux_inductor.planning.tile import Tile

Menu: TypeAlias = tuple[Tile, ...]


def parsed(tiles: Sequence[str]) -> Menu:
    """A menu of the compiled core, which says why it has these tiles (csrc/core/sm90.h)."""
    return tuple(map(Tile.parse, tiles))


@dataclass(frozen=True)
class Grid:
    """The tiles of one part (the rows of one rank) of a product.

    Args:
        rows: of clusters in a part; its strips follow one another.
        columns: of clusters.
        sms: of the device.
    """

    tile: Tile
    rows: int
    columns: int
    sms: int

    @property
    def height(self) -> int:
        """Rows of the product in a cluster."""
        return self.tile.m * self.tile.cluster_m

    def at_once(self, reserve: int = 0) -> int:
        """Clusters that the device holds when it leaves `reserve` SMs to others."""
        return at_once(self.tile, self.sms - reserve)


def at_once(tile: Tile, sms: int) -> int:
    """Clusters that so many SMs hold; at least one."""
    return max(sms // (tile.cluster_m * tile.cluster_n), 1)


def grid(tile: Tile, problem: Problem, columns: int, sms: int) -> Grid:
    """The tiles of a product with `columns` columns. All sizes must be known."""
    return Grid(tile, *clusters_of(tile.shape, known(problem.strips), known(problem.rows), columns), sms)


def multiply_us(tile: Tile, depth: int) -> float:
    """The product of one tile on one SM, microseconds, with what two warpgroups that take turns lose."""
    loads = 1 + KERNEL.traffic.value * (1 / tile.m + 1 / tile.n)
    multiply = 2 * tile.m * tile.n * depth / (1e6 * KERNEL.rate.value) * loads
    return multiply + (KERNEL.handover.value if tile.pingpong else 0.0)


def keep_rate(tile: Tile, clusters: int) -> float:
    """At which a kernel of so many clusters stores a gathered tensor, GB/s: what is under way over how long
    it is."""
    blocks = clusters * tile.cluster_m * tile.cluster_n
    under_way = 2 * sm90.KEEPING_BUFFERS[str(tile)] * blocks
    return min(KERNEL.kept.value, under_way / (1e3 * KERNEL.keeping.value))


def known(size: object) -> int:
    """A size that the program has fixed."""
    assert isinstance(size, int), size
    return size
