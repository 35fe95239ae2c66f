"""Rule R1 on CUDA: the kernels' own order passes the checker, which rejects what deadlocks or has gaps."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flux_inductor.planning.ops import ALL_GATHER_MATMUL, MATMUL_REDUCE_SCATTER
from flux_inductor.planning.ops.op import Op
from flux_inductor.planning.plan import Direction, Plan
from flux_inductor.planning.problem import Problem
from flux_inductor.planning.progress import Queue, Simulation, deadlock
from flux_inductor.planning.sm90.all_gather_matmul import gather_order
from flux_inductor.planning.sm90.fit import fitted, menu_of
from flux_inductor.planning.sm90.gather_checker import gather_fault
from flux_inductor.planning.sm90.kernel_checker import counter_example
from flux_inductor.planning.sm90.kernel_queues import GatherRank, ScatterRank, gather_queues, scatter_queues
from flux_inductor.planning.sm90.matmul_reduce_scatter import scatter_order
from flux_inductor.planning.sm90.scatter_checker import scatter_fault
from flux_inductor.planning.sm90.tiles import known
from flux_inductor.planning.strategy import candidates
from flux_inductor.planning.tile import Tile
from tests.support.architectures import ARCHITECTURES, SMS

OPS: tuple[Op, ...] = (ALL_GATHER_MATMUL, MATMUL_REDUCE_SCATTER)
TILE = Tile.parse("128x128x64/2x1")
GATHER = Problem(ALL_GATHER_MATMUL, 2, 1, 600, (300,), 200, "bf16")
GATHER_PLAN = Plan("mesh", "push", 300, TILE, sweep=1, last=250, slices=3)
SCATTER = Problem(MATMUL_REDUCE_SCATTER, 2, 1, 512, (512,), 200, "bf16")
PUSH = Plan("mesh", "push", 256, TILE, sweep=1, width=256)
STORE = replace(PUSH, direction="store")


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("world", [*range(2, 9), 16])
def test_every_plan_the_strategy_can_emit_is_free_of_deadlocks(op: Op, world: int) -> None:
    rng = random.Random(f"{op} {world}")
    for rows, columns, depth in ((1, 8, 8), (200, 520, 256), (900, 1288, 2048)):
        strips = 1 + (world < 6)
        problem = Problem(op, world, strips, rows // min(world, 4) + 1, (columns,), depth, "bf16")
        plans = candidates(problem, ARCHITECTURES["cuda"])
        for plan in rng.sample(plans, min(len(plans), 3)):
            for at_once in (1, 5, 1000):
                assert counter_example(problem, plan, [at_once] * world) is None, (problem, plan)


@settings(max_examples=80)
@given(st.data())
def test_random_plans_are_free_of_deadlocks(data: st.DataObject) -> None:
    """Of any tile and cut; launched with other numbers of clusters on each rank."""
    op, world = data.draw(st.sampled_from(OPS)), data.draw(st.integers(2, 5))
    small, sizes = st.integers(1, 3), st.integers(1, 700)
    count = data.draw(st.integers(1, 2)) if op == ALL_GATHER_MATMUL else 1
    columns = tuple(data.draw(sizes) for _ in range(count))
    problem = Problem(op, world, data.draw(small), data.draw(sizes), columns, data.draw(sizes), "bf16")
    tile = data.draw(st.sampled_from(menu_of(problem)))
    if op == ALL_GATHER_MATMUL:
        last, slices = data.draw(st.integers(0, 700)), data.draw(st.sampled_from([0, 2, 3, 4]))
        plan = Plan("mesh", "push", data.draw(sizes), tile, data.draw(small), last=last, slices=slices)
    else:
        direction: Direction = data.draw(st.sampled_from(["push", "store"]))
        plan = Plan("mesh", direction, 1, tile, data.draw(small), data.draw(sizes))
    at_once = [data.draw(st.integers(1, 9)) for _ in range(world)]
    assert counter_example(problem, plan, at_once) is None


@pytest.mark.parametrize("plan", [GATHER_PLAN, PUSH, STORE])
def test_large_groups(plan: Plan) -> None:
    given = GATHER if plan is GATHER_PLAN else SCATTER
    problem = replace(given, world=64, rows=256, columns=(256,))
    assert counter_example(problem, replace(plan, width=plan.width // 2), [2] * 64) is None


@settings(max_examples=100)
@given(st.data())
def test_any_interleaving_with_any_clusters_ends(data: st.DataObject) -> None:
    """Of those with which a kernel is launched, any number may be resident on each rank."""
    world = data.draw(st.integers(2, 4))
    at_once = [data.draw(st.integers(1, 9)) for _ in range(world)]
    resident = [data.draw(st.integers(1, 9)) for _ in range(world)]
    plan = data.draw(st.sampled_from([GATHER_PLAN, PUSH, STORE]))
    if plan is GATHER_PLAN:
        queues = gather_queues(gathers(replace(GATHER, world=world)), at_once)
    else:
        orders = scatters(plan, replace(SCATTER, world=world), at_once)
        queues = scatter_queues(orders, plan.direction == "store")
    run = Simulation(queues, [count for each in resident for count in (each, 1)])
    order = random.Random(data.draw(st.integers(0, 1 << 16)))
    while any(run.advance(worker) for worker in order.sample(run.workers, len(run.workers))):
        pass
    assert run.finished, run.stuck()


def gathers(problem: Problem = GATHER) -> list[GatherRank]:
    orders = [
        gather_order(problem, GATHER_PLAN, rank, known(problem.columns[0])) for rank in range(problem.world)
    ]
    return [GatherRank(order.clusters(), order.copies()) for order in orders]


def scatters(plan: Plan, problem: Problem = SCATTER, at_once: list[int] | None = None) -> list[ScatterRank]:
    orders = [scatter_order(problem, plan, rank) for rank in range(problem.world)]
    clusters = zip(orders, at_once or [2] * problem.world, strict=True)
    return [ScatterRank(order.clusters(count), order.chunks()) for order, count in clusters]


@pytest.mark.parametrize("plan", [PUSH, STORE])
def test_own_tiles_first_deadlock_unless_clusters_hold_them_all(plan: Plan) -> None:
    wrong = [
        replace(order, clusters=sorted(order.clusters, key=lambda cluster: cluster[0][0] != rank))
        for rank, order in enumerate(scatters(plan))
    ]
    assert scatter_fault(SCATTER, plan, wrong, [9, 9]) is None
    fault = scatter_fault(SCATTER, plan, wrong) or ""
    assert "rank 0 is at tile (0, 0, 0) of rank 0, waits for data of rank 1" in fault
    assert "rank 1 is at tile (0, 0, 0) of rank 1, waits for data of rank 0" in fault


def test_an_own_tile_before_the_last_of_the_peers_chunk_deadlocks() -> None:
    wrong = []
    for rank, order in enumerate(scatters(STORE)):
        own = next(cluster for cluster in order.clusters if cluster[0][0] == rank)
        others = [cluster for cluster in order.clusters if cluster is not own]
        wrong.append(replace(order, clusters=[*others[:1], own, *others[1:]]))
    assert "is at tile (0, 0, 0) of rank 0, waits for data of rank 1" in (
        scatter_fault(SCATTER, STORE, wrong) or ""
    )


def test_fixed_shares_of_a_scatter_deadlock_where_clusters_are_not_resident() -> None:
    queues = scatter_queues(scatters(STORE), stores=True)

    def shared(queue: Queue) -> Queue:
        steps = [step for job in queue.jobs for step in job]
        shares = tuple(tuple(steps[first::2]) for first in range(2)) if steps else ()
        return replace(queue, jobs=shares, ahead=0)

    fixed = [shared(queue) for queue in queues]
    assert deadlock(fixed, [2, 1, 2, 1]) is None
    assert "waits for data of rank 1" in (deadlock(fixed) or "")


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("at_once", [1, 5, 1000])
@pytest.mark.parametrize(("sweep", "width"), [(1, 1), (2, 400), (3, 9999)])
@pytest.mark.parametrize("direction", ["push", "store"])
def test_own_tiles_come_behind_what_they_wait_for(
    direction: Direction, sweep: int, width: int, at_once: int, world: int
) -> None:
    """Whatever the own tiles before a peer's wait for, comes before that on every rank."""
    problem = Problem(MATMUL_REDUCE_SCATTER, world, 2, 1500, (3000,), 64, "bf16")
    for tile in menu_of(problem):
        plan = Plan("mesh", direction, 1, tile, sweep, width)
        schedule = scatter_order(problem, plan, 1)
        order = [(part, chunk) for (part, _, _, _, chunk), *_ in schedule.clusters(at_once)]
        of_one = Counter(chunk for part, chunk in order if part == 1)
        assert [of_one[chunk] for chunk in sorted(of_one)] == schedule.clusters_of_chunks()
        parts = [part for part, _ in order]
        lead = parts.index(1) - (world - 2) * parts.count(1)
        if direction == "store":  # nor do they come before their partials have had a round to arrive
            assert lead >= min(at_once + max(of_one.values()), parts.count(1))
        left, in_turns = Counter(order), False
        for part, chunk in order:
            left[part, chunk] -= 1
            if part == 1:
                assert not left[0, chunk], (part, chunk)
                in_turns |= any(left[0, other] for _, other in left)
        assert direction == "store" or not in_turns
        if (sweep, width) == (1, 1) and at_once < 1000:
            assert in_turns == (direction == "store")


