"""Rule R1 on CPU ranks: every plan's schedule passes the checker, which rejects what deadlocks."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flux_inductor.planning.checker import counter_example, queues
from flux_inductor.planning.ops import ALL_GATHER_MATMUL, MATMUL_REDUCE_SCATTER
from flux_inductor.planning.ops.op import Op
from flux_inductor.planning.plan import Plan
from flux_inductor.planning.problem import Problem
from flux_inductor.planning.progress import Simulation
from flux_inductor.planning.schedule import RankSchedule, Schedule, schedule
from flux_inductor.planning.strategy import candidates
from tests.support.architectures import ARCHITECTURES

OPS: tuple[Op, ...] = (ALL_GATHER_MATMUL, MATMUL_REDUCE_SCATTER)
PLAN = Plan("mesh", "push", 4)
directions: st.SearchStrategy[Literal["push", "pull"]] = st.sampled_from(["push", "pull"])


def reordered(given: Schedule, orders: list[list[tuple[int, int]]]) -> Schedule:
    """The schedule with every rank's steps in the order of these (owner, index)."""
    chunks = {(chunk.owner, chunk.index): chunk for chunk in given.ranks[0].steps}
    ranks = zip(given.ranks, orders, strict=True)
    return replace(
        given, ranks=tuple(replace(rank, steps=tuple(chunks[c] for c in order)) for rank, order in ranks)
    )


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("world", [*range(2, 9), 16])
def test_every_plan_the_strategy_can_emit_is_free_of_deadlocks(op: Op, world: int) -> None:
    for extent in (1, 7, 16, 100, 1000):
        problem = Problem(op, world, 1, extent, (64,), 32, "fp32")
        for plan in candidates(problem, ARCHITECTURES["cpu"]):
            assert counter_example(schedule(op, world, extent, plan)) is None


@settings(max_examples=5)
@given(st.sampled_from(OPS), st.integers(1, 200), directions, st.integers(1, 6))
def test_large_groups(op: Op, extent: int, direction: Literal["push", "pull"], count: int) -> None:
    plan = Plan("mesh", direction, -(-extent // count))
    assert counter_example(schedule(op, 64, extent, plan)) is None


def any_run(made: Schedule, workers: list[int], seed: int) -> Simulation:
    """A random interleaving, until nothing moves any more."""
    run = Simulation(queues(made), [count for each in workers for count in (each, 1)])
    order = random.Random(seed)
    while any(run.advance(worker) for worker in order.sample(run.workers, len(run.workers))):
        pass
    return run


@settings(max_examples=60)
@given(st.data())
def test_any_interleaving_with_any_workers_ends(data: st.DataObject) -> None:
    """A check on the argument that the serial run proves all others."""
    world, op = data.draw(st.integers(2, 6)), data.draw(st.sampled_from(OPS))
    plan = Plan("mesh", data.draw(directions), data.draw(st.integers(1, 12)))
    workers = [data.draw(st.integers(1, 9)) for _ in range(world)]
    run = any_run(schedule(op, world, 12, plan), workers, data.draw(st.integers(0, 1 << 16)))
    assert run.finished, run.stuck()


@settings(max_examples=100)
@given(st.data())
def test_a_wrong_order_that_ends_serially_ends_in_any_run(data: st.DataObject) -> None:
    """Random step orders, of which many deadlock."""
    given = schedule(MATMUL_REDUCE_SCATTER, data.draw(st.integers(2, 3)), 8, PLAN)
    names = [(chunk.owner, chunk.index) for chunk in given.ranks[0].steps]
    wrong = reordered(given, [data.draw(st.permutations(names)) for _ in given.ranks])
    if counter_example(wrong) is None:
        workers = [data.draw(st.integers(1, 4)) for _ in given.ranks]
        run = any_run(wrong, workers, data.draw(st.integers(0, 1 << 16)))
        assert run.finished, run.stuck()


def test_own_chunks_first_deadlocks_unless_workers_hold_them_all() -> None:
    right = schedule(MATMUL_REDUCE_SCATTER, 2, 8, PLAN)
    wrong = reordered(right, [[(0, 0), (0, 1), (1, 0), (1, 1)], [(1, 0), (1, 1), (0, 0), (0, 1)]])
    assert counter_example(wrong, [3, 3]) is None
    assert counter_example(wrong) == (
        "deadlock:\n"
        "rank 0 is at chunk 0 of rank 0, waits for data of rank 1\n"
        "rank 0's transfer engine is at chunk 0 of rank 1, waits for rank 0 to multiply it\n"
        "rank 1 is at chunk 0 of rank 1, waits for data of rank 0\n"
        "rank 1's transfer engine is at chunk 0 of rank 0, waits for rank 1 to multiply it\n"
        "rank 0 has not begun chunk 1 of rank 0, chunk 0 of rank 1, chunk 1 of rank 1\n"
        "rank 0's transfer engine has not begun chunk 1 of rank 1\n"
        "rank 1 has not begun chunk 1 of rank 1, chunk 0 of rank 0, chunk 1 of rank 0\n"
        "rank 1's transfer engine has not begun chunk 1 of rank 0"
    )


def test_a_block_of_steps_that_straddles_two_shards_deadlocks() -> None:
    right = schedule(MATMUL_REDUCE_SCATTER, 2, 8, PLAN)
    wrong = reordered(right, [[(1, 1), (0, 0), (1, 0), (0, 1)], [(0, 1), (1, 0), (0, 0), (1, 1)]])
    fault = counter_example(wrong)
    assert fault is not None
    assert "rank 0 is at chunk 0 of rank 0, waits for data of rank 1" in fault


def broken(given: Schedule, rank: int, orders: RankSchedule) -> str:
    """What the checker says when one rank's orders are replaced."""
    ranks = list(given.ranks)
    ranks[rank] = orders
    return counter_example(replace(given, ranks=tuple(ranks))) or ""


@pytest.mark.parametrize("op", OPS)
def test_a_step_or_transfer_lost_or_doubled_is_named(op: Op) -> None:
    right = schedule(op, 3, 8, PLAN)
    orders = right.ranks[1]
    lost = replace(orders, steps=orders.steps[1:])
    doubled = replace(orders, steps=orders.steps + orders.steps[:1])
    for wrong in (lost, doubled):
        owner = orders.steps[0].owner
        assert f"rank 1's steps: the chunks of rank {owner} do not cover" in broken(right, 1, wrong)
    unsent = replace(orders, transfers=orders.transfers[:-1])
    assert f"({orders.transfers[-1].source}, {orders.transfers[-1].target}, " in broken(right, 1, unsent)
    stranger = replace(orders, transfers=orders.transfers + orders.transfers[:1])
    assert "occurs 2 times" in broken(right, 1, stranger)


def test_a_rank_cannot_execute_the_transfers_of_others() -> None:
    right = schedule(ALL_GATHER_MATMUL, 3, 8, PLAN)
    moved = next(t for t in right.ranks[1].transfers if t.target == 0)
    ranks = list(right.ranks)
    ranks[1] = replace(ranks[1], transfers=tuple(t for t in ranks[1].transfers if t != moved))
    ranks[2] = replace(ranks[2], transfers=(*ranks[2].transfers, moved))
    fault = counter_example(replace(right, ranks=tuple(ranks)))
    assert fault is not None
    assert "rank 2 executes a transfer of others" in fault
