"""Orders of the mesh schedules: permutations in each phase, arrivals in the order of the steps."""

from __future__ import annotations

from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flux_inductor.planning.ops import ALL_GATHER_MATMUL, MATMUL_REDUCE_SCATTER
from flux_inductor.planning.ops.op import Op
from flux_inductor.planning.plan import Plan
from flux_inductor.planning.schedule import Chunk, Transfer, rank_schedule, schedule

ops = st.sampled_from([ALL_GATHER_MATMUL, MATMUL_REDUCE_SCATTER])
directions = st.sampled_from(["push", "pull"])
worlds = st.integers(1, 9)
sizes = st.integers(0, 40)
chunks = st.integers(1, 50)


def test_all_gather_of_three_ranks() -> None:
    orders = rank_schedule(ALL_GATHER_MATMUL, 3, 1, 10, Plan("mesh", "push", 6))
    own = (Chunk(1, 0, 0, 6), Chunk(1, 1, 6, 10))
    assert orders.transfers == (*(Transfer(1, 0, c) for c in own), *(Transfer(1, 2, c) for c in own))
    assert [(chunk.owner, chunk.start) for chunk in orders.steps] == [
        (1, 0),
        (1, 6),
        (2, 0),
        (2, 6),
        (0, 0),
        (0, 6),
    ]


def test_reduce_scatter_of_three_ranks() -> None:
    orders = rank_schedule(MATMUL_REDUCE_SCATTER, 3, 1, 10, Plan("mesh", "pull", 10))
    own = Chunk(1, 0, 0, 10)
    assert orders.transfers == (Transfer(0, 1, own), Transfer(2, 1, own))
    assert [chunk.owner for chunk in orders.steps] == [2, 0, 1]


@given(ops, worlds, sizes, chunks, directions)
def test_steps_cover_the_product_once(
    op: Op, world: int, extent: int, chunk: int, direction: Literal["push", "pull"]
) -> None:
    made = schedule(op, world, extent, Plan("mesh", direction, chunk))
    for orders in made.ranks:
        rows = [(c.owner, row) for c in orders.steps for row in range(c.start, c.stop)]
        assert sorted(rows) == [(owner, row) for owner in range(world) for row in range(extent)]
        assert all(c.stop - c.start == min(chunk, extent - c.start) for c in orders.steps)
        assert len(orders.steps) == world * -(-extent // chunk)


@given(ops, worlds, st.integers(1, 40), chunks, directions)
def test_each_port_carries_one_stream_at_a_time(
    op: Op, world: int, extent: int, chunk: int, direction: Literal["push", "pull"]
) -> None:
    """The k-th transfers of all ranks: every rank once a source, once a target, never its own."""
    made = schedule(op, world, extent, Plan("mesh", direction, chunk))
    for together in zip(*(orders.transfers for orders in made.ranks), strict=True):
        assert sorted(t.source for t in together) == list(range(world))
        assert sorted(t.target for t in together) == list(range(world))
        assert all(t.source != t.target for t in together)


@given(worlds, sizes, chunks, directions)
def test_all_gather_arrives_in_the_order_of_the_steps(
    world: int, extent: int, chunk: int, direction: Literal["push", "pull"]
) -> None:
    made = schedule(ALL_GATHER_MATMUL, world, extent, Plan("mesh", direction, chunk))
    rounds = zip(*(orders.transfers for orders in made.ranks), strict=True)
    moved = [transfer for together in rounds for transfer in together]
    for rank, orders in enumerate(made.ranks):
        own = [c for c in orders.steps if c.owner == rank]
        assert list(orders.steps) == own + [t.chunk for t in moved if t.target == rank]


@given(worlds, sizes, chunks, directions)
def test_reduce_scatter_sends_in_the_order_of_the_steps_and_ends_with_own(
    world: int, extent: int, chunk: int, direction: Literal["push", "pull"]
) -> None:
    made = schedule(MATMUL_REDUCE_SCATTER, world, extent, Plan("mesh", direction, chunk))
    rounds = zip(*(orders.transfers for orders in made.ranks), strict=True)
    moved = [transfer for together in rounds for transfer in together]
    for rank, orders in enumerate(made.ranks):
        own = [c for c in orders.steps if c.owner == rank]
        assert list(orders.steps) == [t.chunk for t in moved if t.source == rank] + own


@pytest.mark.parametrize("direction", ["push", "pull"])
def test_the_executor_of_a_transfer(direction: Literal["push", "pull"]) -> None:
    made = schedule(ALL_GATHER_MATMUL, 4, 8, Plan("mesh", direction, 4))
    for rank, orders in enumerate(made.ranks):
        assert {t.source if direction == "push" else t.target for t in orders.transfers} == {rank}
