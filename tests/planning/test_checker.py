"""Rule R1: every plan's schedule passes the checker, and the checker rejects what dead-locks."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flux_inductor.planning.checker import Simulation, counter_example
from flux_inductor.planning.machine import MACHINES
from flux_inductor.planning.plan import Plan
from flux_inductor.planning.problem import Kind, Problem
from flux_inductor.planning.schedule import RankSchedule, Schedule, schedule
from flux_inductor.planning.strategy import candidates

KINDS: tuple[Kind, ...] = ("all_gather_matmul", "matmul_reduce_scatter")
PLAN = Plan("mesh", "push", 4)


def reordered(given: Schedule, orders: list[list[tuple[int, int]]]) -> Schedule:
    """The schedule with every rank's steps in the order of these (owner, index)."""
    chunks = {(chunk.owner, chunk.index): chunk for chunk in given.ranks[0].steps}
    ranks = zip(given.ranks, orders, strict=True)
    return replace(
        given, ranks=tuple(replace(rank, steps=tuple(chunks[c] for c in order)) for rank, order in ranks)
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [*range(2, 9), 16])
def test_every_plan_the_strategy_can_emit_is_free_of_dead_locks(kind: Kind, world: int) -> None:
    for extent in (1, 7, 16, 100, 1000):
        problem = Problem(kind, world, 1, extent, (64,), 32, "fp32")
        for device in MACHINES:
            for plan in candidates(problem, device):
                assert counter_example(schedule(kind, world, extent, plan)) is None


@settings(max_examples=60)
@given(st.data())
def test_uneven_chunks_are_free_of_dead_locks(data: st.DataObject) -> None:
    rows = st.integers(1, 30)
    plan = Plan("mesh", "push", data.draw(rows), last=data.draw(rows), slices=data.draw(st.integers(2, 5)))
    world, extent = data.draw(st.integers(2, 6)), data.draw(st.integers(0, 60))
    assert counter_example(schedule("all_gather_matmul", world, extent, plan)) is None


@settings(max_examples=60)
@given(st.integers(2, 6), st.integers(0, 60), st.integers(1, 30))
def test_stores_in_turns_are_free_of_dead_locks(world: int, extent: int, chunk: int) -> None:
    given = schedule("matmul_reduce_scatter", world, extent, Plan("mesh", "store", chunk))
    assert counter_example(given) is None


def test_turns_in_which_the_own_chunk_comes_first_dead_lock() -> None:
    right = schedule("matmul_reduce_scatter", 2, 8, Plan("mesh", "store", 4))
    wrong = reordered(right, [[(0, 0), (1, 0), (0, 1), (1, 1)], [(1, 0), (0, 0), (1, 1), (0, 1)]])
    assert "rank 0: a block holds chunk 0 of rank 0, waits for data of rank 1" in (
        counter_example(wrong) or ""
    )


def test_a_slice_that_is_not_sent_is_named() -> None:
    right = schedule("all_gather_matmul", 2, 8, Plan("mesh", "push", 4, last=2, slices=3))
    orders = right.ranks[1]
    lost = broken(right, 1, replace(orders, transfers=orders.transfers[:-1]))
    assert "transfers (source, target, chunk, slice): (1, 0, Chunk(" in lost
    assert ", 2) is missing" in lost


def test_a_step_waits_for_every_slice() -> None:
    given = schedule("all_gather_matmul", 2, 8, Plan("mesh", "push", 8, slices=2))
    run = Simulation(given, [1, 1])
    chunk = given.ranks[0].steps[-1]
    assert run.missing(0, chunk) == [1]
    send = run.moves[2]
    assert send()
    assert run.missing(0, chunk) == [1]
    assert send()
    assert run.missing(0, chunk) == []


