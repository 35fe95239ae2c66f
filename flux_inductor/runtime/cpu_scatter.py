"""One matmul_reduce_scatter on the CPU: partial products of the peers' parts travel while others are made."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from flux_inductor import _core
from flux_inductor.dtypes import DTYPE_NAMES, DTYPES
from flux_inductor.planning.ops.matmul_reduce_scatter import MATMUL_REDUCE_SCATTER, ScatterCall
from flux_inductor.planning.plan import Plan
from flux_inductor.runtime import trace
from flux_inductor.runtime.cpu_call import Call
from flux_inductor.runtime.cpu_group import CpuGroup
from flux_inductor.runtime.cpu_layout import Layout, scatter_layout
from flux_inductor.runtime.multiply import multiply_strips, with_blas_strides


def scatter(
    state: CpuGroup,
    call: ScatterCall,
    plan: Plan,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    addend: Tensor | None,
) -> Tensor:
    """The op by a fused plan."""
    result = x.new_empty(call.results[0], dtype=DTYPES[call.out_dtype])
    if call.empty:
        return result
    strips = 1 if call.by_columns else math.prod(x.shape[: call.dim])
    rows = math.prod(x.shape[:-1]) // strips
    one = _Scatter(
        state,
        x=x.reshape(strips, rows, x.shape[-1]),
        weight=with_blas_strides(weight),
        bias=bias,
        addend=None if addend is None else addend.reshape(strips, rows, weight.shape[1]),
        result=result,
        columns=call.by_columns,
        scale=call.scale,
        factor=call.factor,
    )
    # Not K, which only this rank sees.
    dtypes = x.dtype if result.dtype == x.dtype else f"{x.dtype} as {result.dtype}"
    moves = f"{dtypes} [{strips}, {rows}, {weight.shape[1]}]{' by columns' if call.by_columns else ''}"
    one.run(plan, f"{call.op.name} ({call.reduce_op}) of {moves}, {plan}")
    return result


@dataclass
class _Scatter:
    """The tensors of one call.

    Args:
        x: [strips, world * rows, K], or [1, all rows, K] if the product is scattered along its columns.
        weight: [K, N].
        addend: of the product's shape, with x's strips and rows.
        result: where this rank's part goes; contiguous. Partials have its dtype.
        scale: of the product. factor: of the sum over the ranks.
    """

    state: CpuGroup
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    addend: Tensor | None
    result: Tensor
    columns: bool
    scale: float
    factor: float

    def __post_init__(self) -> None:
        self.strips, rows, _ = self.x.shape
        columns, world = self.weight.shape[1], self.state.world
        if self.columns:
            self.extent, self.across = columns // world, rows
        else:
            self.extent, self.across = rows // world, self.strips * columns

    def run(self, plan: Plan, descriptor: str) -> None:
        state, dtype, push = self.state, self.result.dtype, plan.direction == "push"
        layout = scatter_layout(state.world, state.rank, self.extent, self.across, dtype.itemsize, plan)
        peers = (state.world - 1) * layout.size
        need = peers * dtype.itemsize
        with state.call(MATMUL_REDUCE_SCATTER.name, descriptor, layout.signals.count, need, need) as call:
            scratch, buffer = state.scratch(dtype, peers), state.buffer(dtype)
            outgoing, incoming = (scratch, buffer) if push else (buffer, scratch)
            call.start(layout.transfers, scratch)
            self._multiply_peers(call, layout, outgoing)
            self._multiply_own()
            self._add_peers(call, layout, incoming)

    def _multiply_peers(self, call: Call, layout: Layout, outgoing: Tensor) -> None:
        """Partial products of the peers' parts, which travel while later ones are computed."""
        rank = self.state.rank
        for chunk in layout.steps:
            owner, index = chunk.owner, chunk.index
            if owner == rank:
                continue
            with trace.span(rank, "multiply", owner, index):
                self._multiply(owner, chunk.start, chunk.stop, outgoing[layout.offsets[owner, index] :])
            call.ready(layout.signals.ready(owner, index))

    def _multiply_own(self) -> None:
        """The own part in one piece, straight into the result."""
        rank = self.state.rank
        with trace.span(rank, "multiply", rank, 0):
            self._multiply(rank, 0, self.extent, self.result)

    def _add_peers(self, call: Call, layout: Layout, incoming: Tensor) -> None:
        """Adds the peers' partial products to the own ones, in the order of the ranks."""
        rank, world, itemsize = self.state.rank, self.state.world, incoming.dtype.itemsize
        for chunk in layout.own:
            partials = [0] * world  # 0 stands for the own one
            for step in range(1, world):
                peer = (rank - step) % world
                call.wait(layout.signals.arrived(peer, chunk.index), peer, rank, chunk.index)
                partials[peer] = incoming.data_ptr() + layout.offsets[peer, chunk.index] * itemsize
            self._sum(partials, chunk.start, chunk.stop)

    def _sum(self, partials: list[int], start: int, stop: int) -> None:
        if self.columns:
            count, width, pitch, offset = self.across, stop - start, self.extent, start
        else:
            row = self.weight.shape[1]
            count, width, pitch, offset = self.strips, (stop - start) * row, self.extent * row, start * row
        address = self.result.data_ptr() + offset * self.result.dtype.itemsize
        _core.sum(DTYPE_NAMES[self.result.dtype], address, pitch, partials, count, width, self.factor)

    def _multiply(self, owner: int, start: int, stop: int, memory: Tensor) -> None:
        """scale * (x @ weight) + bias + addend of a chunk, into the front of `memory` without gaps."""
        start, stop = owner * self.extent + start, owner * self.extent + stop
        x, weight, bias, addend = self.x, self.weight, self.bias, self.addend
        if self.columns:
            weight = weight[:, start:stop]
            bias = None if bias is None else bias[start:stop]
            addend = None if addend is None else addend[:, :, start:stop]
        else:
            x = x[:, start:stop]
            addend = None if addend is None else addend[:, start:stop]
        strips, rows, columns = x.shape[0], x.shape[1], weight.shape[1]
        block = memory.as_strided((strips, rows, columns), (rows * columns, columns, 1))
        multiply_strips(x, weight, bias, self.scale, block)
        if addend is not None:
            block.add_(addend)
