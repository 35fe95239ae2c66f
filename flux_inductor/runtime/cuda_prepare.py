"""What depends on a call's shapes and plan alone: the kernels, their sizes, and the room that it needs."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from flux_inductor.planning.exchange import exchange_of, geometry
from flux_inductor.planning.ops.all_gather_matmul import GatherCall
from flux_inductor.planning.ops.matmul_reduce_scatter import ScatterCall
from flux_inductor.planning.plan import Plan, single
from flux_inductor.planning.problem import Layout, Problem
from flux_inductor.planning.sm90.fit import fitted
from flux_inductor.planning.sm90.limits import kernel_limit
from flux_inductor.planning.sm90.matmul_reduce_scatter import columns_of_chunk
from flux_inductor.planning.sm90.tiles import grid
from flux_inductor.runtime.cuda_kernels import kernel_for, kernels, menu
from flux_inductor.runtime.cuda_memory import Need

# N of a weight, its layout, and the elements between its rows or columns.
WeightShape = tuple[int, Layout, int]


@dataclass(frozen=True)
class Seat:
    """Who prepares a call, and for which device.

    Args:
        rank: in the group.
        device: its index.
        sms: that it has.
    """

    rank: int
    device: int
    sms: int


@dataclass(frozen=True)
class Prepared:
    """A call but for its addresses.

    Args:
        call: `_core.cuda.GatherCall` or `ScatterCall`.
        descriptor: what all ranks must agree on.
        partials: elements of the peers' parts of a reduce_scatter, on their way to the copy engine.
        token: stands for the descriptor in the digest of all calls.
    """

    call: Any
    descriptor: str
    need: Need
    partials: int = 0
    token: bytes = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "token", zlib.crc32(self.descriptor.encode()).to_bytes(4, "big"))


def prepare_gather(call: GatherCall, seat: Seat, weights: Sequence[WeightShape], plan: Plan) -> Prepared:
    """all_gather_matmul of a contiguous shard.

    Raises:
        ValueError: the kernels cannot run it, or the plan's tile was not compiled.
    """
    problem = call.problem
    plan = _fit(problem, plan, seat)
    rows, depth = _int(problem.rows), _int(problem.depth)
    tile = plan.kernel_tile
    shapes = [
        kernels.GatherShape(
            **_sizes(problem, seat, plan, columns),
            own_row_stride=depth,
            own_strip_stride=rows * depth,
            weight_stride=leading,
            rows_per_chunk=min(plan.chunk, rows),
            last_rows=min(plan.last, rows),
            slices=min(max(plan.slices, 1), -(-depth // tile.k)),
            group=min(plan.sweep, grid(tile, problem, columns, seat.sms).rows),
        )
        for columns, _, leading in weights
    ]
    launches = [kernel_for(problem, tile, layout) for _, layout, _ in weights]
    bound = kernels.GatherCall(launches, shapes)
    exchange = exchange_of(single(plan), call.op, "cuda")
    return Prepared(
        call=bound,
        descriptor=f"{call.op.name} of {geometry(problem)}, {exchange}",
        need=Need(
            slot_bytes=call.world * _int(problem.shard_bytes), signals=call.world * bound.signals_per_shard
        ),
    )


def prepare_scatter(
    call: ScatterCall, seat: Seat, row_stride: int, weight: WeightShape, plan: Plan
) -> Prepared:
    """matmul_reduce_scatter of an x with `row_stride` elements from row to row.

    Raises:
        ValueError: the kernels cannot run it, or the plan's tile was not compiled.
    """
    columns, layout, leading = weight
    problem = call.problem
    plan = _fit(problem, plan, seat)
    tile = plan.kernel_tile
    tiles = grid(tile, problem, columns, seat.sms)
    shape = kernels.ScatterShape(
        **_sizes(problem, seat, plan, columns),
        x_row_stride=row_stride,
        weight_stride=leading,
        scale=call.scale * call.factor,
        group=min(plan.sweep, tiles.rows),
        chunk_columns=min(columns_of_chunk(tile, plan.width), tiles.columns),
    )
    moved, store = _int(problem.moved_bytes), plan.direction == "store"
    kernel = kernel_for(problem, tile, layout)
    bound = kernels.ScatterCall(kernel, shape, store, seat.device)
    chunks = call.world * bound.chunks_per_part
    exchange = exchange_of(single(plan), call.op, "cuda")
    return Prepared(
        call=bound,
        descriptor=f"{call.op.name} ({call.reduce_op}) of {geometry(problem)}, {exchange}",
        need=Need(slot_bytes=moved, signals=chunks, counters=chunks),
        partials=0 if store else moved // problem.result_itemsize,
    )


@dataclass(frozen=True)
class Preparation:
    """How the engine prepares the calls of each op."""

    gather: Callable[[GatherCall, Seat, Sequence[WeightShape], Plan], Prepared] = prepare_gather
    scatter: Callable[[ScatterCall, Seat, int, WeightShape, Plan], Prepared] = prepare_scatter


def _sizes(problem: Problem, seat: Seat, plan: Plan, columns: int) -> dict[str, int]:
    """Those that the shapes of all ops have."""
    strips, rows, depth = map(_int, (problem.strips, problem.rows, problem.depth))
    ranks = {"world": problem.world, "rank": seat.rank}
    sizes = {"strips": strips, "rows": rows, "n": columns, "k": depth}
    return {**ranks, **sizes, "sms": seat.sms - plan.reserve}


def _fit(problem: Problem, plan: Plan, seat: Seat) -> Plan:
    why = kernel_limit(problem)
    if why:
        raise ValueError(f"{problem.op.name}: {why}. Use plan 'unfused' for it")
    return fitted(problem, plan, menu(problem), seat.sms)


def _int(size: object) -> int:
    assert isinstance(size, int), size
    return size