@settings(max_examples=10)
@given(st.sampled_from(KINDS), st.integers(1, 200), st.sampled_from(["push", "pull"]), st.integers(1, 6))
def test_large_groups(kind: Kind, extent: int, direction: str, count: int) -> None:
    plan = Plan("mesh", direction, -(-extent // count))  # type: ignore[arg-type]
    assert counter_example(schedule(kind, 64, extent, plan)) is None


@settings(max_examples=60)
@given(st.data())
def test_any_interleaving_with_any_blocks_ends(data: st.DataObject) -> None:
    """A check on the argument that the greedy run with one block each proves all others."""
    world = data.draw(st.integers(2, 6))
    kind = data.draw(st.sampled_from(KINDS))
    directions = ["push", "pull"] if kind == "all_gather_matmul" else ["push", "pull", "store"]
    plan = Plan("mesh", data.draw(st.sampled_from(directions)), data.draw(st.integers(1, 12)))  # type: ignore[arg-type]
    blocks = [data.draw(st.integers(1, 9)) for _ in range(world)]
    run = Simulation(schedule(kind, world, 12, plan), blocks)
    order = random.Random(data.draw(st.integers(0, 1 << 16)))
    while any(move() for move in order.sample(run.moves, len(run.moves))):
        pass
    assert run.finished, run.stuck()


@settings(max_examples=60)
@given(st.data())
def test_every_interleaving_of_a_wrong_order_ends_alike(data: st.DataObject) -> None:
    """Greedy and random runs agree on random step orders, of which many dead-lock."""
    given = schedule("matmul_reduce_scatter", data.draw(st.integers(2, 4)), 8, PLAN)
    names = [(chunk.owner, chunk.index) for chunk in given.ranks[0].steps]
    wrong = reordered(given, [data.draw(st.permutations(names)) for _ in given.ranks])
    blocks = [data.draw(st.integers(1, 4)) for _ in given.ranks]
    greedy, run = Simulation(wrong, blocks), Simulation(wrong, blocks)
    greedy.run()
    order = random.Random(data.draw(st.integers(0, 1 << 16)))
    while any(move() for move in order.sample(run.moves, len(run.moves))):
        pass
    assert [rank.done for rank in run.ranks] == [rank.done for rank in greedy.ranks]


def test_own_chunks_first_dead_locks_unless_blocks_hold_them_all() -> None:
    right = schedule("matmul_reduce_scatter", 2, 8, PLAN)
    wrong = reordered(right, [[(0, 0), (0, 1), (1, 0), (1, 1)], [(1, 0), (1, 1), (0, 0), (0, 1)]])
    assert counter_example(wrong, [3, 3]) is None
    assert counter_example(wrong) == (
        "dead-lock with 1, 1 resident blocks:\n"
        "rank 0: a block holds chunk 0 of rank 0, waits for data of rank 1\n"
        "rank 0: no block is free for chunk 1 of rank 0, chunk 0 of rank 1, chunk 1 of rank 1\n"
        "rank 0: its transfer engine waits for rank 0 to signal chunk 0 of rank 1\n"
        "rank 1: a block holds chunk 0 of rank 1, waits for data of rank 0\n"
        "rank 1: no block is free for chunk 1 of rank 1, chunk 0 of rank 0, chunk 1 of rank 0\n"
        "rank 1: its transfer engine waits for rank 1 to signal chunk 0 of rank 0"
    )


def test_a_block_of_steps_that_straddles_two_shards_dead_locks() -> None:
    right = schedule("matmul_reduce_scatter", 2, 8, PLAN)
    wrong = reordered(right, [[(1, 1), (0, 0), (1, 0), (0, 1)], [(0, 1), (1, 0), (0, 0), (1, 1)]])
    fault = counter_example(wrong)
    assert fault is not None
    assert "rank 0: a block holds chunk 0 of rank 0, waits for data of rank 1" in fault


def broken(given: Schedule, rank: int, orders: RankSchedule) -> str:
    """What the checker says when one rank's orders are replaced."""
    ranks = list(given.ranks)
    ranks[rank] = orders
    return counter_example(replace(given, ranks=tuple(ranks))) or ""


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_or_transfer_lost_or_doubled_is_named(kind: Kind) -> None:
    right = schedule(kind, 3, 8, PLAN)
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
    right = schedule("all_gather_matmul", 3, 8, PLAN)
    moved = next(t for t in right.ranks[1].transfers if t.target == 0)
    ranks = list(right.ranks)
    ranks[1] = replace(ranks[1], transfers=tuple(t for t in ranks[1].transfers if t != moved))
    ranks[2] = replace(ranks[2], transfers=(*ranks[2].transfers, moved))
    fault = counter_example(replace(right, ranks=tuple(ranks)))
    assert fault is not None
    assert "rank 2 executes a transfer of others" in fault
