"""all_gather_matmul on CUDA, bound to all that depends on shapes: it makes results and passes on tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flux_inductor.dtypes import DTYPES
from flux_inductor.planning.ops.all_gather_matmul import ALL_GATHER_MATMUL, GatherCall
from flux_inductor.planning.plan import Plan
from flux_inductor.runtime.bound import Run
from flux_inductor.runtime.cuda_group import CudaGroup
from flux_inductor.runtime.cuda_operands import (
    in_place,
    negated,
    readable,
    readable_term,
    term_fits,
    weight_strides,
)
from flux_inductor.runtime.cuda_prepare import Preparation, Prepared
from flux_inductor.runtime.cuda_results import Make, maker


def bind_gather(
    state: CudaGroup,
    prepare: Preparation,
    call: GatherCall,
    plan: Plan,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
) -> Run:
    """What runs the call on operands like these.

    Raises:
        ValueError: the kernels cannot run it.
    """
    if call.empty:
        return lambda x, weights, biases: [x.new_empty(shape) for shape in call.results]
    fits, layouts, leading = zip(*map(weight_strides, weights), strict=True)
    sizes = tuple(zip((weight.shape[1] for weight in weights), layouts, leading, strict=True))
    prepared = prepare.gather(call, state.seat, sizes, plan)
    x_fits = x.is_contiguous()
    placed = all(map(in_place, (x, *weights, *biases), (x_fits, *fits, *map(term_fits, biases))))
    biased = any(bias is not None for bias in biases)
    results = tuple(maker(state.empty_strided, shape, DTYPES[call.dtype]) for shape in call.results)
    return Gather(state, prepared, x_fits, fits, placed, biased, results)


@dataclass(frozen=True, slots=True)
class Gather:
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
        if state.current_device() != state.device_index:
            with torch.cuda.device(state.device):
                return self(x, weights, biases)
        state.allow(self.prepared)
        try:
            results = [make() for make in self.results]
            if not self.in_place or (self.biased and negated(biases)):
                x = readable(x, self.x_fits)
                weights = [readable(*pair) for pair in zip(weights, self.weights_fit, strict=True)]
                biases = [readable_term(bias) for bias in biases]
        except BaseException as error:  # no memory, say
            state.leave_out(self.prepared, error)
            raise
        state.run(self.prepared, ALL_GATHER_MATMUL.name, x, weights, biases, results)
        return results
