"""Timelines of the CUDA kernels: closed forms against simulated rounds, predictions against measurements."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flux_inductor.planning.cost import predict
from flux_inductor.planning.ops import ALL_GATHER_MATMUL, MATMUL_REDUCE_SCATTER
from flux_inductor.planning.ops.op import Op
from flux_inductor.planning.plan import UNFUSED, Direction, Plan, parse_plan
from flux_inductor.planning.problem import Problem
from flux_inductor.planning.sm90 import timeline
from flux_inductor.planning.sm90.fit import fitted, menu_of, op_us
from flux_inductor.planning.sm90.model import KERNEL
from flux_inductor.planning.sm90.tiles import grid
from flux_inductor.planning.sm90.timeline import Gathered, Rounds, Turns, gather_us, push_us, store_us
from flux_inductor.planning.strategy import candidates
from flux_inductor.planning.tile import Tile
from tests.support.architectures import ARCHITECTURES, SMS

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
OPS: tuple[Op, ...] = (ALL_GATHER_MATMUL, MATMUL_REDUCE_SCATTER)
CHUNK_BYTES = 1 << 20
SWEPT_ROWS = 2048  # of benchmarks.kernels


@pytest.fixture
def whole_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A last round takes as long as the others, as in the simulation."""

    def time(self: Rounds, tiles: float) -> float:
        return self.us * max(math.ceil(tiles / self.at_once - 1e-9), 1)

    monkeypatch.setattr(Rounds, "time", time)


def last_end(rounds: Rounds, arrivals: list[float], *, before: bool, start: float = 0.0) -> float:
    """When the last tile is done, tile by tile: each waits for its arrival before it starts, or ends."""
    free = [start] * rounds.at_once
    for number, arrival in enumerate(arrivals):
        begin = free[number % rounds.at_once]
        end = max(begin, arrival) + rounds.us if before else max(begin + rounds.us, arrival)
        free[number % rounds.at_once] = end
    return max(free)


@pytest.mark.usefixtures("whole_rounds")
@given(st.integers(2, 6), st.integers(1, 5), st.integers(1, 12), st.integers(1, 20), st.integers(1, 90))
def test_a_gather_ends_when_the_tiles_do(
    world: int, chunks: int, tiles_of_chunk: int, at_once: int, round_us: int
) -> None:
    rounds = Rounds(world, chunks * tiles_of_chunk, at_once, round_us)
    one = KERNEL.chunk.value + CHUNK_BYTES / (1e3 * KERNEL.copies.value)
    peers = (world - 1) * chunks
    arrivals = [0.0] * rounds.tiles
    arrivals += [(number + 1) * one for number in range(peers) for _ in range(tiles_of_chunk)]
    end = last_end(rounds, arrivals, before=True, start=KERNEL.launch.value)
    busy = KERNEL.launch.value + rounds.time(rounds.all_tiles)
    busy += KERNEL.gather_interference.value * peers * one
    shard = [Gathered(CHUNK_BYTES, (number * tiles_of_chunk,)) for number in range(chunks)]
    found = gather_us([rounds], [shard] * (world - 1))
    assert math.isclose(found - KERNEL.fork.value, max(end, busy))


@pytest.mark.usefixtures("whole_rounds")
@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 20), st.integers(1, 90))
def test_a_gather_in_slices_ends_when_the_tiles_do(
    tiles: int, slices: int, at_once: int, round_us: int
) -> None:
    """Two ranks. A tile multiplies each slice when it is there and the one before is multiplied."""
    rounds = Rounds(2, tiles, at_once, round_us)
    one = KERNEL.chunk.value + CHUNK_BYTES / slices / (1e3 * KERNEL.copies.value)
    free = [KERNEL.launch.value] * at_once
    for number in range(2 * tiles):
        end = free[number % at_once]
        for piece in range(slices):
            arrival = (piece + 1) * one if number >= tiles else 0.0
            end = max(end, arrival) + round_us / slices
        free[number % at_once] = end
    busy = KERNEL.launch.value + rounds.time(rounds.all_tiles)
    busy += KERNEL.gather_interference.value * slices * one
    found = gather_us([rounds], [[Gathered(CHUNK_BYTES, (0,), slices)]])
    assert math.isclose(found - KERNEL.fork.value, max(*free, busy))


