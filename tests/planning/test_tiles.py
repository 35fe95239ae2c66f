"""Tiles: their text, the choice by rounds, and chunks of a reduce_scatter along the kernel's order."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flux_inductor.planning.ops import ALL_GATHER_MATMUL, MATMUL_REDUCE_SCATTER
from flux_inductor.planning.ops.op import Op
from flux_inductor.planning.plan import Direction, Plan, parse_plan
from flux_inductor.planning.problem import Problem
from flux_inductor.planning.sm90.fit import fitted, op_us
from flux_inductor.planning.sm90.matmul_reduce_scatter import MOST_SIGNALS
from flux_inductor.planning.sm90.sweep import SWEEPS
from flux_inductor.planning.sm90.tiles import Menu, at_once, grid
from flux_inductor.planning.tile import Tile
from tests.support.architectures import SMS

MENU: Menu = (
    Tile.parse("128x256x64/2x1"),
    Tile.parse("256x192x64/2x1"),
    Tile.parse("128x192x64/2x1"),
    Tile.parse("256x128x64/2x1"),
    Tile.parse("128x128x64/2x1/pingpong"),
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
    problem = Problem(ALL_GATHER_MATMUL, 2, 1, m // 2, (n,), 8192, "bf16")
    whole = Plan("mesh", "push", m // 2)
    assert str(fitted(problem, whole, MENU, SMS).tile) == tile
    times = {str(other): op_us(problem, fitted(problem, whole, (other,), SMS), SMS) for other in MENU}
    assert min(times, key=lambda name: times[name]) == tile


@given(
    st.sampled_from([ALL_GATHER_MATMUL, MATMUL_REDUCE_SCATTER]),
    st.integers(2, 8),
    st.integers(1, 4),
    st.integers(1, 5000),
    st.integers(1, 1500),
    st.integers(1, 32),
    st.booleans(),
    st.sampled_from([0, 8, 20]),
)
def test_a_fitted_plan_is_whole_and_its_chunks_follow_the_sweep(
    op: Op, world: int, strips: int, rows: int, columns: int, chunks: int, stored: bool, reserve: int
) -> None:
    problem = Problem(op, world, strips, rows, (8 * columns,), 512, "bf16")
    direction: Direction = "store" if stored and op == MATMUL_REDUCE_SCATTER else "push"
    plan = fitted(problem, Plan("mesh", direction, -(-rows // chunks), reserve=reserve), MENU, SMS)
    assert (plan.direction, plan.reserve) == (direction, reserve)
    assert parse_plan(str(plan)).at(problem.m) == plan  # type: ignore[arg-type]
    assert fitted(problem, plan, MENU, SMS) == plan
    tiles = grid(plan.kernel_tile, problem, 8 * columns, SMS)
    assert 1 <= plan.sweep <= tiles.rows
    if op == MATMUL_REDUCE_SCATTER:
        step = tiles.tile.n * tiles.tile.cluster_n
        assert plan.width % step == 0
        assert 0 < plan.width <= tiles.columns * step
        pieces = -(-tiles.rows // plan.sweep) * -(-tiles.columns // (plan.width // step))
        wanted = MOST_SIGNALS if direction == "store" else chunks
        assert pieces <= 8 * wanted + tiles.rows // max(SWEEPS)


def test_what_a_kernel_stores_has_several_signals_a_round() -> None:
    problem = Problem(MATMUL_REDUCE_SCATTER, 2, 1, 4096, (12288,), 6144, "bf16")
    plan = fitted(problem, Plan("mesh", "store", 4096), MENU, SMS)
    tile = plan.kernel_tile
    tiles = grid(tile, problem, 12288, SMS)
    chunks = -(-4096 // plan.chunk) * -(-12288 // plan.width)
    rounds = tiles.rows * tiles.columns / at_once(tile, SMS)
    assert 4 * rounds <= chunks <= 16 * rounds


@pytest.mark.parametrize("direction", ["push", "store"])
@pytest.mark.parametrize("width", [8, 100, 1 << 20])
def test_any_width_may_be_given(direction: Direction, width: int) -> None:
    """A width below a tile's counts as one column of tiles, which is how the engine reads it."""
    problem = Problem(MATMUL_REDUCE_SCATTER, 2, 1, 4096, (12288,), 6144, "bf16")
    plan = fitted(problem, Plan("mesh", direction, 512, width=width), MENU, SMS)
    tile = plan.kernel_tile
    whole = replace(plan, width=max(tile.n, -(-width // tile.n) * tile.n))
    assert plan.width == width
    assert op_us(problem, plan, SMS) == op_us(problem, whole, SMS)


def test_sms_left_to_others_hold_no_tiles() -> None:
    tile = Tile.parse("256x192x64/2x1")
    assert [at_once(tile, SMS - reserve) for reserve in (0, 8, 9, 131, 132)] == [66, 62, 61, 1, 1]
    problem = Problem(ALL_GATHER_MATMUL, 2, 1, 4096, (6144,), 12288, "bf16")
    free, reserved = (fitted(problem, Plan("mesh", "push", 4096, reserve=n), MENU, SMS) for n in (0, 40))
    assert op_us(problem, reserved, SMS) > 1.2 * op_us(problem, free, SMS)


def test_an_empty_menu_is_named() -> None:
    problem = Problem(ALL_GATHER_MATMUL, 2, 1, 512, (512,), 512, "bf16")
    with pytest.raises(ValueError, match="no all_gather_matmul kernel was compiled for bf16"):
        fitted(problem, Plan("mesh", "push", 64), (), SMS)


def test_a_tile_that_is_not_compiled_is_named_with_those_that_are() -> None:
    problem = Problem(ALL_GATHER_MATMUL, 2, 1, 512, (512,), 512, "bf16")
    with pytest.raises(
        ValueError, match=r"no kernel with tile 64x64x64/1x1 for bf16; valid: 128x256x64/2x1, "
    ):
        fitted(problem, parse_plan("mesh push chunk=64 tile=64x64x64/1x1").at(1), MENU, SMS)
