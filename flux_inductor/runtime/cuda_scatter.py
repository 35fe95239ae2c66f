"""matmul_reduce_scatter on CUDA, bound to all that depends on shapes, as in cuda_gather.py."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import Tensor

from flux_inductor.dtypes import DTYPES
from flux_inductor.planning.ops.matmul_reduce_scatter import MATMUL_REDUCE_SCATTER, ScatterCall
from flux_inductor.planning.plan import Plan
from flux_inductor.runtime.bound import Run
from flux_inductor.runtime.cuda_group import CudaGroup
from flux_inductor.runtime.cuda_operands import (
    in_place,
    readable,
    readable_term,
    row_stride,
    term_fits,
    weight_strides,
)
from flux_inductor.runtime.cuda_prepare import Preparation, Prepared
from flux_inductor.runtime.cuda_results import Make, maker


def bind_scatter(
    state: CudaGroup,
    prepare: Preparation,
    call: ScatterCall,
    plan: Plan,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    addend: Tensor | None,
) -> Run:
    """What runs the call on operands like these.

    Raises:
        ValueError: the kernels cannot run it.
    """
    _check_launches(plan)
    (shape,), dtype = call.results, DTYPES[call.out_dtype]
    if call.empty:
        return lambda x, weight, bias, addend: x.new_empty(shape, dtype=dtype)
    x_fits, stride = row_stride(x)
    weight_fits, layout, leading = weight_strides(weight)
    prepared = prepare.scatter(call, state.seat, stride, (weight.shape[1], layout, leading), plan)
    result = maker(state.empty_strided, shape, dtype)
    partials = maker(state.empty_strided, [prepared.partials], dtype) if prepared.partials else None
    fits = (x_fits, weight_fits, term_fits(bias, dtype), term_fits(addend, dtype))
    placed = all(map(in_place, (x, weight, bias, addend), fits))
    return Scatter(state, prepared, x_fits, weight_fits, placed, result, partials, dtype, call.factor)


def _check_launches(plan: Plan) -> None:
    """Ranks whose launches return only when the kernel ends queue no copies for each other meanwhile."""
    if plan.direction == "push" and os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
        raise ValueError(
            f"CUDA_LAUNCH_BLOCKING is set: with plan '{plan}' every rank's matmul_reduce_scatter would wait "
            "for copies that the others queue only behind it. Unset it, pass a plan whose kernel stores "
            "('mesh store ...'), or run unfused: FLUX_INDUCTOR_ENGINE=reference"
        )


@dataclass(frozen=True, slots=True)
class Scatter:
    """matmul_reduce_scatter, bound.

    Args:
        partials: makes room for the peers' parts on their way out, if the copy engine moves them.
        dtype: of bias and addend in the kernel, and of the result.
        factor: of bias and addend, in a mean; the product's is in the kernel's scale. So no sum is larger
            than the mean, which fp16 may hold where it cannot hold the sum.
    """

    state: CudaGroup
    prepared: Prepared
    x_fits: bool
    weight_fits: bool
    in_place: bool
    result: Make
    partials: Make | None
    dtype: torch.dtype
    factor: float

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, addend: Tensor | None) -> Tensor:
        state = self.state
        state.check()
        if state.current_device() != state.device_index:
            with torch.cuda.device(state.device):
                return self(x, weight, bias, addend)
        state.allow(self.prepared)
        try:
            result = self.result()
            # Free again for what this stream does next: the copies that read it are joined before.
            partials = None if self.partials is None else self.partials()
            if self.factor != 1.0:
                # In the result's dtype: in a narrower one the quotient would be rounded.
                terms = (None if term is None else term.to(self.dtype) for term in (bias, addend))
                bias, addend = (None if term is None else term * self.factor for term in terms)
            if not self.in_place:
                x, weight = readable(x, self.x_fits), readable(weight, self.weight_fits)
                bias, addend = readable_term(bias, self.dtype), readable_term(addend, self.dtype)
        except BaseException as error:  # no memory, say
            state.leave_out(self.prepared, error)
            raise
        state.run(self.prepared, MATMUL_REDUCE_SCATTER.name, x, weight, bias, addend, partials, result)
        return result
