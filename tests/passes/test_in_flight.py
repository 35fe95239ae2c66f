"""Plain collectives that may run beside a fused CUDA op: it leaves them SMs, or they are waited for first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from flux_inductor.options import Options
from flux_inductor.passes import in_flight
from flux_inductor.planning import strategy
from flux_inductor.planning.cost import plain_collective_us
from flux_inductor.planning.machine import CUDA
from tests.passes.programs import gather, wait
from tests.passes.tracing import Traced, prepared

Group = dist.ProcessGroup
CUDA_PAIR = Options(strategy="always", topology="cuda ranks=2 nodes=1 link=nvlink")
ROWS, DEPTH, COLUMNS = 1024, 1024, 2048


def start(y: Tensor, group: Group) -> Tensor:
    started = torch.ops._c10d_functional.all_reduce(y, "sum", group.group_name)
    return started  # type: ignore[no-any-return, unused-ignore]


def traced(fn: Callable[..., Any], rows: int, options: Options = CUDA_PAIR) -> Traced:
    """The program with an all_reduce of so many rows."""
    result = prepared(fn, options)
    kind = torch.bfloat16
    shapes = (ROWS, DEPTH), (DEPTH, COLUMNS), (rows, DEPTH)
    result.call(*(torch.zeros(shape, dtype=kind) for shape in shapes))
    return result


def program(group: Group, end: str) -> Callable[..., tuple[Tensor, ...]]:
    """An all_reduce around a fused gather; `end` says where it is waited for."""

    def fn(x: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        started = start(y, group)
        if end == "before":
            total = wait(started)
            x = x + total.sum()
        product = gather(x, 0, group) @ w
        if end == "behind":
            total = wait(started)
        return product, total if end != "elsewhere" else started

    return fn


def figures(result: Traced) -> tuple[str, bool, str]:
    """Plan, whether a wait is put before the op, and the reason of the fused collective."""
    (record,) = (one for one in result.records if one.fused)
    (line,) = (one for one in result.text.splitlines() if "all_gather_matmul" in one)
    return record.plan, line.count("v", line.index("after"), line.index(":")) == 2, record.reason


@pytest.mark.parametrize(("price", "reserved"), [(0.0, False), (1e6, True)])
def test_the_cheaper_one_is_taken(
    group: Group, monkeypatch: pytest.MonkeyPatch, price: float, reserved: bool
) -> None:
    """A wait that costs nothing moves before the op, but a long one does not."""
    monkeypatch.setattr(in_flight, "plain_collective_us", lambda *_: price)
    monkeypatch.setattr(in_flight, "_with_reserve", dearer(in_flight._with_reserve))
    plan, waits, reason = figures(traced(program(group, "behind"), rows=64))
    assert ("reserve=8" in plan, waits) == (reserved, not reserved)
    assert ("8 SMs are reserved for all_reduce" in reason) == reserved
    assert ("all_reduce is waited for first" in reason) == (not reserved)


def dearer(choose: Callable[..., strategy.Decision]) -> Callable[..., strategy.Decision]:
    """Ten microseconds more with a reserve: small problems leave SMs idle anyway."""

    def decide(*args: Any) -> strategy.Decision:
        decision = choose(*args)
        assert decision.fused_us is not None
        return replace(decision, fused_us=decision.fused_us + 10)

    return decide


def test_wait_in_another_graph_cannot_move(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_flight, "plain_collective_us", lambda *_: 0.0)
    plan, waits, reason = figures(traced(program(group, "elsewhere"), rows=64))
    assert ("reserve=8" in plan, waits) == (True, False)
    assert "8 SMs are reserved for all_reduce" in reason


def test_start_in_another_graph(group: Group) -> None:
    """It is waited for first: most likely it has ended."""

    def fn(x: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return gather(x, 0, group) @ w, wait(y)

    result = traced(fn, rows=64)
    (record,) = (one for one in result.records if one.fused)
    assert "reserve" not in record.plan
    assert "wait_tensor_1 of an earlier graph is waited for first" in record.reason
    assert [line.split(" = ")[1].split("(")[0] for line in result.text.splitlines()[:2]] == [
        "wait_tensor",
        "after [v0]: all_gather_matmul",
    ]


def test_what_has_ended_needs_nothing(group: Group) -> None:
    result = traced(program(group, "before"), rows=64)
    (record,) = (one for one in result.records if one.fused)
    assert "reserve" not in record.plan
    assert "after" not in next(line for line in result.text.splitlines() if "all_gather_matmul" in line)


@pytest.mark.parametrize(("asked", "waits"), [(0, True), (4, True), (8, False), (16, False)])
def test_a_number_that_was_asked_for_is_kept(group: Group, asked: int, waits: bool) -> None:
    options = replace(CUDA_PAIR, reserve_sms=asked)
    plan, moved, _ = figures(traced(program(group, "behind"), rows=64, options=options))
    assert (f"reserve={asked}" in plan) == bool(asked)
    assert moved == waits


def test_moved_wait_serves_all_later_ops(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second op depends on the first, and that on the wait."""
    monkeypatch.setattr(in_flight, "plain_collective_us", lambda *_: 0.0)
    monkeypatch.setattr(in_flight, "_with_reserve", dearer(in_flight._with_reserve))

    def fn(x: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        started = start(y, group)
        first, second = gather(x, 0, group) @ w, gather(x + 1, 0, group) @ w
        return first, second, wait(started)

    result = traced(fn, rows=64)
    assert [one.reason.count("waited for first") for one in result.records if one.fused] == [1, 0]
    assert all("reserve" not in one.plan for one in result.records)


def test_nothing_on_cpu(group: Group) -> None:
    result = traced(program(group, "behind"), rows=64, options=Options(strategy="always"))
    (record,) = (one for one in result.records if one.fused)
    assert "reserve" not in record.plan
    assert "SMs" not in record.reason
    assert "waited" not in record.reason


def test_price_of_a_plain_collective() -> None:
    """An all_reduce moves what a reduce_scatter and an all_gather of its parts move."""
    size, world = 1 << 26, 4
    scatter = plain_collective_us("reduce_scatter", size, world, CUDA) - CUDA.reduce_scatter.value
    part = plain_collective_us("all_gather", size // world, world, CUDA)
    assert plain_collective_us("all_reduce", size, world, CUDA) == pytest.approx(scatter + part)
    assert plain_collective_us("broadcast", size, world, CUDA) > part
