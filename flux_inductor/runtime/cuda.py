"""The CUDA engine: kernels on the caller's stream, copies on a stream beside it, one call into C++ for both.

What happens on the streams: csrc/cuda/workspace.cpp. What ranks do together on the host: cuda_group.py.
A call is bound once to all that depends on its shapes; then it allocates results and passes on tensors.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from flux_inductor.planning.plan import Plan
from flux_inductor.runtime.bound import GatherRun, ScatterRun
from flux_inductor.runtime.cuda_group import CudaGroup
from flux_inductor.runtime.cuda_operands import (
    in_place,
    negated,
    readable,
    readable_term,
    row_stride,
    term_fits,
    weight_strides,
)
from flux_inductor.runtime.cuda_prepare import Prepared, prepare_gather, prepare_scatter
from flux_inductor.runtime.groups import state_of
from flux_inductor.runtime.torch_private import current_cuda_device, empty_strided_cuda

Make: TypeAlias = Callable[[], Tensor]


def _maker(shape: Sequence[int], dtype: torch.dtype) -> Make:
    """What makes a contiguous tensor on the current device, at each call."""
    sizes = [max(size, 1) for size in shape]  # as torch.empty has it, also without elements
    strides = tuple(math.prod(sizes[dim + 1 :]) for dim in range(len(sizes)))
    return partial(empty_strided_cuda, tuple(shape), strides, dtype)


@dataclass(frozen=True, slots=True)
class _Gather:
    """all_gather_matmul, bound.

    Args:
        x_fits, weights_fit: whether strides are such that the kernels read the tensor in place.
        in_place: whether all operands are read in place, as far as strides and addresses tell.
        biased: whether there are any biases.
        results: makes the products, then the gathered tensor if it is kept.
    """

    state: CudaGroup
    prepared: Prepared
    x_fits: bool
    weights_fit: tuple[bool, ...]
    in_place: bool
    biased: bool
    results: tuple[Make, ...]

    def __call__(self, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[Tensor]:
        state = self.state
        state.check()
        if current_cuda_device() != state.device_index:
            with torch.cuda.device(state.device):
                return self(x, weights, biases)
        results = [make() for make in self.results]
        if not self.in_place or (self.biased and negated(biases)):
            x = readable(x, self.x_fits)
            weights = [readable(*pair) for pair in zip(weights, self.weights_fit, strict=True)]
            biases = [readable_term(bias) for bias in biases]
        state.run(self.prepared, "all_gather_matmul", x, weights, biases, results)
        return results


@dataclass(frozen=True, slots=True)
class _Scatter:
    """matmul_reduce_scatter, bound.

    Args:
        partials: makes room for the peers' parts on their way out, if the copy engine moves them.
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
    factor: float

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, addend: Tensor | None) -> Tensor:
        state = self.state
        state.check()
        if current_cuda_device() != state.device_index:
            with torch.cuda.device(state.device):
                return self(x, weight, bias, addend)
        result = self.result()
        # Free again for what this stream does next: the copies that read it are joined before.
        partials = None if self.partials is None else self.partials()
        if self.factor != 1.0:
            bias, addend = (None if term is None else term * self.factor for term in (bias, addend))
        if not self.in_place:
            x, weight = readable(x, self.x_fits), readable(weight, self.weight_fits)
            bias, addend = readable_term(bias), readable_term(addend)
        state.run(self.prepared, "matmul_reduce_scatter", x, weight, bias, addend, partials, result)
        return result


def _check_reserve(plan: Plan, device: torch.device) -> None:
    if not plan.reserve:
        return
    whole = torch.cuda.get_device_properties(device).multi_processor_count
    if plan.reserve > whole // 2:
        raise ValueError(
            f"plan '{plan}' leaves {plan.reserve} of {whole} multiprocessors to others; reserve at most "
            f"{whole // 2}"
        )


def _check_launches(plan: Plan) -> None:
    """Ranks whose launches return only when the kernel ends queue no copies for each other meanwhile."""
    if plan.direction == "push" and os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
        raise ValueError(
            f"CUDA_LAUNCH_BLOCKING is set: with plan '{plan}' every rank's matmul_reduce_scatter would wait "
            "for copies that the others queue only behind it. Unset it, pass a plan whose kernel stores "
            "('mesh store ...'), or run unfused: FLUX_INDUCTOR_ENGINE=reference"
        )


class CudaEngine:
    """See `engine.Engine`. The ranks of a group are GPUs that can address each other's memory."""

    name = "cuda"

    def bind_gather(
        self,
        x: Tensor,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        group: str,
        plan: Plan,
        gather_dim: int,
        return_gathered: bool,
    ) -> GatherRun:
        state = state_of(group, CudaGroup)
        state.check_device(x.device)
        _check_reserve(plan, x.device)
        whole = (*x.shape[:gather_dim], x.shape[gather_dim] * state.world, *x.shape[gather_dim + 1 :])
        shapes = [(*whole[:-1], weight.shape[1]) for weight in weights]
        if return_gathered:
            shapes.append(whole)
        if 0 in x.shape[:-1]:  # no rows, on all ranks alike: nothing to send
            return lambda x, weights, biases: [x.new_empty(shape) for shape in shapes]
        fits, layouts, leading = zip(*map(weight_strides, weights), strict=True)
        sizes = tuple(zip((weight.shape[1] for weight in weights), layouts, leading, strict=True))
        prepared = prepare_gather(
            state.world, state.rank, x.shape, x.dtype, sizes, plan, gather_dim, return_gathered
        )
        x_fits = x.is_contiguous()
        operands = (x, *weights, *biases)
        placed = all(map(in_place, operands, (x_fits, *fits, *map(term_fits, biases))))
        biased = any(bias is not None for bias in biases)
        results = tuple(_maker(shape, x.dtype) for shape in shapes)
        return _Gather(state, prepared, x_fits, fits, placed, biased, results)

    def bind_scatter(
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
    ) -> ScatterRun:
        state = state_of(group, CudaGroup)
        state.check_device(x.device)
        _check_reserve(plan, x.device)
        _check_launches(plan)
        shape = [*x.shape[:-1], weight.shape[1]]
        shape[scatter_dim] //= state.world
        if 0 in shape:  # on all ranks alike
            return lambda x, weight, bias, addend: x.new_empty(shape)
        factor = 1 / state.world if reduce_op == "avg" else 1.0
        x_fits, stride = row_stride(x)
        weight_fits, layout, leading = weight_strides(weight)
        prepared = prepare_scatter(
            state.world,
            state.rank,
            x.shape,
            x.dtype,
            stride,
            (weight.shape[1], layout, leading),
            plan,
            scatter_dim,
            reduce_op,
            scale * factor,
            addend is not None,
        )
        result = _maker(shape, x.dtype)
        partials = _maker([prepared.partials], x.dtype) if prepared.partials else None
        fits = (x_fits, weight_fits, term_fits(bias), term_fits(addend))
        placed = all(map(in_place, (x, weight, bias, addend), fits))
        return _Scatter(state, prepared, x_fits, weight_fits, placed, result, partials, factor)
