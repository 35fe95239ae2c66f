"""What a CUDA kernel needs of a plan beyond its chunks: tile, sweep, width; all chosen by the timeline.

The sweep follows from the cache, chunks of a reduce_scatter from the sweep, and of all tiles the one is taken
whose kernel is predicted to end first, waits and transfers included.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from flux_inductor.planning.kernel_order import gather_order, scatter_order
from flux_inductor.planning.machine import CUDA, KERNEL
from flux_inductor.planning.plan import Plan
from flux_inductor.planning.problem import Problem
from flux_inductor.planning.tiles import Grid, Menu, Tile, at_once, grid, keep_rate, known, tile_us
from flux_inductor.planning.timeline import Gathered, Rounds, Turns, gather_us, push_us, store_us

# Sweeps worth trying: beyond, the cache holds no more.
SWEEPS = (1, 2, 3, 4, 6, 8, 12, 16)
# Signals of a part that the kernel stores: so many a round, since own tiles follow a round and a chunk behind
# (more and fewer were measured no faster); and not more than this.
SIGNALS = 8
MOST_SIGNALS = 128


@lru_cache(maxsize=4096)
def fitted(problem: Problem, plan: Plan, menu: Menu) -> Plan:
    """The plan with everything that the kernel needs: tile, sweep and, for a reduce_scatter, width.

    What the plan says already stays. All sizes must be known, and the answer is the same on all ranks.

    Raises:
        ValueError: the plan's tile is not on the menu, or the menu is empty.
    """
    if not menu:
        raise ValueError(f"no {problem.kind} kernel was compiled for {problem.dtype}")
    if plan.tile:
        tile = Tile.parse(plan.tile)
        if tile not in menu:
            valid = ", ".join(map(str, menu))
            raise ValueError(
                f"plan '{plan}': there is no kernel with tile {tile} for {problem.dtype}; valid: {valid}"
            )
        return _with_tile(problem, plan, tile)
    # A tile twice as wide as the product multiplies nothing with half of its columns; another covers it.
    narrow = [tile for tile in menu if tile.n < 2 * max(map(known, problem.columns))]
    plans = [_with_tile(problem, plan, tile) for tile in narrow or menu]
    return min(plans, key=lambda each: op_us(problem, each))


@lru_cache(maxsize=16384)
def op_us(problem: Problem, plan: Plan) -> float:
    """The fused op by a plan that `fitted` has completed, microseconds."""
    tile = Tile.parse(plan.tile)
    grids = [grid(tile, problem, known(columns)) for columns in problem.columns]
    rounds = [_rounds(problem, each, plan.reserve, sweep_loss(each, plan.sweep)) for each in grids]
    if problem.kind == "all_gather_matmul":
        shards = _shards(problem, plan)
        copies = sum(chunk.slices for shard in shards for chunk in shard)
        keep = keep_rate(tile, plan.reserve) if problem.return_gathered else 0.0
        return max(gather_us(rounds, shards, keep=keep), _least_us(problem, copies))
    order = scatter_order(problem, plan, 0)
    tile_bytes = problem.result_itemsize * tile.m * tile.n * tile.cluster_m * tile.cluster_n
    addition = KERNEL.addition.value + (problem.world - 2) * KERNEL.partial.value
    addition *= problem.result_itemsize / 2  # fitted to two bytes
    if plan.direction == "store":
        turns = Turns(*order.turns(rounds[0].at_once))
        return max(store_us(rounds[0], turns, tile_bytes, addition), _least_us(problem, 0))
    chunks = order.clusters_of_chunks()
    time = push_us(rounds[0], chunks, tile_bytes, addition)
    return max(time, _least_us(problem, (problem.world - 1) * len(chunks)))


def _rounds(problem: Problem, tiles: Grid, reserve: int, loss: float = 0.0) -> Rounds:
    """One launch; `loss` is that of its sweep."""
    one = tile_us(tiles.tile, problem.kind, known(problem.depth), problem.result_itemsize)
    one *= 1 + KERNEL.sweep.value * loss
    return Rounds(problem.world, tiles.rows * tiles.columns, at_once(tiles.tile, reserve), one)


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


def product_us(problem: Problem, reserve: int, menu: Menu) -> float:
    """The kernel's time with the best of the tiles if it waited for nothing, microseconds."""

    def time(tile: Tile) -> float:
        grids = (grid(tile, problem, known(columns)) for columns in problem.columns)
        rounds = (_rounds(problem, tiles, reserve) for tiles in grids)
        return sum(KERNEL.launch.value + each.time(each.all_tiles) for each in rounds)

    return min(map(time, menu))


