"""Tiles: their text, the choice by waves, and chunks of a reduce_scatter along the kernel's order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flux_inductor.planning.plan import Plan, parse_plan
from flux_inductor.planning.problem import Kind, Problem
from flux_inductor.planning.tiles import SWEEPS, Menu, Tile, best_tile, fitted, grid, kernel_us

MENU: Menu = tuple(
    map(
        Tile.parse,
        ("128x256x64/2x1", "256x192x64/2x1", "128x192x64/2x1", "256x128x64/2x1", "128x128x64/2x1/pingpong"),
    )
)


@given(st.integers(1, 512), st.integers(1, 512), st.integers(1, 4), st.integers(1, 4), st.booleans())
def test_the_text_round_trips(m: int, n: int, cluster_m: int, cluster_n: int, pingpong: bool) -> None:
    tile = Tile(m, n, 64, cluster_m, cluster_n, pingpong)
    assert Tile.parse(str(tile)) == tile


def test_a_malformed_tile_is_an_error() -> None:
    with pytest.raises(ValueError, match="'256x192' is malformed; write for example 256x192x64/2x1"):
        Tile.parse("256x192")


@pytest.mark.parametrize(
    ("m", "n", "tile"),
    [
        # 32 x 32 tiles of 256 x 192 are 7.8 waves: no other is both as efficient and as full.
        (8192, 6144, "256x192x64/2x1"),
        # 64 x 28 of 128 x 256 are 13.6 waves of 132; 256 x 192 would need 9.2, hence 10.
        (8192, 7168, "128x256x64/2x1"),
        # 8 x 32 of 128 x 192 are 1.9 waves. 256 x 192 would fill one wave, in which nothing overlaps.
        (1024, 6144, "128x192x64/2x1"),
    ],
)
def test_the_tile_that_fills_the_waves_wins(m: int, n: int, tile: str) -> None:
    problem = Problem("all_gather_matmul", 2, 1, m // 2, (n,), 8192, "bf16")
    assert str(best_tile(problem, MENU)) == tile
    assert kernel_us(Tile.parse(tile), problem) == min(kernel_us(other, problem) for other in MENU)


@given(
    st.sampled_from(["all_gather_matmul", "matmul_reduce_scatter"]),
    st.integers(2, 8),
    st.integers(1, 4),
    st.integers(1, 5000),
    st.integers(1, 1500),
    st.integers(1, 32),
)
def test_a_fitted_plan_is_whole_and_its_chunks_follow_the_sweep(
    kind: Kind, world: int, strips: int, rows: int, columns: int, chunks: int
) -> None:
    problem = Problem(kind, world, strips, rows, (8 * columns,), 512, "bf16")
    plan = fitted(problem, Plan("mesh", "push", -(-rows // chunks)), MENU)
    assert parse_plan(str(plan)).at(problem.m) == plan  # type: ignore[arg-type]
    assert fitted(problem, plan, MENU) == plan
    tiles = grid(Tile.parse(plan.tile), problem, 8 * columns)
    assert 1 <= plan.sweep <= tiles.rows
    if kind == "matmul_reduce_scatter":
        step = tiles.tile.n * tiles.tile.cluster_n
        assert plan.width % step == 0
        assert 0 < plan.width <= tiles.columns * step
        pieces = -(-tiles.rows // plan.sweep) * -(-tiles.columns // (plan.width // step))
        assert pieces <= 8 * chunks + tiles.rows // max(SWEEPS)


def test_a_tile_that_is_not_compiled_is_named_with_those_that_are() -> None:
    problem = Problem("all_gather_matmul", 2, 1, 512, (512,), 512, "bf16")
    with pytest.raises(
        ValueError, match=r"no kernel with tile 64x64x64/1x1 for bf16; valid: 128x256x64/2x1, "
    ):
        fitted(problem, parse_plan("mesh push chunk=64 tile=64x64x64/1x1").at(1), MENU)