@given(st.integers(1, 80), st.integers(1, 8), st.integers(1, 8))
def test_more_slices_are_never_slower_where_a_transfer_has_no_fixed_cost(
    tiles: int, slices: int, factor: int
) -> None:
    rounds = Rounds(2, tiles, 66, 40.0)
    with pytest.MonkeyPatch.context() as patch:
        free = replace(KERNEL, chunk=replace(KERNEL.chunk, value=0.0))
        patch.setattr(timeline, "KERNEL", free)
        few, many = (
            gather_us([rounds], [[Gathered(1 << 25, (0,), count)]]) for count in (slices, slices * factor)
        )
    assert many <= few + 1e-6


@pytest.mark.usefixtures("whole_rounds")
@given(st.integers(2, 5), st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(1, 20))
def test_a_scatter_ends_when_the_own_tiles_do(world: int, chunks: list[int], at_once: int) -> None:
    rounds = Rounds(world, sum(chunks), at_once, 50.0)
    tile_bytes, addition = 1 << 20, 4.0
    free, done = 0.0, 0
    own: list[float] = []
    for _ in range(world - 1):
        own = []
        for tiles in chunks:
            done += tiles
            left = max(free, rounds.time(done) + KERNEL.notice.value)
            free = left + KERNEL.block.value + tiles * tile_bytes / (1e3 * KERNEL.blocks.value)
            own += [free + addition] * tiles
    found = push_us(rounds, chunks, tile_bytes, addition) - KERNEL.fork.value - KERNEL.launch.value
    end = last_end(rounds, [0.0] * done + own, before=False)
    # Beside waits: interference, and what is lost where the peers' tiles all run at once.
    assert found >= end - 1e-6
    moved = done * tile_bytes / (1e3 * KERNEL.blocks.value)
    lockstep = KERNEL.lockstep.value * rounds.us if done <= at_once else 0
    slack = KERNEL.scatter_interference.value * moved + lockstep
    assert found <= end + slack + rounds.us


def test_several_launches_wait_once() -> None:
    rounds = Rounds(2, 64, 66, 100.0)
    once, twice, thrice = (gather_us([rounds] * n, [[Gathered(1 << 27, (0,) * n)]]) for n in (1, 2, 3))
    assert once > 2 * 100 + KERNEL.launch.value + 100, "bound by the link"
    assert math.isclose(thrice - twice, rounds.time(128) + KERNEL.launch.value)
    assert twice < 2 * once


def test_keeping_what_was_gathered_takes_its_stores_time_or_interferes_a_little() -> None:
    stores = 2 * (1 << 27) / (1e3 * KERNEL.kept.value)
    short, long = Rounds(2, 10, 66, 10.0), Rounds(2, 1000, 66, 100.0)
    for rounds, hidden in ((short, False), (long, True)):
        shards = [[Gathered(1 << 27, (0,))]]
        without, kept = (gather_us([rounds], shards, keep=keep) for keep in (0.0, KERNEL.kept.value))
        assert math.isclose(kept, without + KERNEL.kept_interference.value * stores) is hidden
        assert kept >= stores


def turns(rounds: Rounds, chunk: int) -> Turns:
    """Own tiles follow a round and a chunk behind."""
    lead = min(rounds.at_once + chunk, rounds.tiles)
    return Turns((rounds.parts - 2) * rounds.tiles + lead, 2 * (rounds.tiles - lead))


