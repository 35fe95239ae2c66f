"""The CUDA engine: kernels on the caller's stream, copies on a stream beside it, one call into C++ for both.

What happens on the streams: csrc/cuda/workspace.cpp. What ranks do together on the host: cuda_group.py.
The first call with some shapes prepares everything that depends on them alone; later ones fill in addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from flux_inductor.planning.plan import Plan
from flux_inductor.runtime import torch_private
from flux_inductor.runtime.cuda_group import CudaGroup
from flux_inductor.runtime.cuda_kernels import rows_operand, weight_operand, whole_operand
from flux_inductor.runtime.cuda_prepare import Prepared, prepare_gather, prepare_scatter
from flux_inductor.runtime.groups import state_of


class CudaEngine:
    """See `engine.Engine`. The ranks of a group are GPUs that can address each other's memory."""

    name = "cuda"

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
        state = state_of(group, CudaGroup)
        operands = [weight_operand(weight) for weight in weights]
        shapes = tuple((weight.shape[1], layout, leading) for weight, layout, leading in operands)
        key = (x.shape, x.dtype, shapes, plan, gather_dim, return_gathered)
        shape = [*x.shape[:gather_dim], x.shape[gather_dim] * state.world, *x.shape[gather_dim + 1 :]]
        products = [x.new_empty([*shape[:-1], weight.shape[1]]) for weight in weights]
        results = [*products, x.new_empty(shape)] if return_gathered else products
        if 0 in x.shape[:-1]:  # no rows, on all ranks alike: nothing to send
            return results

        def prepare() -> Prepared:
            return prepare_gather(state.world, state.rank, *key)

        shard = whole_operand(x)
        rows = [None if bias is None else whole_operand(bias) for bias in biases]
        state.run(
            key,
            prepare,
            lambda workspace, prepared: workspace.all_gather_matmul(
                prepared.call,
                shard.data_ptr(),
                [weight.data_ptr() for weight, _, _ in operands],
                [0 if bias is None else bias.data_ptr() for bias in rows] or [0] * len(operands),
                [product.data_ptr() for product in products],
                results[-1].data_ptr() if return_gathered else 0,
                torch_private.current_stream(x.device),
            ),
        )
        return results

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
    ) -> Tensor:
        state = state_of(group, CudaGroup)
        shape = [*x.shape[:-1], weight.shape[1]]
        shape[scatter_dim] //= state.world
        result = x.new_empty(shape)
        if result.numel() == 0:  # on all ranks alike
            return result
        mean = reduce_op == "avg"
        # A mean of products alone is a sum of smaller ones; bias and addend come in unscaled.
        scaled = mean and bias is None and addend is None
        if scaled:
            scale /= state.world
        rows, row_stride = rows_operand(x)
        matrix, layout, leading = weight_operand(weight)
        sizes = (x.shape, x.dtype, row_stride, (weight.shape[1], layout, leading))
        key = (*sizes, plan, scatter_dim, reduce_op, scale, addend is not None)

        def prepare() -> Prepared:
            return prepare_scatter(state.world, state.rank, *key)

        bias = None if bias is None else whole_operand(bias)
        addend = None if addend is None else whole_operand(addend)

        def call(workspace: Any, prepared: Prepared) -> bool:
            # Free again for what this stream does next: the copies that read it are joined before.
            partials = x.new_empty(prepared.partials)
            return workspace.matmul_reduce_scatter(  # type: ignore[no-any-return]
                prepared.call,
                rows.data_ptr(),
                matrix.data_ptr(),
                0 if bias is None else bias.data_ptr(),
                0 if addend is None else addend.data_ptr(),
                partials.data_ptr(),
                result.data_ptr(),
                torch_private.current_stream(x.device),
            )

        state.run(key, prepare, call)
        return result.mul_(1 / state.world) if mean and not scaled else result
