"""What depends on a call's shapes and plan alone: the kernels, their sizes, and the room that it needs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from flux_inductor.planning.plan import Plan
from flux_inductor.planning.problem import Layout, Problem
from flux_inductor.planning.tiles import Tile, fitted, kernel_limit
from flux_inductor.runtime.cuda_kernels import DTYPES, kernel_for, kernels, menu
from flux_inductor.runtime.cuda_memory import Need

# N of a weight, its layout, and the elements between its rows or columns.
WeightShape = tuple[int, Layout, int]


@dataclass(frozen=True)
class Prepared:
    """A call but for its addresses.

    Args:
        call: `_core.cuda.GatherCall` or `ScatterCall`.
        descriptor: what all ranks must agree on.
        partials: elements of the peers' parts of a reduce_scatter, on their way out.
    """

    call: Any
    descriptor: str
    need: Need
    partials: int = 0


def prepare_gather(
    world: int,
    rank: int,
    shape: torch.Size,
    dtype: torch.dtype,
    weights: Sequence[WeightShape],
    plan: Plan,
    gather_dim: int,
    return_gathered: bool,
) -> Prepared:
    """all_gather_matmul of a contiguous shard.

    Raises:
        ValueError: the kernels cannot run it, or the plan's tile was not compiled.
    """
    problem = Problem(
        kind="all_gather_matmul",
        world=world,
        strips=math.prod(shape[:gather_dim]),
        rows=math.prod(shape[gather_dim:-1]),
        columns=tuple(columns for columns, _, _ in weights),
        depth=shape[-1],
        dtype=DTYPES.get(dtype, "fp32"),
        return_gathered=return_gathered,
    )
    plan = _direction(_fit(problem, plan), return_gathered)
    strips, rows, depth = map(_int, (problem.strips, problem.rows, problem.depth))
    chunk = min(plan.chunk, rows)
    launches, sizes = [], []
    for columns, layout, leading in weights:
        kernel = kernel_for(problem.kind, plan.tile, problem.dtype, layout)
        size = kernels.AllGatherMatmul()
        size.world, size.rank, size.strips, size.rows, size.n, size.k = (
            world,
            rank,
            strips,
            rows,
            columns,
            depth,
        )
        size.own_row_stride, size.own_strip_stride, size.weight_stride = depth, rows * depth, leading
        size.rows_per_chunk, size.group = chunk, plan.sweep
        launches.append(kernel)
        sizes.append(size)
    shards, chunks = 1 if return_gathered else world, world * -(-rows // chunk)
    return Prepared(
        call=kernels.GatherCall(launches, sizes),
        descriptor=f"all_gather_matmul of {problem.dtype} {list(shape)} along {gather_dim} with N = "
        f"{', '.join(map(str, problem.columns))}{', gathered returned' if return_gathered else ''}, {plan}",
        need=Need(
            slot_bytes=shards * _int(problem.shard_bytes),
            signals=0 if return_gathered else chunks,
            counters=chunks if return_gathered else 0,
        ),
    )


def prepare_scatter(
    world: int,
    rank: int,
    shape: torch.Size,
    dtype: torch.dtype,
    row_stride: int,
    weight: WeightShape,
    plan: Plan,
    scatter_dim: int,
    reduce_op: str,
    scale: float,
    has_addend: bool,
) -> Prepared:
    """matmul_reduce_scatter of x with that shape, `row_stride` elements from row to row.

    Raises:
        ValueError: the kernels cannot run it, or the plan's tile was not compiled.
    """
    columns, layout, leading = weight
    by_columns = scatter_dim == len(shape) - 1
    problem = Problem(
        kind="matmul_reduce_scatter",
        world=world,
        strips=1 if by_columns else math.prod(shape[:scatter_dim]),
        rows=math.prod(shape[:-1]) if by_columns else math.prod(shape[scatter_dim:-1]) // world,
        columns=(columns,),
        depth=shape[-1],
        dtype=DTYPES.get(dtype, "fp32"),
        split="columns" if by_columns else "rows",
        addend=has_addend,
    )
    # Partials are pushed either way: the owner's copy engine would have to wait for a peer's counters.
    plan = replace(_fit(problem, plan), direction="push")
    tile = Tile.parse(plan.tile)
    kernel = kernel_for(problem.kind, plan.tile, problem.dtype, layout)
    size = kernels.MatmulReduceScatter()
    strips, rows, depth = map(_int, (problem.strips, problem.rows, problem.depth))
    size.world, size.rank, size.strips, size.rows, size.n, size.k = world, rank, strips, rows, columns, depth
    size.x_row_stride, size.weight_stride, size.scale = row_stride, leading, scale
    size.group, size.chunk_columns = plan.sweep, -(-plan.width // (tile.n * tile.cluster_n))
    chunks = world * kernels.scatter_chunks_per_part(kernel, size)
    moved = _int(problem.moved_bytes)
    return Prepared(
        call=kernels.ScatterCall(kernel, size),
        descriptor=f"matmul_reduce_scatter ({reduce_op}) of {problem.dtype} {list(shape)} with N = {columns} "
        f"along {scatter_dim}, scale {scale}, {plan}",
        need=Need(slot_bytes=moved, signals=chunks, counters=chunks),
        partials=moved // problem.itemsize,
    )


def _fit(problem: Problem, plan: Plan) -> Plan:
    why = kernel_limit(problem)
    if why:
        raise ValueError(f"{problem.kind}: {why}. Use plan 'unfused' for it")
    return fitted(problem, plan, menu(problem.kind, problem.dtype))


def _direction(plan: Plan, return_gathered: bool) -> Plan:
    """A gathered tensor that the caller keeps lies in ordinary memory, which only its own rank can write."""
    return replace(plan, direction="pull" if return_gathered else "push")


def _int(size: object) -> int:
    assert isinstance(size, int), size
    return size
