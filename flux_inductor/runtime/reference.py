"""The unfused engine: a collective and a matmul, one after the other. It is the definition of the ops.

It takes every device and layout, and sizes of zero. It runs for plan "unfused", and for every call while
FLUX_INDUCTOR_ENGINE=reference is set.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed._functional_collectives  # registers the ops below
from torch import Tensor

from flux_inductor.dtypes import DTYPES
from flux_inductor.planning.ops.all_gather_matmul import ALL_GATHER_MATMUL, GatherCall
from flux_inductor.planning.ops.call import Call
from flux_inductor.planning.ops.matmul_reduce_scatter import MATMUL_REDUCE_SCATTER, ScatterCall
from flux_inductor.planning.ops.op import Op
from flux_inductor.planning.plan import Plan
from flux_inductor.runtime.bound import Run
from flux_inductor.runtime.groups import group_size
from flux_inductor.runtime.plain_collectives import count_own

_COLLECTIVES = torch.ops._c10d_functional  # the very ops that stand in an unfused graph


@dataclass(frozen=True)
class ReferenceEngine:
    """Functional collectives and torch.mm.

    Args:
        name: "unfused" where the plan says so, "reference" where it was forced.
    """

    name: str

    def bind(self, call: Call, operands: Sequence[Any], group: str, plan: Plan) -> Run:
        return partial(_RUNS[call.op], call, group)


def _gather(
    call: GatherCall, group: str, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> list[Tensor]:
    whole = all_gather(x, group, call.dim)
    flat = whole.flatten(0, -2)
    products = [
        multiply(flat, weight, bias).view(*whole.shape[:-1], weight.shape[1])
        for weight, bias in zip(weights, biases or [None] * len(weights), strict=True)
    ]
    return [*products, whole] if call.return_gathered else products


def _scatter(
    call: ScatterCall, group: str, x: Tensor, weight: Tensor, bias: Tensor | None, addend: Tensor | None
) -> Tensor:
    flat = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    if call.out_dtype == call.dtype:
        product = multiply(flat, weight, bias, call.scale)
    else:
        product = torch.mm(flat, weight).to(DTYPES[call.out_dtype])
        product = product if call.scale == 1.0 else product * call.scale
        product = product if bias is None else product + bias
    product = product.view(*x.shape[:-1], weight.shape[1])
    if addend is not None:
        product = product + addend
    return reduce_scatter(product, group, call.dim, call.reduce_op)


_RUNS: Mapping[Op, Run] = {ALL_GATHER_MATMUL: _gather, MATMUL_REDUCE_SCATTER: _scatter}


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, scale: float = 1.0) -> Tensor:
    """scale * (x @ weight) + bias, of [rows, K], [K, N] and [N], rounded once where the bias is fused."""
    if bias is not None and scale != 0.0:
        return torch.addmm(bias, x, weight, alpha=scale)
    product = torch.mm(x, weight)
    product = product if scale == 1.0 else product * scale
    # addmm with alpha=0 skips the product, and with it NaN and Inf.
    return product if bias is None else product + bias


def all_gather(shard: Tensor, group: str, dim: int) -> Tensor:
    """The shards of all ranks, joined along `dim`; contiguous."""
    world = group_size(group)
    joined = list(shard.shape)
    joined[dim] *= world
    if shard.numel() == 0:
        return shard.new_empty(joined)
    flat = shard.contiguous().view(-1)
    if not torch.compiler.is_compiling():  # traced, it is one of the graph's plain collectives
        count_own(group)
    stacked = _COLLECTIVES.wait_tensor(_COLLECTIVES.all_gather_into_tensor(flat, world, group))
    whole: Tensor = stacked.view(world, *shard.shape).movedim(0, dim).reshape(joined)
    return whole


def reduce_scatter(whole: Tensor, group: str, dim: int, reduce_op: str) -> Tensor:
    """This rank's part, along `dim`, of the sum or mean of `whole` over the ranks; contiguous."""
    world = group_size(group)
    part = [*whole.shape[:dim], whole.shape[dim] // world, *whole.shape[dim + 1 :]]
    if whole.numel() == 0:
        return whole.new_empty(part)
    split = whole.view([*whole.shape[:dim], world, *part[dim:]])
    stacked = split.movedim(dim, 0).reshape(-1)
    if not torch.compiler.is_compiling():  # traced, it is one of the graph's plain collectives
        count_own(group)
    reduced = _COLLECTIVES.reduce_scatter_tensor(stacked, reduce_op, world, group)
    result: Tensor = _COLLECTIVES.wait_tensor(reduced).view(part)
    return result
