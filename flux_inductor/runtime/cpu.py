"""The CPU engine: ranks of one host share memory; a thread moves chunks while the caller multiplies them.

Both ops follow the schedule of planning/schedule.py. The rules that make the exchange safe are in
docs/protocol.md, their proofs beside the code in csrc/cpu.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from flux_inductor.planning.plan import Plan
from flux_inductor.planning.problem import Kind
from flux_inductor.runtime import engine
from flux_inductor.runtime.bound import PreparesNothing
from flux_inductor.runtime.cpu_gather import Gather
from flux_inductor.runtime.cpu_group import CpuGroup, RanksApart
from flux_inductor.runtime.cpu_scatter import Scatter
from flux_inductor.runtime.groups import state_of
from flux_inductor.runtime.multiply import with_blas_strides
from flux_inductor.runtime.reference import ReferenceEngine

logger = logging.getLogger("flux_inductor.runtime")
Result = TypeVar("Result")


class CpuEngine(PreparesNothing):
    """See `engine.Engine`.

    Plans are made for ranks that can share memory. Those of a graph that comes from Inductor's cache may meet
    others: there, calls run unfused. All ranks learn it alike, in the first call.
    """

    name = "cpu"

    def __init__(self) -> None:
        self._unfused = ReferenceEngine("unfused")

    def all_gather_matmul(
        self,
        x: Tensor,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        group: str,
        plan: Plan,
        gather_dim: int,
        return_gathered: bool,
    ) -> list[Tensor]:
        state = state_of(group, CpuGroup)
        return self._run(
            "all_gather_matmul",
            state,
            lambda: self._gather(state, x, weights, biases, plan, gather_dim, return_gathered),
            lambda: self._unfused.all_gather_matmul(
                x, weights, biases, group, plan, gather_dim, return_gathered
            ),
        )

    def matmul_reduce_scatter(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        addend: Tensor | None,
        group: str,
        plan: Plan,
        scatter_dim: int,
        reduce_op: str,
        scale: float,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        state = state_of(group, CpuGroup)
        return self._run(
            "matmul_reduce_scatter",
            state,
            lambda: self._scatter(
                state, x, weight, bias, addend, plan, scatter_dim, reduce_op, scale, out_dtype
            ),
            lambda: self._unfused.matmul_reduce_scatter(
                x, weight, bias, addend, group, plan, scatter_dim, reduce_op, scale, out_dtype
            ),
        )

    def _run(
        self, op: Kind, state: CpuGroup, fused: Callable[[], Result], unfused: Callable[[], Result]
    ) -> Result:
        """One call. After any exception, also before it begins, the group is dead on all ranks (rule R9)."""
        try:
            if not state.apart:
                return fused()
        except RanksApart:
            logger.warning(
                "group %r runs its fused ops unfused: %s. Their plans were made for ranks of one host; if "
                "they came from Inductor's cache, clear it (TORCHINDUCTOR_CACHE_DIR) to plan anew",
                state.name,
                state.apart,
            )
        except BaseException as error:
            state.fail(error)
            raise
        engine.count_as(op, self, self._unfused)
        return unfused()

    def _gather(
        self,
        state: CpuGroup,
        x: Tensor,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        plan: Plan,
        gather_dim: int,
        return_gathered: bool,
    ) -> list[Tensor]:
        strips, rows = math.prod(x.shape[:gather_dim]), math.prod(x.shape[gather_dim:-1])
        shape = [*x.shape[:gather_dim], x.shape[gather_dim] * state.world, *x.shape[gather_dim + 1 :]]
        products = [x.new_empty([*shape[:-1], weight.shape[1]]) for weight in weights]
        gathered = x.new_empty(shape) if return_gathered else None
        gather = Gather(
            state,
            shard=x.reshape(strips, rows, x.shape[-1]),
            whole=None if gathered is None else gathered.view(strips, state.world * rows, x.shape[-1]),
            weights=[with_blas_strides(weight) for weight in weights],
            biases=list(biases) or [None] * len(weights),
            products=[product.view(strips, state.world * rows, product.shape[-1]) for product in products],
        )
        if gather.shard.numel() == 0:  # the same on all ranks: nobody has anything to send
            gather.multiply_nothing()
        else:
            # Not what only this rank sees: columns of its weights, whether it keeps the gathered tensor.
            moves = f"{x.dtype} [{strips}, {rows}, {x.shape[-1]}]"
            gather.run(plan, f"all_gather_matmul of {moves}, {plan}")
        return products if gathered is None else [*products, gathered]

    def _scatter(
        self,
        state: CpuGroup,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        addend: Tensor | None,
        plan: Plan,
        scatter_dim: int,
        reduce_op: str,
        scale: float,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        world = state.world
        shape = [*x.shape[:-1], weight.shape[1]]
        part = [*shape[:scatter_dim], shape[scatter_dim] // world, *shape[scatter_dim + 1 :]]
        result = x.new_empty(part, dtype=out_dtype)
        if result.numel() == 0:  # the same on all ranks
            return result
        columns = scatter_dim == x.dim() - 1
        strips = 1 if columns else math.prod(shape[:scatter_dim])
        rows = math.prod(shape[:-1]) // strips
        scatter = Scatter(
            state,
            x=x.reshape(strips, rows, x.shape[-1]),
            weight=with_blas_strides(weight),
            bias=bias,
            addend=None if addend is None else addend.reshape(strips, rows, shape[-1]),
            result=result,
            columns=columns,
            scale=scale,
            factor=1 / world if reduce_op == "avg" else 1.0,
        )
        # Not K, which only this rank sees.
        dtypes = x.dtype if result.dtype == x.dtype else f"{x.dtype} as {result.dtype}"
        moves = f"{dtypes} [{strips}, {rows}, {shape[-1]}]{' by columns' if columns else ''}"
        scatter.run(plan, f"matmul_reduce_scatter ({reduce_op}) of {moves}, {plan}")
        return result
