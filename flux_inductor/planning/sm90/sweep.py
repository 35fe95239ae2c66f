"""How many rows of clusters a kernel sweeps together along the columns: what the cache holds decides."""

from __future__ import annotations

from functools import lru_cache

from flux_inductor.planning.sm90.tiles import Grid

# Sweeps worth trying: beyond, the cache holds no more.
SWEEPS = (1, 2, 3, 4, 6, 8, 12, 16)


@lru_cache(maxsize=4096)
def sweep_loss(tiles: Grid, sweep: int) -> float:
    """How many more operands are read than with the best sweep, as a share."""
    return _operands(tiles, sweep) / min(_operands(tiles, other) for other in sweeps(tiles)) - 1


def _operands(tiles: Grid, sweep: int) -> float:
    """Read by the clusters at work, by what as many would read in a square; never less than 1.

    `sweep` rows of clusters are swept together along the columns: the clusters at work share `sweep` blocks
    of rows and at_once / sweep of columns, or more rows where there are not so many columns.
    """
    tile, working = tiles.tile, tiles.at_once()
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