def _least_us(problem: Problem, copies: int) -> float:
    """The host's time, or that of reading the weights, which nothing hides when the product is small."""
    weight_bytes = sum(map(known, problem.columns)) * known(problem.depth) * problem.itemsize
    host = KERNEL.host.value + copies * KERNEL.copy.value
    return max(host, KERNEL.launch.value + weight_bytes / (1e3 * CUDA.memory.value))


def _with_tile(problem: Problem, plan: Plan, tile: Tile) -> Plan:
    """The plan with that tile, and a sweep and chunks that suit it."""
    tiles = grid(tile, problem, max(map(known, problem.columns)))
    if problem.kind == "all_gather_matmul":
        return replace(plan, tile=str(tile), sweep=plan.sweep or best_sweep(tiles, plan.chunk))
    cut_sweep, cut_columns = _cut(tiles, _chunks_wanted(problem, plan, tiles))
    sweep, width = plan.sweep or cut_sweep, plan.width or cut_columns * tile.n * tile.cluster_n
    chunk = min(sweep * tiles.height, known(problem.strips) * known(problem.rows))
    return replace(plan, chunk=chunk, tile=str(tile), sweep=sweep, width=width)


def _chunks_wanted(problem: Problem, plan: Plan, tiles: Grid) -> int:
    """Of a part. Where nothing is paid for a chunk, there are several a round."""
    if plan.direction != "store":
        return -(-known(problem.extent) // plan.chunk)
    rounds = tiles.rows * tiles.columns / at_once(tiles.tile, plan.reserve)
    return min(max(round(SIGNALS * rounds), 1), MOST_SIGNALS)


@lru_cache(maxsize=4096)
def sweep_loss(tiles: Grid, sweep: int) -> float:
    """How many more operands are read than with the best sweep, as a share."""
    return _operands(tiles, sweep) / min(_operands(tiles, other) for other in sweeps(tiles)) - 1


def _operands(tiles: Grid, sweep: int) -> float:
    """Read by the clusters at work, by what as many would read in a square; never less than 1.

    `sweep` rows of clusters are swept together along the columns: the clusters at work share `sweep` blocks
    of rows and at_once / sweep of columns, or more rows where there are not so many columns.
    """
    tile, working = tiles.tile, at_once(tiles.tile)
    rows = min(max(sweep, working / tiles.columns), tiles.rows)
    across = min(working / rows, tiles.columns)
    height, width = rows * tiles.height, across * tile.n * tile.cluster_n
    return float((height + width) / (2 * (height * width) ** 0.5))


def sweeps(tiles: Grid) -> list[int]:
    """The sweeps that cut a part's rows into groups of about one size."""
    return sorted({-(-tiles.rows // -(-tiles.rows // most)) for most in SWEEPS})


def best_sweep(tiles: Grid, chunk: int) -> int:
    """The sweep that reads the fewest operands, of those that wait for one chunk of rows at a time.

    Chunks that are no whole number of sweeps count as a loss: they leave a sweep that waits for the next one.
    Of equals the widest: measured never slower.
    """
    whole = chunk > (tiles.rows - 1) * tiles.height
    patient = [sweep for sweep in sweeps(tiles) if whole or sweep * tiles.height <= chunk] or [1]

    def cost(sweep: int) -> tuple[float, int]:
        left = 0.0 if whole else chunk % (sweep * tiles.height) / chunk
        return round(sweep_loss(tiles, sweep) + left, 3), -sweep

    return min(patient, key=cost)


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
