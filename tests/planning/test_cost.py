"""Cost model: formulas against simulated schedules, symbols against numbers, predictions against clocks."""

from __future__ import annotations

import math

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from flux_inductor.planning.cost import explain, fused_us, named_terms, predict
from flux_inductor.planning.machine import CPU, CUDA
from flux_inductor.planning.ops import ALL_GATHER_MATMUL, MATMUL_REDUCE_SCATTER
from flux_inductor.planning.ops.op import Op, Terms
from flux_inductor.planning.plan import UNFUSED, Plan
from flux_inductor.planning.problem import Problem
from flux_inductor.planning.schedule import Chunk, RankSchedule, Transfer, schedule
from tests.support.architectures import ARCHITECTURES

ops: st.SearchStrategy[Op] = st.sampled_from([ALL_GATHER_MATMUL, MATMUL_REDUCE_SCATTER])
Arrivals = dict[tuple[int, int, Chunk], float]


def simulated_us(op: Op, world: int, chunks: int, step: float, transfer: float) -> float:
    """When the last rank ends, if every rank multiplies and transfers in the order of its schedule."""
    ranks = schedule(op, world, chunks, Plan("mesh", "push", 1)).ranks
    done = {(r, c): step * (k + 1) for r, rank in enumerate(ranks) for k, c in enumerate(rank.steps)}

    def ready(moved: Transfer) -> float:
        return 0.0 if op == ALL_GATHER_MATMUL else done[moved.source, moved.chunk]

    arrivals: Arrivals = {}
    for rank in ranks:
        free = 0.0
        for moved in rank.transfers:
            free = max(free, ready(moved)) + transfer
            arrivals[moved.source, moved.target, moved.chunk] = free

    def end(number: int, rank: RankSchedule) -> float:
        free = 0.0
        for chunk in rank.steps:
            awaited = [time for (_, t, c), time in arrivals.items() if (t, c) == (number, chunk)]
            free = max([free, *awaited]) + step
        return free

    return max(end(number, rank) for number, rank in enumerate(ranks))


@given(ops, st.integers(2, 5), st.integers(1, 5), st.integers(1, 100), st.integers(1, 100))
def test_the_formula_is_the_time_of_the_schedule(
    op: Op, world: int, chunks: int, step: int, transfer: int
) -> None:
    values = dict.fromkeys(vars(named_terms()), 0)
    values |= {"rate": 1, "memory": 1, "kernel": 1, "copy": 1, "push": 1}  # what the rest is divided by
    values |= {"step": step, "transfer": transfer, "world": world, "chunks": chunks}
    assert fused_us(op, "push", Terms(**values)) == simulated_us(op, world, chunks, step, transfer)


@settings(max_examples=12)
@given(ops, st.integers(2, 8), st.integers(1, 5000), st.integers(1, 5000), st.sampled_from(["cpu", "cuda"]))
def test_an_expression_agrees_with_the_numbers(
    op: Op, world: int, rows: int, depth: int, device: str
) -> None:
    architecture = ARCHITECTURES[device]  # type: ignore[index]
    s, k = sympy.symbols("s k", integer=True, positive=True)
    fused = (Plan("mesh", "push", 64), Plan("mesh", "pull", 1000))
    # With known sizes the timeline tells what a CUDA kernel takes; its formula is an outline.
    for plan in (UNFUSED, *(fused if device == "cpu" else ())):
        expression = predict(Problem(op, world, 2, s, (512,), k, "bf16"), plan, architecture)
        assert expression.free_symbols <= {s, k}
        number = predict(Problem(op, world, 2, rows, (512,), depth, "bf16"), plan, architecture)
        assert math.isclose(float(expression.subs({s: rows, k: depth})), number, rel_tol=1e-9)


SM90 = ARCHITECTURES["cuda"]

# (op, M, N, K, microseconds): bf16, two H200 with NVLink, NCCL and cuBLAS one after the other.
SEQUENTIAL: list[tuple[Op, int, int, int, int]] = [
    (ALL_GATHER_MATMUL, 1024, 6144, 12288, 283),
    (ALL_GATHER_MATMUL, 4096, 6144, 12288, 1022),
    (ALL_GATHER_MATMUL, 8192, 6144, 12288, 1971),
    (ALL_GATHER_MATMUL, 8192, 7168, 8192, 1625),
    (ALL_GATHER_MATMUL, 8192, 1280, 8192, 520),
    (MATMUL_REDUCE_SCATTER, 1024, 12288, 6144, 281),
    (MATMUL_REDUCE_SCATTER, 4096, 12288, 6144, 1027),
    (MATMUL_REDUCE_SCATTER, 8192, 12288, 6144, 2108),
    (MATMUL_REDUCE_SCATTER, 8192, 8192, 3584, 946),
    (MATMUL_REDUCE_SCATTER, 8192, 8192, 1024, 513),
]


@pytest.mark.parametrize(("op", "m", "n", "k", "measured"), SEQUENTIAL)
def test_unfused_predictions_are_near_the_clock(op: Op, m: int, n: int, k: int, measured: int) -> None:
    predicted = predict(Problem(op, 2, 1, m // 2, (n,), k, "bf16"), UNFUSED, SM90)
    assert abs(predicted / measured - 1) < 0.08


def test_a_fused_op_is_never_predicted_faster_than_its_matmul() -> None:
    for op, m, n, k, _ in SEQUENTIAL:
        problem = Problem(op, 2, 1, m // 2, (n,), k, "bf16")
        fastest = 2 * m * n * k / (1e6 * CUDA.bf16.value)
        # cuBLAS lacks the tile that suits 8192, 7168, 8192.
        assert predict(problem, Plan("mesh", "push", m // 4), SM90) > 0.98 * fastest


def test_sizes_of_a_problem() -> None:
    gather = Problem(ALL_GATHER_MATMUL, 4, 2, 8, (32, 16), 64, "bf16")
    assert (gather.m, gather.extent) == (64, 8)
    assert gather.flops == 2 * 64 * 48 * 64
    assert (gather.shard_bytes, gather.moved_bytes) == (2 * 8 * 64 * 2, 3 * 2 * 8 * 64 * 2)
    scatter = Problem(MATMUL_REDUCE_SCATTER, 4, 1, 8, (32,), 64, "fp32", split="columns")
    assert (scatter.m, scatter.extent, scatter.shard_bytes) == (8, 8, 8 * 8 * 4)
    rows = sympy.Symbol("s0", positive=True, integer=True)
    open_problem = Problem(MATMUL_REDUCE_SCATTER, 4, 2, rows, (sympy.Integer(32),), 64, "fp32")
    assert open_problem.symbols == {rows}
    assert (open_problem.m, open_problem.shard_bytes) == (8 * rows, 2 * rows * 32 * 4)
    assert open_problem.columns == (32,)


def test_explain_shows_the_parts_and_their_formulas() -> None:
    problem = Problem(ALL_GATHER_MATMUL, 2, 1, 4096, (1280,), 8192, "bf16")
    plan = Plan("mesh", "push", 1024)
    text = explain(problem, plan, SM90)
    assert "mesh push chunk=1024" in text
    assert f"{plan!s:<24}{predict(problem, plan, SM90):12.1f} us" in text
    assert "one transfer                  53.6 us  = transfer + 0.001*shard_bytes/(chunks*push)" in text


def test_a_model_prints_every_quantity_with_unit_and_source() -> None:
    lines = str(CPU).splitlines()
    assert len(lines) == len(vars(CPU))
    assert all(len(line.split()) >= 3 for line in lines)