@settings(max_examples=60)
@given(
    st.integers(1, 3),
    st.integers(1, 900),
    st.integers(1, 900),
    st.integers(1, 9),
    st.integers(1, 500),
    st.data(),
)
def test_the_first_cluster_that_needs_a_chunk_is_found(
    strips: int, rows: int, columns: int, sweep: int, chunk: int, data: st.DataObject
) -> None:
    last, slices = data.draw(st.integers(0, 500)), data.draw(st.sampled_from([0, 2, 3]))
    problem = Problem(ALL_GATHER_MATMUL, 3, strips, rows, (columns,), 500, "bf16")
    plan = Plan("mesh", "push", chunk, Tile.parse("64x256x64/2x1/pingpong"), sweep, last=last, slices=slices)
    order = gather_order(problem, plan, 0, columns)
    clusters = order.clusters()
    of_part = len(clusters) // 3
    for source in (1, 2):
        sent = gather_order(problem, plan, source, columns).copies()
        signal = min(signal for peer, *_, signal in sent if peer == 0)
        for _, _, copies, before in order.chunks(source):
            waits = [
                any(first <= signal <= last for *_, waits in cluster for first, last, _ in waits)
                for cluster in clusters[source * of_part : (source + 1) * of_part]
            ]
            assert waits.index(True) == before
            signal += copies


