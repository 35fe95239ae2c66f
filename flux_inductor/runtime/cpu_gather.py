"""One all_gather_matmul on the CPU: chunks of the peers' shards arrive while the own one is multiplied."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from flux_inductor.planning.ops.all_gather_matmul import ALL_GATHER_MATMUL, GatherCall
from flux_inductor.planning.plan import Plan
from flux_inductor.runtime import trace
from flux_inductor.runtime.cpu_call import Call
from flux_inductor.runtime.cpu_group import CpuGroup
from flux_inductor.runtime.cpu_layout import Layout, Strides, gather_layout
from flux_inductor.runtime.multiply import multiply, multiply_strips, with_blas_strides


def gather(
    state: CpuGroup,
    call: GatherCall,
    plan: Plan,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
) -> list[Tensor]:
    """The op by a fused plan."""
    strips, rows = math.prod(x.shape[: call.dim]), math.prod(x.shape[call.dim : -1])
    results = [x.new_empty(shape) for shape in call.results]
    stacked = [result.view(strips, state.world * rows, result.shape[-1]) for result in results]
    one = _Gather(
        state,
        shard=x.reshape(strips, rows, x.shape[-1]),
        whole=stacked.pop() if call.return_gathered else None,
        weights=[with_blas_strides(weight) for weight in weights],
        biases=list(biases) or [None] * len(weights),
        products=stacked,
    )
    if x.numel() == 0:  # the same on all ranks: nobody has anything to send
        one.multiply_nothing()
    else:
        # Not what only this rank sees: columns of its weights, whether it keeps the gathered tensor.
        moves = f"{x.dtype} [{strips}, {rows}, {x.shape[-1]}]"
        one.run(plan, f"{call.op.name} of {moves}, {plan}")
    return results


@dataclass
class _Gather:
    """The tensors of one call.

    Args:
        shard: this rank's [strips, rows, K], any strides.
        whole: where the gathered tensor goes, [strips, world * rows, K], if it is wanted.
        weights: [K, N_i] each.
        products: where they go, [strips, world * rows, N_i] each.
    """

    state: CpuGroup
    shard: Tensor
    whole: Tensor | None
    weights: list[Tensor]
    biases: list[Tensor | None]
    products: list[Tensor]

    def __post_init__(self) -> None:
        self.shard = _movable(self.shard)
        self.strips, self.rows, self.depth = self.shard.shape

    def run(self, plan: Plan, descriptor: str) -> None:
        state, push = self.state, plan.direction == "push"
        strides = Strides(
            self.shard.stride(0) if self.strips > 1 else 0,
            self.shard.stride(1) if self.rows > 1 else self.depth,
        )
        layout = gather_layout(
            state.world,
            state.rank,
            self.strips,
            self.rows,
            self.depth,
            self.shard.dtype.itemsize,
            plan,
            strides,
            self.whole is not None and not push,
        )
        shards = state.world - 1 if push else 1
        need = shards * layout.size * self.shard.dtype.itemsize
        pulled = 0 if push or self.whole is not None else (state.world - 1) * layout.size
        scratch = pulled * self.shard.dtype.itemsize
        with state.call(ALL_GATHER_MATMUL.name, descriptor, layout.signals.count, need, scratch) as call:
            if push:
                arrivals = state.buffer(self.shard.dtype)
                call.start(layout.transfers, self.shard)
            elif self.whole is not None:
                arrivals = self.whole
                call.start(layout.transfers, arrivals)
                self._offer(call, layout)
            else:
                arrivals = state.scratch(self.shard.dtype, pulled)
                call.start(layout.transfers, arrivals)
                self._offer(call, layout)
            self._multiply_own()
            self._multiply_peers(call, layout, arrivals, push)
            if self.whole is not None:
                self._rows_of(self.whole, state.rank, 0, self.rows).copy_(self.shard)

    def multiply_nothing(self) -> None:
        """No rows, or no depth: products are empty, or biases alone."""
        for weight, bias, product in zip(self.weights, self.biases, self.products, strict=True):
            flat = product.view(-1, product.shape[-1])
            multiply(flat.new_empty(flat.shape[0], self.depth), weight, bias, 1.0, flat)

    def _offer(self, call: Call, layout: Layout) -> None:
        """Copies the shard, chunk by chunk, to where peers can pull it from: they may do so after this op
        has returned, and the caller then reuses the input."""
        buffer = self.state.buffer(self.shard.dtype)
        for chunk in layout.own:
            block = self._packed(buffer, chunk.start * self.strips * self.depth, chunk.stop - chunk.start)
            block.copy_(self.shard[:, chunk.start : chunk.stop])
            call.ready(layout.signals.ready(self.state.rank, chunk.index))

    def _multiply_own(self) -> None:
        """The own shard in one piece: it is here from the start, and larger matmuls are faster."""
        rank = self.state.rank
        with trace.span(rank, "multiply", rank, 0):
            self._multiply(self.shard, rank, 0, self.rows)

    def _multiply_peers(self, call: Call, layout: Layout, arrivals: Tensor, push: bool) -> None:
        """Chunk by chunk as they arrive."""
        rank = self.state.rank
        in_place = self.whole is not None and not push
        for chunk in layout.steps:
            owner, index, start, stop = chunk.owner, chunk.index, chunk.start, chunk.stop
            if owner == rank:
                continue
            call.wait(layout.signals.arrived(owner, index), owner, owner, index)
            if in_place:
                block = self._rows_of(arrivals, owner, start, stop)
            else:
                block = self._packed(arrivals, layout.offsets[owner, index], stop - start)
            with trace.span(rank, "multiply", owner, index):
                self._multiply(block, owner, start, stop)
            if self.whole is not None and push:
                self._rows_of(self.whole, owner, start, stop).copy_(block)

    def _multiply(self, block: Tensor, owner: int, start: int, stop: int) -> None:
        for weight, bias, product in zip(self.weights, self.biases, self.products, strict=True):
            multiply_strips(block, weight, bias, 1.0, self._rows_of(product, owner, start, stop))

    def _rows_of(self, tensor: Tensor, owner: int, start: int, stop: int) -> Tensor:
        first = owner * self.rows
        return tensor[:, first + start : first + stop]

    def _packed(self, memory: Tensor, offset: int, rows: int) -> Tensor:
        shape = (self.strips, rows, self.depth)
        return memory.as_strided(shape, (rows * self.depth, self.depth, 1), memory.storage_offset() + offset)


def _movable(shard: Tensor) -> Tensor:
    """The shard itself if one strided copy can move a chunk of it, else a contiguous copy."""
    strips, rows, depth = shard.shape
    unit = shard.stride(2) == 1 or depth == 1
    gapless = shard.stride(1) == depth or rows == 1
    return shard if unit and (gapless or strips == 1) else shard.contiguous()
