"""The CPU engine: ranks of one host share memory; a thread moves chunks while the caller multiplies them.

Both ops follow the schedule of planning/schedule.py. The rules that make the exchange safe are in
docs/protocol.md, their proofs beside the code in csrc/cpu.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from flux_inductor import _core
from flux_inductor.planning.plan import Plan
from flux_inductor.runtime import trace
from flux_inductor.runtime.cpu_group import Call, CpuGroup
from flux_inductor.runtime.cpu_layout import Layout, Strides, gather_layout, scatter_layout
from flux_inductor.runtime.groups import state_of
from flux_inductor.runtime.multiply import multiply, multiply_strips, with_blas_strides

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


class CpuEngine:
    """See `engine.Engine`. All ranks of a group must be on one host."""

    name = "cpu"

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
        strips, rows = math.prod(x.shape[:gather_dim]), math.prod(x.shape[gather_dim:-1])
        shape = [*x.shape[:gather_dim], x.shape[gather_dim] * state.world, *x.shape[gather_dim + 1 :]]
        products = [x.new_empty([*shape[:-1], weight.shape[1]]) for weight in weights]
        gathered = x.new_empty(shape) if return_gathered else None
        gather = _Gather(
            state,
            shard=_movable(x.reshape(strips, rows, x.shape[-1])),
            whole=None if gathered is None else gathered.view(strips, state.world * rows, x.shape[-1]),
            weights=[with_blas_strides(weight) for weight in weights],
            biases=list(biases) or [None] * len(weights),
            products=[product.view(strips, state.world * rows, product.shape[-1]) for product in products],
        )
        if gather.shard.numel() == 0:  # the same on all ranks: nobody has anything to send
            gather.multiply_nothing()
        else:
            descriptor = f"all_gather_matmul of {DTYPES[x.dtype]} {list(x.shape)} along {gather_dim}, {plan}"
            gather.run(plan, descriptor)
        return products if gathered is None else [*products, gathered]

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
        state = state_of(group, CpuGroup)
        world = state.world
        shape = [*x.shape[:-1], weight.shape[1]]
        result = x.new_empty([*shape[:scatter_dim], shape[scatter_dim] // world, *shape[scatter_dim + 1 :]])
        if result.numel() == 0:  # the same on all ranks
            return result
        columns = scatter_dim == x.dim() - 1
        strips = 1 if columns else math.prod(shape[:scatter_dim])
        rows = math.prod(shape[:-1]) // strips
        scatter = _Scatter(
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
        descriptor = (
            f"matmul_reduce_scatter ({reduce_op}) of {DTYPES[x.dtype]} {shape} along {scatter_dim}, {plan}"
        )
        scatter.run(plan, descriptor)
        return result


def _movable(shard: Tensor) -> Tensor:
    """The shard itself if one strided copy can move a chunk of it, else a contiguous copy."""
    strips, rows, depth = shard.shape
    unit = shard.stride(2) == 1 or depth == 1
    gapless = shard.stride(1) == depth or rows == 1
    return shard if unit and (gapless or strips == 1) else shard.contiguous()


class _Gather:
    """One all_gather_matmul; tensors as [strips, rows, K] and [strips, world * rows, N]."""

    def __init__(
        self,
        state: CpuGroup,
        shard: Tensor,
        whole: Tensor | None,
        weights: list[Tensor],
        biases: list[Tensor | None],
        products: list[Tensor],
    ) -> None:
        self.state = state
        self.shard = shard
        self.whole = whole
        self.weights = weights
        self.biases = biases
        self.products = products
        self.strips, self.rows, self.depth = shard.shape

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
        with state.call("all_gather_matmul", descriptor, layout.signals.count, need) as call:
            if push:
                arrivals = state.buffer(self.shard.dtype)
                call.start(layout.transfers, self.shard)
            elif self.whole is not None:
                arrivals = self.whole
                call.start(layout.transfers, arrivals)
                self._offer(call, layout)
            else:
                arrivals = state.scratch(self.shard.dtype, (state.world - 1) * layout.size)
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


class _Scatter:
    """One matmul_reduce_scatter; x as [strips, world * rows, K], or [1, all rows, K] to scatter columns."""

    def __init__(
        self,
        state: CpuGroup,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        addend: Tensor | None,
        result: Tensor,
        columns: bool,
        scale: float,
        factor: float,
    ) -> None:
        self.state = state
        self.x = x
        self.weight = weight
        self.bias = bias
        self.addend = addend
        self.result = result
        self.columns = columns
        self.scale = scale
        self.factor = factor
        self.strips = x.shape[0]
        if columns:
            self.extent, self.across = weight.shape[1] // state.world, x.shape[1]
        else:
            self.extent, self.across = x.shape[1] // state.world, x.shape[0] * weight.shape[1]

    def run(self, plan: Plan, descriptor: str) -> None:
        state, dtype, push = self.state, self.x.dtype, plan.direction == "push"
        layout = scatter_layout(state.world, state.rank, self.extent, self.across, dtype.itemsize, plan)
        peers = (state.world - 1) * layout.size
        need = peers * dtype.itemsize
        with state.call("matmul_reduce_scatter", descriptor, layout.signals.count, need) as call:
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
        _core.sum(DTYPES[self.result.dtype], address, pitch, partials, count, width, self.factor)

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