def wrong_gather(change: GatherRank) -> str:
    return gather_fault(GATHER, GATHER_PLAN, [gathers()[0], change], [2, 2]) or ""


def test_a_gather_that_is_not_whole_is_named() -> None:
    right = gathers()[1]
    assert "(0, 0, 0, 0) is missing" in wrong_gather(
        replace(right, clusters=[[tile for tile in c if tile[:4] != (0, 0, 0, 0)] for c in right.clusters])
    )
    assert "occurs 2 times" in wrong_gather(
        replace(right, clusters=[right.clusters[0], *right.clusters[:-1]])
    )
    assert "copies to rank 0 do not cover the shard once" in wrong_gather(
        replace(right, copies=right.copies[:-1])
    )
    same = [(*copy[:5], right.copies[0][5]) for copy in right.copies]
    assert "two copies to rank 0 have one signal" in wrong_gather(replace(right, copies=same))
    hasty = [
        [(*tile[:4], [(first, first, end) for first, _, end in tile[4]]) for tile in c]
        for c in right.clusters
    ]
    assert "but has not waited for" in wrong_gather(replace(right, clusters=hasty))
    early = [[(*tile[:4], tile[4][:1]) for tile in c] for c in right.clusters]
    assert "of K" in wrong_gather(replace(right, clusters=early))


def test_a_signal_that_nobody_raises_is_named() -> None:
    orders = gathers()
    lost = [replace(orders[0], copies=[(*copy[:5], copy[5] + 100) for copy in orders[0].copies]), orders[1]]
    fault = gather_fault(GATHER, GATHER_PLAN, lost, [2, 2]) or ""
    assert "has not waited for" in fault
    queues = gather_queues(lost, [2, 2])
    assert "of rank 0, waits for data of rank 0" in (deadlock(queues) or "")


def test_a_scatter_that_is_not_whole_is_named() -> None:
    first, right = scatters(PUSH)

    def wrong(change: ScatterRank) -> str:
        return scatter_fault(SCATTER, PUSH, [first, change]) or ""

    assert "occurs 2 times" in wrong(replace(right, clusters=[right.clusters[0], *right.clusters[:-1]]))
    assert "do not cover its part once" in wrong(replace(right, chunks=right.chunks[:-1]))
    miscounted = [(*chunk[:6], chunk[6] + 1) for chunk in right.chunks]
    assert "tiles, but counts" in wrong(replace(right, chunks=miscounted))
    moved = [[(*tile[:4], 1 - tile[4] if tile[4] < 2 else tile[4]) for tile in c] for c in right.clusters]
    assert "does not lie in chunk" in wrong(replace(right, clusters=moved))
    own = [*right.chunks, (1, *right.chunks[0][1:])]
    assert "a chunk of the own part moves" in wrong(replace(right, chunks=own))


def test_the_plans_of_two_gpus_are_free_of_deadlocks() -> None:
    """Of the sizes of real layers, as many clusters resident as there are and few."""
    for op, n, k in ((ALL_GATHER_MATMUL, 1280, 8192), (MATMUL_REDUCE_SCATTER, 8192, 1024)):
        problem = Problem(op, 2, 1, 2048, (n,), k, "bf16")  # type: ignore[arg-type]
        for plan in candidates(problem, ARCHITECTURES["cuda"]):
            assert fitted(problem, plan, menu_of(problem), SMS) == plan
            assert counter_example(problem, plan, [66, 66], [66, 3]) is None
