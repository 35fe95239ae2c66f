"""The sm_90 kernels as data: speeds and fixed costs, each with unit, value and origin."""

from __future__ import annotations

from dataclasses import dataclass

from flux_inductor.planning.machine import H200, Quantity, listed


@dataclass(frozen=True)
class KernelModel:
    """Speeds and fixed costs of the persistent CUDA kernels, for the timeline.

    A tile
        rate: of one SM, TFLOP/s; traffic: its loss by loads, per (1/m + 1/n) of a tile.
        last: a last round of which a share f is filled takes f ** last of a round: idle SMs
            leave their power to the others, but the deepest tile still has its depth.
        lockstep: share of a round that a reduce_scatter loses where all tiles for peers fit into one, and
            leave by copies.
        handover: between the two warpgroups of a pingpong tile, us.
        sweep: loss by operands that a narrow sweep reads more often, see fit.sweep_loss.
        epilogue: from the product of a tile of a reduce_scatter to the next one's start, us.
        addition: from a peer's partials to the stored sum, us.
        partial: what each further peer's add to it, us.
    A call
        launch: from the stream's turn to the first tile's first product, and the last tile's way out, us.
        fork: of a copy stream, us.
        host: what the calling thread needs, us: no op of a program without graphs is faster.
        copy: its further time for a copy and its signal, us.
    The copy engine
        chunk, block: fixed cost of a chunk of an all_gather, of a 2-D block of a reduce_scatter, us.
        notice: from the end of a block's last tile to its turn, us.
        copies, blocks: rate of their bytes, GB/s.
        gather_interference, scatter_interference: see MachineModel.
    Stores of the kernel
        stores: rate to a peer, GB/s.
        stall: share of the stores' time that products beside them lose, after the first round.
        kept: rate of the stores of a gathered tensor that is kept, GB/s.
        keeping: a piece's way from the gathered tensor to the kept one, us. Small buffers have few under way.
        kept_interference: what products lose beside them, see MachineModel.
    Other communication
        reserve: SMs left to it, where there is any: a GEMM that fills the device holds them to
            its end, and kernels of NCCL that start meanwhile would wait (rule R2).
    """

    rate: Quantity
    traffic: Quantity
    last: Quantity
    lockstep: Quantity
    handover: Quantity
    sweep: Quantity
    epilogue: Quantity
    addition: Quantity
    partial: Quantity
    launch: Quantity
    fork: Quantity
    host: Quantity
    copy: Quantity
    chunk: Quantity
    block: Quantity
    notice: Quantity
    copies: Quantity
    blocks: Quantity
    gather_interference: Quantity
    scatter_interference: Quantity
    stores: Quantity
    stall: Quantity
    kept: Quantity
    keeping: Quantity
    kept_interference: Quantity
    reserve: Quantity

    def __str__(self) -> str:
        return listed(self)


_ALONE = f"fitted to the kernels alone, {H200}"
_FUSED = f"fitted to the fused kernels, {H200}"
_KERNELS = f"fitted to many plans of a shape, plans.json, {H200}"
_ENGINE = f"fitted to whole calls of two processes, plans.json, {H200}"
_ESTIMATE = "estimate, to be measured"

KERNEL = KernelModel(
    rate=Quantity(7.08, "TFLOP/s", _ALONE),
    traffic=Quantity(13.1, "", _ALONE),
    last=Quantity(0.1, "", _ALONE),
    lockstep=Quantity(0.065, "", _ENGINE),
    handover=Quantity(0.7, "us", _ENGINE),
    sweep=Quantity(0.02, "", _KERNELS),
    epilogue=Quantity(0.39, "us", _ENGINE),
    addition=Quantity(1.7, "us", _ENGINE),
    partial=Quantity(2.2, "us", "estimate, to be measured: 64 KB at a share of the memory's rate"),
    launch=Quantity(8.3, "us", _ALONE),
    fork=Quantity(1.2, "us", _FUSED),
    host=Quantity(26, "us", "a gather of one chunk by name, 30 us with its copy; torch.mm there: 17 us"),
    copy=Quantity(4.2, "us", "two asynchronous copies, host of two H200"),
    chunk=Quantity(5, "us", _ENGINE),
    block=Quantity(5, "us", _ENGINE),
    notice=Quantity(15, "us", _ENGINE),
    copies=Quantity(350, "GB/s", _ENGINE),
    blocks=Quantity(347, "GB/s", _ENGINE),
    gather_interference=Quantity(0.07, "", _ENGINE),
    scatter_interference=Quantity(0.117, "", _ENGINE),
    stores=Quantity(414, "GB/s", _ENGINE),
    stall=Quantity(0.093, "", _ENGINE),
    kept=Quantity(600, "GB/s", _ESTIMATE),
    keeping=Quantity(0.97, "us", "256x160 tiles keeping 134 MB in 550 us, one H200"),
    kept_interference=Quantity(0.06, "", _ENGINE),
    reserve=Quantity(8, "", _ESTIMATE),
)
