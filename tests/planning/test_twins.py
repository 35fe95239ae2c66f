"""The order of tiles, chunks and copies in Python against that of the compiled core, on random problems."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from flux_inductor import _core
from flux_inductor.planning.fit import _tiles_of_chunks, columns_of_chunk, tiles_before_chunks
from flux_inductor.planning.plan import Plan
from flux_inductor.planning.problem import Problem
from flux_inductor.planning.schedule import cut, cut_for, rank_schedule
from flux_inductor.planning.tiles import MENUS, Grid, Tile, grid, known

tiles = st.sampled_from(MENUS["all_gather_matmul"]) | st.builds(
    Tile, st.integers(1, 40), st.integers(1, 40), st.just(64), st.integers(1, 3), st.integers(1, 3)
)


def shape(tile: Tile) -> tuple[int, int, int, int]:
    return tile.m, tile.n, tile.cluster_m, tile.cluster_n


@given(st.integers(0, 3000), st.integers(1, 4000), st.integers(0, 4000))
def test_cuts(rows: int, chunk: int, last: int) -> None:
    assert _core.cut_rows(rows, chunk, last) == [(c.start, c.stop) for c in cut(0, rows, chunk, last)]


@given(tiles, st.integers(1, 4), st.integers(1, 5000), st.integers(1, 5000))
def test_grids(tile: Tile, strips: int, rows: int, columns: int) -> None:
    problem = Problem("all_gather_matmul", 2, strips, rows, (columns,), 64, "bf16")
    assert Grid(tile, *_core.clusters_of(shape(tile), strips, rows, columns)) == grid(tile, problem, columns)


@settings(max_examples=300)
@given(st.data())
def test_gathers(data: st.DataObject) -> None:
    tile, world, strips = data.draw(tiles), data.draw(st.integers(2, 6)), data.draw(st.integers(1, 3))
    rows, n, k = data.draw(st.integers(1, 900)), data.draw(st.integers(1, 900)), data.draw(st.integers(1, 900))
    sweep, chunk = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 1000))
    last, slices = data.draw(st.integers(0, 1000)), data.draw(st.integers(1, 6))
    rank = data.draw(st.integers(0, world - 1))
    # A difference: planning counts the slices that a plan names, where K has too few steps for them.
    steps = -(-k // 64)
    slices = -(-steps // -(-steps // slices))
    problem = Problem("all_gather_matmul", world, strips, rows, (n,), k, "bf16")
    plan = Plan("mesh", "push", chunk, sweep=sweep, last=last, slices=slices if slices > 1 else 0)
    core = _core.GatherSchedule(world, rank, strips, rows, n, k, shape(tile), sweep, chunk, last, slices)
    for source in range(world):
        chunks = cut_for("all_gather_matmul", world, source, rank, rows, plan)
        before = tiles_before_chunks(grid(tile, problem, n), plan, [each.start for each in chunks])
        found = [(c.start, c.stop, c.slices, first) for c, first in zip(chunks, before, strict=True)]
        assert core.chunks(source) == found
    orders = rank_schedule("all_gather_matmul", world, rank, rows, plan)
    assert [(peer, first, last) for peer, first, last, *_ in core.copies()] == [
        (t.target, t.chunk.start, t.chunk.stop) for t in orders.transfers
    ]
    parts = [cluster[0][0] for cluster in core.clusters()]
    assert list(dict.fromkeys(parts)) == list(dict.fromkeys(chunk.owner for chunk in orders.steps))


@settings(max_examples=300)
@given(st.data())
def test_scatters(data: st.DataObject) -> None:
    tile, world, strips = data.draw(tiles), data.draw(st.integers(2, 6)), data.draw(st.integers(1, 3))
    rows, n = data.draw(st.integers(1, 900)), data.draw(st.integers(1, 900))
    width, at_once = data.draw(st.integers(1, 900)), data.draw(st.integers(1, 70))
    rank = data.draw(st.integers(0, world - 1))
    problem = Problem("matmul_reduce_scatter", world, strips, rows, (n,), 64, "bf16")
    tiled = grid(tile, problem, n)
    sweep = data.draw(st.integers(1, tiled.rows))
    plan = Plan("mesh", "store", 64, sweep=sweep, width=width)
    core = _core.ScatterSchedule(
        world, rank, strips, rows, n, shape(tile), sweep, columns_of_chunk(tile, plan), True
    )
    chunks = _tiles_of_chunks(tiled, plan)
    assert core.clusters_of_chunks() == chunks
    of_part = tiled.rows * tiled.columns
    lead = min(at_once + max(chunks), of_part)
    assert core.turns(at_once) == ((world - 2) * of_part + lead, 2 * (of_part - lead))
    orders = rank_schedule("matmul_reduce_scatter", world, rank, known(problem.extent), plan)
    parts = dict.fromkeys(part for part, *_ in core.chunks())
    assert list(parts) == list(dict.fromkeys(t.target for t in orders.transfers))
