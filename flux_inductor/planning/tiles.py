"""Which tile a CUDA kernel computes with, in which sweep, and how its chunks are cut along it.

A kernel family is data: the tiles it was compiled for. For one problem every tile of the menu is tried with
every sweep; what cannot be right or cannot win is pruned, the rest is compared by a small cost.

Waves: a persistent kernel gives each of the device's multiprocessors one tile at a time, so a product of T
tiles takes ceil(T / multiprocessors) rounds, and the last one may be almost empty. A tile that divides the
product well beats a more efficient one that does not.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil
from typing import TypeAlias

from flux_inductor.planning.machine import CUDA
from flux_inductor.planning.plan import Plan
from flux_inductor.planning.problem import Kind, Problem

_TILE = re.compile(r"(\d+)x(\d+)x(\d+)/(\d+)x(\d+)(/pingpong)?", re.ASCII)


@dataclass(frozen=True)
class Tile:
    """What one thread block computes, and the cluster of blocks that share loads.

    Args:
        m, n, k: rows, columns, and depth of one step of the mainloop.
        cluster_m, cluster_n: blocks of a cluster.
        pingpong: two warpgroups take turns at whole tiles, so that one stores while the other multiplies;
            otherwise they share one tile ("cooperative").
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

    @staticmethod
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
        Tile(256, 160, 64, 2, 1),
        Tile(128, 224, 64, 2, 1),
        Tile(128, 160, 64, 2, 1),
        Tile(128, 128, 64, 2, 1, pingpong=True),
        Tile(64, 256, 64, 2, 1, pingpong=True),
    ),
    # Not here: 128 x 224, which lost 10 % to 128 x 256 where its waves promised a gain; and pingpong tiles,
    # seen to hang when a block gets tiles of both kinds, until a stress test shows that they no longer do.
    "matmul_reduce_scatter": _COMMON,
}

# The multiprocessors of an H100 or H200.
MULTIPROCESSORS = 132
# The kernels read operands by TMA: rows must be multiples of 16 bytes.
GRANULE = 8
# Ranks whose memory one kernel can address.
MOST_RANKS = 8
# Sweeps worth trying: beyond, the cache holds no more.
SWEEPS = (1, 2, 3, 4, 6, 8, 12, 16)

# Terms of the cost, fitted to the kernels alone on a H200 (benchmarks/kernels.py), within 8 % of their times.
_RATE = 6.9e6  # of one multiprocessor, floating point operations a microsecond
_TRAFFIC = 12.9  # loss by loading operands, per (1/m + 1/n) of a tile
_SCATTER_US = (
    2.2  # of a cooperative tile of 128 x 256 of a reduce_scatter: stores and counters that nothing hides
)
_PINGPONG_US = 1.0  # of any pingpong tile: two warpgroups hand over
# So many chunks of a part, about, are worth their fixed costs where the link is the bound.
MOST_CUTS = 4


@dataclass(frozen=True)
class Grid:
    """The tiles of one part (the rows of one rank) of a product.

    Args:
        rows: of clusters in a part; its strips follow one another.
        columns: of clusters.
    """

    tile: Tile
    parts: int
    rows: int
    columns: int

    @property
    def at_once(self) -> int:
        """Clusters that the device holds."""
        return MULTIPROCESSORS // (self.tile.cluster_m * self.tile.cluster_n)

    @property
    def waves(self) -> int:
        return self.waves_of(self.parts)

    def waves_of(self, parts: float) -> int:
        return ceil(parts * self.rows * self.columns / self.at_once)