def test_stores_need_no_copy_but_nothing_queues_them() -> None:
    few = Rounds(2, 16, 66, 60.0)
    assert store_us(few, turns(few, 16), 1 << 15, 1.0) < push_us(few, [16], 1 << 15, 1.0)
    many = Rounds(2, 1000, 66, 60.0)
    stored = store_us(many, turns(many, 8), 1 << 17, 5.0)
    assert stored < store_us(many, turns(many, 1000), 1 << 17, 5.0), (
        "own tiles that wait for all others come last"
    )
    slow = store_us(many, turns(many, 8), 1 << 24, 5.0)
    assert slow > 1000 * (1 << 24) / (1e3 * KERNEL.stores.value), "never faster than the link"


@given(st.integers(2, 8), st.integers(1, 300), st.integers(1, 40), st.integers(1, 90))
def test_stores_in_turns_end_when_link_and_tiles_allow(
    world: int, tiles: int, at_once: int, round_us: int
) -> None:
    rounds, tile_bytes = Rounds(world, tiles, at_once, float(round_us)), 1 << 17
    link = (world - 1) * tiles * tile_bytes / (1e3 * KERNEL.stores.value)
    found = store_us(rounds, turns(rounds, 1), tile_bytes, 2.0)
    assert found >= max(rounds.time(rounds.all_tiles), link) + KERNEL.launch.value - 1e-6
    first = min(at_once, tiles * (world - 1)) * tile_bytes / (1e3 * KERNEL.stores.value)
    assert found <= 2 * rounds.time(rounds.all_tiles) + (1 + KERNEL.stall.value) * link + first + 20


@dataclass(frozen=True)
class Measured:
    problem: Problem
    plan: Plan
    us: float

    @property
    def predicted(self) -> float:
        return op_us(self.problem, self.plan, SMS)


NAMED: dict[str, Op] = {op.name: op for op in OPS}


