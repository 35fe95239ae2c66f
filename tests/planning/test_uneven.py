"""Uneven chunks of problems of any size."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flux_inductor.planning.ops import ALL_GATHER_MATMUL
from flux_inductor.planning.plan import Plan, check_plan
from flux_inductor.planning.problem import Problem
from flux_inductor.planning.sm90 import uneven
from flux_inductor.planning.sm90.fit import fitted, menu_of, op_us
from flux_inductor.planning.sm90.tiles import known
from flux_inductor.planning.strategy import candidates
from flux_inductor.planning.tile import Tile
from tests.support.architectures import ARCHITECTURES, SMS

reserves = st.sampled_from([0, 8, 33, 66])
sizes = st.sampled_from([8, 136, 280, 544, 1280, 3072, 8192])


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    world, rows = draw(st.integers(2, 8)), draw(st.integers(1, 40000))
    return Problem(ALL_GATHER_MATMUL, world, 1, rows, (draw(sizes),), draw(sizes), "bf16")


def best_uneven(problem: Problem, reserve: int) -> list[Plan]:
    """The best plan with an uneven chunk, whatever it gains."""
    menu = menu_of(problem)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uneven, "LINK_BOUND", 0.0)
        patch.setattr(uneven, "GAIN", -1e9)
        even = fitted(problem, Plan("mesh", "push", known(problem.extent), reserve=reserve), menu, SMS)
        return [plan for plan in uneven.uneven(problem, even, menu, SMS) if plan != even]


def check_sizes(problem: Problem, plan: Plan) -> None:
    rows = known(problem.rows)
    assert 1 <= plan.chunk <= rows
    assert 1 <= plan.last <= rows, plan
    assert plan.slices * uneven.SLICE_DEPTH <= known(problem.depth)
    check_plan(plan, problem.op, "cuda")


@settings(max_examples=100, deadline=None)
@given(problems(), reserves)
def test_uneven_chunks_lie_in_the_part(problem: Problem, reserve: int) -> None:
    for plan in best_uneven(problem, reserve):
        check_sizes(problem, plan)
        assert plan.reserve == reserve


def test_the_last_chunk_of_a_ragged_shard_begins_with_a_cluster() -> None:
    problem = Problem(ALL_GATHER_MATMUL, 2, 1, 10922, (1280,), 8192, "bf16")
    (plan,) = best_uneven(problem, 0)
    tile = plan.kernel_tile
    assert plan.last < known(problem.rows)
    assert (known(problem.rows) - plan.last) % (tile.m * tile.cluster_m) == 0, plan


@settings(max_examples=100, deadline=None)
@given(problems(), reserves)
def test_uneven_chunks_are_offered_only_where_they_gain(problem: Problem, reserve: int) -> None:
    plans = candidates(problem, ARCHITECTURES["cuda"], reserve)
    ends = [plan for plan in plans if plan.last or plan.slices]
    assert len(ends) <= 1
    assert ends in ([], list(plans[-1:]))
    even_us = min(op_us(problem, plan, SMS) for plan in plans if plan not in ends)
    assert all(op_us(problem, plan, SMS) < (1 - uneven.GAIN) * even_us for plan in ends)


def test_slices_let_one_round_of_tiles_begin_at_once() -> None:
    """Measured: 1.010 of the product alone with six slices, 1.034 with two rounds of smaller tiles."""
    problem = Problem(ALL_GATHER_MATMUL, 2, 1, 512, (6144,), 12288, "bf16")
    fastest = min(candidates(problem, ARCHITECTURES["cuda"]), key=lambda plan: op_us(problem, plan, SMS))
    assert (fastest.tile, fastest.last, fastest.slices) == (Tile.parse("256x192x64/2x1"), 512, 6)
    kept = replace(problem, return_gathered=True)
    assert not any(plan.slices for plan in candidates(kept, ARCHITECTURES["cuda"]))