def grid(tile: Tile, problem: Problem, columns: int) -> Grid:
    """The tiles of a product with `columns` columns. All sizes must be known."""
    strips, rows = problem.strips, problem.rows
    assert isinstance(strips, int)
    assert isinstance(rows, int)
    m_tiles = strips * -(-rows // tile.m)
    n_tiles = -(-columns // tile.n)
    return Grid(tile, problem.world, -(-m_tiles // tile.cluster_m), -(-n_tiles // tile.cluster_n))


def tile_us(tile: Tile, kind: Kind, depth: int) -> float:
    """One tile on one multiprocessor, microseconds."""
    multiply = 2 * tile.m * tile.n * depth / _RATE * (1 + _TRAFFIC * (1 / tile.m + 1 / tile.n))
    if tile.pingpong:
        return multiply + _PINGPONG_US
    epilogue = _SCATTER_US if kind == "matmul_reduce_scatter" else 0.0
    return multiply + epilogue * tile.m * tile.n / (128 * 256)


def kernel_us(tile: Tile, problem: Problem) -> float:
    """The products of all weights, with the transfers that they cannot hide, microseconds.

    A product of few waves overlaps little, however fast it is: in one wave all tiles are at work at once, and
    those of the peers' rows idle until the rows have come, or send their results when nothing is left to do.
    """
    one = tile_us(tile, problem.kind, _known(problem.depth))
    grids = [grid(tile, problem, _known(columns)) for columns in problem.columns]
    transfer = CUDA.transfer.value + _known(problem.shard_bytes) / (1e3 * CUDA.push.value)
    whole = sum(each.waves for each in grids) * one
    if problem.kind == "all_gather_matmul":
        return max(whole, (problem.world - 1) * transfer + grids[-1].waves_of(1 / MOST_CUTS) * one)
    peers = grids[0].waves_of(problem.world - 1) * one
    link = (problem.world - 1) * transfer
    return max(whole, peers + transfer / MOST_CUTS, peers / MOST_CUTS + link + one)


def sweep_loss(tiles: Grid, sweep: int) -> float:
    """How many more operands than at best are read, as a share.

    `sweep` rows of clusters are swept together along the columns: the clusters at work share `sweep` blocks
    of rows and at_once / sweep of columns. The square of the two is best.
    """
    tile = tiles.tile
    sweep = min(sweep, tiles.rows)
    across = min(tiles.at_once / sweep, tiles.columns)
    read = sweep * tile.m * tile.cluster_m + across * tile.n * tile.cluster_n
    area = sweep * tile.m * tile.cluster_m * across * tile.n * tile.cluster_n
    return float(read / (2 * area**0.5) - 1)


def sweeps(tiles: Grid) -> list[int]:
    """The sweeps that cut a part's rows into groups of about one size."""
    return sorted({-(-tiles.rows // -(-tiles.rows // most)) for most in SWEEPS})


def best_sweep(tiles: Grid, chunk: int) -> int:
    """The sweep that reads the fewest operands, of those that wait for one chunk of rows at a time."""
    rows = tiles.tile.m * tiles.tile.cluster_m
    patient = [sweep for sweep in sweeps(tiles) if sweep * rows <= chunk] or [1]
    return min(patient, key=lambda sweep: (sweep_loss(tiles, sweep), sweep))


@lru_cache(maxsize=4096)
def best_tile(problem: Problem, menu: Menu) -> Tile:
    """The tile of the menu with which the op is fastest; of equals the first.

    Raises:
        ValueError: the menu is empty.
    """
    if not menu:
        raise ValueError(f"no {problem.kind} kernel was compiled for {problem.dtype}")
    # A tile twice as wide as the product multiplies nothing with half of its columns; another covers it.
    narrow = [tile for tile in menu if tile.n < 2 * max(map(_known, problem.columns))]
    return min(narrow or menu, key=lambda tile: kernel_us(tile, problem))


@lru_cache(maxsize=4096)
def fitted(problem: Problem, plan: Plan, menu: Menu) -> Plan:
    """The plan with everything that the kernel needs: tile, sweep and, for a reduce_scatter, width.

    What the plan says already stays. All sizes must be known, and the answer is the same on all ranks.

    Raises:
        ValueError: the plan's tile is not on the menu.
    """
    tile = Tile.parse(plan.tile) if plan.tile else best_tile(problem, menu)
    if tile not in menu:
        known = ", ".join(map(str, menu))
        raise ValueError(
            f"plan '{plan}': there is no kernel with tile {tile} for {problem.dtype}; valid: {known}"
        )
    tiles = grid(tile, problem, max(map(_known, problem.columns)))
    if problem.kind == "all_gather_matmul":
        return replace(plan, tile=str(tile), sweep=plan.sweep or best_sweep(tiles, plan.chunk))
    sweep, width = plan.sweep, plan.width
    if not sweep or not width:
        chunks = -(-_known(problem.extent) // plan.chunk)
        cut_sweep, cut_columns = _cut(tiles, chunks)
        sweep, width = sweep or cut_sweep, width or cut_columns * tile.n * tile.cluster_n
    rows = min(sweep * tile.m * tile.cluster_m, _known(problem.strips) * _known(problem.rows))
    return replace(plan, chunk=rows, tile=str(tile), sweep=sweep, width=width)


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


def _known(size: object) -> int:
    assert isinstance(size, int), size
    return size
