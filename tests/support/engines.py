"""Calls of the ops on an engine that the test names, with the arguments of the ops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from flux_inductor.op_arguments import gather_call, scatter_call
from flux_inductor.planning.plan import Plan
from flux_inductor.runtime.bound import Run
from flux_inductor.runtime.engine import Engine


def bind_gather(
    engine: Engine,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    group: str,
    plan: Plan,
    dim: int,
    return_gathered: bool,
) -> Run:
    call = gather_call(x, weights, biases, group, dim, return_gathered)
    return engine.bind(call, (x, weights, biases), group, plan)


def bind_scatter(
    engine: Engine,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    addend: Tensor | None,
    group: str,
    plan: Plan,
    dim: int,
    reduce_op: str,
    scale: float,
    out_dtype: torch.dtype | None = None,
) -> Run:
    call = scatter_call(x, weight, bias, addend, group, dim, reduce_op, scale, out_dtype)
    return engine.bind(call, (x, weight, bias, addend), group, plan)


def all_gather_matmul(
    engine: Engine,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    *others: Any,
) -> list[Tensor]:
    return cast(list[Tensor], bind_gather(engine, x, weights, biases, *others)(x, weights, biases))


def matmul_reduce_scatter(
    engine: Engine, x: Tensor, weight: Tensor, bias: Tensor | None, addend: Tensor | None, *others: Any
) -> Tensor:
    return cast(Tensor, bind_scatter(engine, x, weight, bias, addend, *others)(x, weight, bias, addend))
