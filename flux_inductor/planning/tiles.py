"""The tiles that CUDA kernels were compiled for, how many a product has, and how long one takes.

A kernel family is data: a menu of tiles. Which one a plan gets: fit.py.

Rounds: a persistent kernel gives each of the device's multiprocessors one tile at a time, so a product takes
as many rounds as its tiles fill, and the last one may be almost empty. A tile that divides the product well
beats a more efficient one that does not.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

from flux_inductor._core import clusters_of
from flux_inductor.planning.machine import KERNEL
from flux_inductor.planning.problem import Kind, Problem

_TILE = re.compile(r"(\d+)x(\d+)x(\d+)/(\d+)x(\d+)(/pingpong)?", re.ASCII)


@dataclass(frozen=True)
class Tile:
    """What one thread block computes, and the cluster of blocks that share loads.

    Args:
        m, n, k: rows, columns, and depth of one step of the mainloop.
        cluster_m, cluster_n: blocks of a cluster.
        pingpong: two warpgroups take turns at whole tiles, so that one stores while the other multiplies;
            otherwise they share one tile ("cooperative"), and one warpgroup has a tile of 64 rows.
    """

    m: int
    n: int
    k: int
    cluster_m: int
    cluster_n: int
    pingpong: bool = False

    def __str__(self) -> str:
        schedule = "/pingpong" if self.pingpong else ""
        return f"{self.m}x{self.n}x{self.k}/{self.cluster_m}x{self.cluster_n}{schedule}"

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """What decides where tiles lie: m, n, cluster_m, cluster_n."""
        return self.m, self.n, self.cluster_m, self.cluster_n

    @staticmethod
    @lru_cache(maxsize=256)
    def parse(text: str) -> Tile:
        """Reads the text form.

        Raises:
            ValueError: it is malformed.
        """
        match = _TILE.fullmatch(text)
        if match is None:
            raise ValueError(f"tile {text!r} is malformed; write for example 256x192x64/2x1")
        m, n, k, cluster_m, cluster_n = map(int, match.groups()[:5])
        return Tile(m, n, k, cluster_m, cluster_n, pingpong=match[6] is not None)


Menu: TypeAlias = tuple[Tile, ...]

# The tiles that plans may name, of those in csrc/cuda/tile_menu.cuh, for sm_90a. Large tiles need the fewest
# bytes an operation, small ones fill the last wave; widths between powers of two suit the N of common layers.
_COMMON: Menu = (
    Tile(256, 192, 64, 2, 1),
    Tile(128, 256, 64, 2, 1),
    Tile(256, 128, 64, 2, 1),
    Tile(128, 192, 64, 2, 1),
)
MENUS: dict[Kind, Menu] = {
    "all_gather_matmul": (
        *_COMMON,
        Tile(128, 128, 64, 2, 1, pingpong=True),
        Tile(64, 256, 64, 2, 1, pingpong=True),
        Tile(256, 160, 64, 2, 1),
        Tile(128, 224, 64, 2, 1),
        Tile(128, 160, 64, 2, 1),
    ),
    # Not here: 128 x 224, which lost 10 % to 128 x 256 where its waves promised a gain; and pingpong tiles,
    # since tiles end soon (csrc/cuda/scatter_kernel.cuh).
    "matmul_reduce_scatter": (*_COMMON, Tile(128, 128, 64, 2, 1), Tile(64, 256, 64, 2, 1)),
}
# Of matmul_reduce_scatter with fp32 results: a tile takes twice the room of the mainloop's stages.
FP32_MENU: Menu = (Tile(128, 192, 64, 2, 1), Tile(128, 128, 64, 2, 1))


def menu_of(problem: Problem) -> Menu:
    """The tiles for a problem, compiled or not."""
    return FP32_MENU if problem.result else MENUS[problem.kind]


# Bytes of each of the two buffers through which a multiprocessor stores a gathered tensor that is kept: what
# the mainloop's stages leave of its shared memory (csrc/cuda/keeping_epilogue.cuh).
_KEEPING_BUFFER = 8192
_SMALL_KEEPING_BUFFERS = {Tile(256, 160, 64, 2, 1): 896, Tile(128, 192, 64, 2, 1): 4992}

# The kernels read operands by TMA: rows must be multiples of 16 bytes.
GRANULE = 8
# Ranks whose memory one kernel can address.
MOST_RANKS = 8


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
    """Clusters that the device holds when it leaves `reserve` multiprocessors to others; at least one."""
    blocks = int(KERNEL.multiprocessors.value) - reserve
    return max(blocks // (tile.cluster_m * tile.cluster_n), 1)


# Of a plan: who wants more for other communication is better off unfused. The engine holds plans to the same
# share of the device that it finds.
MOST_RESERVE = int(KERNEL.multiprocessors.value) // 2


def grid(tile: Tile, problem: Problem, columns: int) -> Grid:
    """The tiles of a product with `columns` columns. All sizes must be known."""
    return Grid(tile, *clusters_of(tile.shape, known(problem.strips), known(problem.rows), columns))


def tile_us(tile: Tile, kind: Kind, depth: int, result_bytes: int = 2) -> float:
    """One tile on one multiprocessor, microseconds; an estimate for results of other than two bytes."""
    loads = 1 + KERNEL.traffic.value * (1 / tile.m + 1 / tile.n)
    multiply = 2 * tile.m * tile.n * depth / (1e6 * KERNEL.rate.value) * loads
    if tile.pingpong:
        return multiply + KERNEL.handover.value
    return multiply + (KERNEL.epilogue.value * result_bytes / 2 if kind == "matmul_reduce_scatter" else 0.0)


def keep_rate(tile: Tile, reserve: int = 0) -> float:
    """At which the kernel of a tile stores a gathered tensor, GB/s: what is under way over how long it is."""
    blocks = at_once(tile, reserve) * tile.cluster_m * tile.cluster_n
    under_way = 2 * _SMALL_KEEPING_BUFFERS.get(tile, _KEEPING_BUFFER) * blocks
    return min(KERNEL.kept.value, under_way / (1e3 * KERNEL.keeping.value))


def kernel_limit(problem: Problem) -> str:
    """Why the CUDA kernels cannot run this problem, as a sentence with the sizes; "" if they can.

    Sizes that are unknown until the program runs are taken for suitable; the engine checks them again.
    """
    if problem.dtype == "fp32":
        return "the CUDA kernels multiply bf16 and fp16; fp32 stays unfused"
    if problem.split == "columns":
        return "the CUDA kernels scatter rows; a scatter along the last dim stays unfused"
    if problem.world > MOST_RANKS:
        return f"the CUDA kernels serve at most {MOST_RANKS} ranks; the group has {problem.world}"
    sizes = [("K", problem.depth), *(("N", columns) for columns in problem.columns)]
    for name, size in sizes:
        if isinstance(size, int) and (size % GRANULE or size == 0):
            return f"the CUDA kernels need N and K to be multiples of {GRANULE}; {name} is {size}"
    return ""


def known(size: object) -> int:
    """A size that the program has fixed."""
    assert isinstance(size, int), size
    return size