def measured(op: Op) -> dict[tuple[int, int, int], list[Measured]]:
    """Every tile and cut of the committed benchmark of the kernels, by M, N, K; without the tiny shapes."""
    shapes: dict[tuple[int, int, int], list[Measured]] = {}
    for row in json.loads((RESULTS / f"kernels_{op.name}.json").read_text())["results"]:
        m, n, k = row["m"], row["n"], row["k"]
        name, *cut = row["candidate"].split(" ")
        direction: Direction = "store" if "store" in cut else "push"
        numbers = [int(part.split("=")[1]) for part in cut if "=" in part]
        if not numbers or m < 1024:
            continue
        problem = Problem(op, 2, 1, m // 2, (n,), k, "bf16")
        shapes.setdefault((m, n, k), []).append(
            Measured(problem, _plan(problem, name, direction, numbers), row["us"])
        )
    return shapes


def _plan(problem: Problem, name: str, direction: Direction, numbers: list[int]) -> Plan:
    tile, rows, n = Tile.parse(name), problem.rows, problem.columns[0]
    assert isinstance(rows, int)
    assert isinstance(n, int)
    if problem.op == ALL_GATHER_MATMUL:
        chunk = -(-rows // numbers[0])
        return Plan("mesh", "push", chunk, tile, sweep=max(1, min(SWEPT_ROWS, chunk) // (2 * tile.m)))
    tiles = grid(tile, problem, n, SMS)
    sweep = min(numbers[0], tiles.rows)
    width = -(-tiles.columns // numbers[1]) * tile.n
    return Plan("mesh", direction, min(sweep * tile.m * tile.cluster_m, rows), tile, sweep, width)


def shapes() -> Iterator[tuple[Op, tuple[int, int, int]]]:
    return ((op, shape) for op in OPS for shape in measured(op))


@pytest.mark.parametrize(("op", "shape"), list(shapes()))
def test_what_is_predicted_fastest_was_measured_nearly_fastest(op: Op, shape: tuple[int, int, int]) -> None:
    found = [one for one in measured(op)[shape] if one.plan.tile in menu_of(one.problem)]
    chosen = min(found, key=lambda one: one.predicted)
    assert chosen.us <= 1.05 * min(one.us for one in found), chosen.plan


@pytest.mark.parametrize("op", OPS)
def test_predictions_are_near_the_clock(op: Op) -> None:
    errors = [abs(one.predicted / one.us - 1) for found in measured(op).values() for one in found]
    assert sorted(errors)[len(errors) // 2] < 0.03
    assert sorted(errors)[len(errors) * 9 // 10] < (0.07 if op == ALL_GATHER_MATMUL else 0.09)


def engine_runs() -> dict[tuple[str, Op, int, int, int], list[Measured]]:
    """Calls through the engine, by run and shape; a run compares its plans with one another."""
    runs: dict[tuple[str, Op, int, int, int], list[Measured]] = {}
    for row in json.loads((RESULTS / "plans.json").read_text())["rows"]:
        op, m, n, k = NAMED[row["op"]], row["m"], row["n"], row["k"]
        problem = Problem(op, 2, 1, m // 2, (n,), k, "bf16", return_gathered=row["kept"])
        plan = fitted(problem, parse_plan(row["plan"]).at(m), menu_of(problem), SMS)
        runs.setdefault((row["run"], op, m, n, k), []).append(Measured(problem, plan, row["us"]))
    return runs


COMPARED = {key: found for key, found in engine_runs().items() if key[0] != "strategy"}


@pytest.mark.parametrize("key", list(COMPARED))
def test_what_is_predicted_fastest_is_nearly_the_fastest_of_the_engine(
    key: tuple[str, Op, int, int, int],
) -> None:
    chosen = min(COMPARED[key], key=lambda one: one.predicted)
    fastest = min(one.us for one in COMPARED[key])
    # Of small products the fixed costs count, which are known less well.
    regret = (1.03 if key[0] == "plans" else 1.04) if fastest > 100 else 1.1
    assert chosen.us <= regret * fastest, chosen.plan


def test_predictions_are_near_the_engine() -> None:
    found = [one for run in engine_runs().values() for one in run]
    errors = sorted(abs(one.predicted / one.us - 1) for one in found)
    assert errors[len(errors) // 2] < 0.03
    assert errors[len(errors) * 9 // 10] < 0.09


def test_the_transport_is_chosen_that_was_measured_faster() -> None:
    """By 5 %, or, of stores, 12 %: copies of two chunks are predicted up to a tenth too fast."""
    seen = Counter[Direction]()
    for (_, op, m, n, k), found in COMPARED.items():
        best: dict[Direction, float] = {}
        for one in found:
            best[one.plan.direction] = min(one.us, best.get(one.plan.direction, one.us))
        faster = min(best, key=lambda direction: best[direction])
        if max(best.values()) < (1.12 if faster == "store" else 1.05) * best[faster]:
            continue
        problem = Problem(op, 2, 1, m // 2, (n,), k, "bf16")
        fastest = min(candidates(problem, ARCHITECTURES["cuda"]), key=lambda plan: op_us(problem, plan, SMS))
        assert fastest.direction == faster, (m, n, k)
        seen[faster] += 1
    assert min(seen["push"], seen["store"]) >= 5, seen


@pytest.mark.parametrize(("m", "k"), [(4096, 2048), (2048, 3584), (4096, 3584), (8192, 3584)])
def test_stores_lose_to_the_copy_engine_where_arithmetic_is_the_bound(m: int, k: int) -> None:
    """Measured with 2048: 1.14 of the product alone, where copies took 1.07; with 1024: 1.25 and 1.46."""
    problem = Problem(MATMUL_REDUCE_SCATTER, 2, 1, m // 2, (8192,), k, "bf16")
    fastest = min(candidates(problem, ARCHITECTURES["cuda"]), key=lambda plan: op_us(problem, plan, SMS))
    assert fastest.direction == "push"


def test_a_link_bound_gather_is_cut_into_more_than_two_chunks() -> None:
    problem = Problem(ALL_GATHER_MATMUL, 2, 1, 4096, (1280,), 8192, "bf16")
    even = [plan for plan in candidates(problem, ARCHITECTURES["cuda"]) if not plan.last]
    fastest = min(even, key=lambda plan: op_us(problem, plan, SMS))
    assert 512 < fastest.chunk <= 4096 // 3


# (op, M, N, K, plan with even chunks, with uneven ones, microseconds of both): kernels of two H200.
UNEVEN: list[tuple[Op, int, int, int, str, str, float, float]] = [
    (
        *(ALL_GATHER_MATMUL, 8192, 1280, 8192),
        "mesh push chunk=1024 tile=128x128x64/2x1/pingpong sweep=4",
        "mesh push chunk=2560 last=1536 slices=4 tile=128x160x64/2x1 sweep=4",
        *(251.9, 243.0),
    ),
    (
        *(ALL_GATHER_MATMUL, 4096, 1280, 8192),
        "mesh push chunk=1024 tile=128x128x64/2x1/pingpong sweep=4",
        "mesh push chunk=1024 last=1024 slices=4 tile=128x160x64/2x1 sweep=4",
        *(147.7, 135.3),
    ),
    (
        *(ALL_GATHER_MATMUL, 2048, 1280, 8192),
        "mesh push chunk=1024 tile=128x128x64/2x1/pingpong sweep=4",
        "mesh push chunk=1024 last=1024 slices=4 tile=128x160x64/2x1 sweep=4",
        *(96.4, 87.0),
    ),
]


@pytest.mark.parametrize(("op", "m", "n", "k", "even", "uneven", "even_us", "uneven_us"), UNEVEN)
def test_uneven_chunks_gain_about_what_was_measured(
    op: Op, m: int, n: int, k: int, even: str, uneven: str, even_us: float, uneven_us: float
) -> None:
    problem = Problem(op, 2, 1, m // 2, (n,), k, "bf16")
    first, second = (
        op_us(problem, fitted(problem, parse_plan(text).at(m), menu_of(problem), SMS), SMS)
        for text in (even, uneven)
    )
    assert abs(first / even_us - 1) < 0.12
    assert abs(second / uneven_us - 1) < 0.06
    assert second / first < (1 + uneven_us / even_us) / 2


def test_a_sweep_across_two_chunks_waits_for_both() -> None:
    problem = Problem(ALL_GATHER_MATMUL, 2, 1, 4096, (1280,), 8192, "bf16")
    apart, across = (Plan("mesh", "push", 2048, Tile.parse("128x160x64/2x1"), sweep) for sweep in (4, 6))
    # Measured across: 1.33 and 1.38 of the product alone, where four chunks, also apart, took 1.21.
    assert op_us(problem, across, SMS) > 1.1 * op_us(problem, apart, SMS)
    chosen = fitted(problem, Plan("mesh", "push", 2048, Tile.parse("128x160x64/2x1")), menu_of(problem), SMS)
    assert 2048 % (chosen.sweep * 256) == 0, "chunks are whole sweeps"


# (op, M, N, K, microseconds): through the engine on two H200, see benchmarks/results/ops.json.
ENGINE = [
    (NAMED[row["op"]], row["m"], row["n"], row["k"], row["us"])
    for row in json.loads((RESULTS / "ops.json").read_text())["rows"]
    if row["candidate"] == "ours" and row["m"] >= 1024 and row["us"] > 200
]


@pytest.mark.parametrize(("op", "m", "n", "k", "us"), ENGINE)
def test_a_chosen_plan_is_not_slower_than_what_was_measured(
    op: Op, m: int, n: int, k: int, us: float
) -> None:
    problem = Problem(op, 2, 1, m // 2, (n,), k, "bf16")
    best = min(
        predict(problem, plan, ARCHITECTURES["cuda"]) for plan in candidates(problem, ARCHITECTURES["cuda"])
    )
    # The two runs differ by their clocks.
    assert best < min(1.06 * us, 0.9 * predict(problem, UNFUSED, ARCHITECTURES["cuda"]))
    assert best > 0.8 * us


def test_every_quantity_has_a_unit_and_a_source() -> None:
    lines = str(KERNEL).splitlines()
    assert len(lines) == len(vars(KERNEL))
    stores = next(line for line in lines if line.startswith("stores "))
    assert re.match(r"stores +414 GB/s    fitted to whole calls .*plans\.json", stores)
