"""What the cost model knows about a machine: named quantities, each with unit, value and origin.

A measurement replaces a default with `dataclasses.replace(CPU, link=Quantity(9.1, "GB/s", "calibrate"))`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from flux_inductor.planning.topology import Device


@dataclass(frozen=True)
class Quantity:
    """A number, its unit, and where it comes from."""

    value: float
    unit: str
    source: str


@dataclass(frozen=True)
class MachineModel:
    """Speeds and fixed costs of one kind of device and link.

    The matmul
        bf16, fp16, fp32: rate of a large matmul, TFLOP/s.
        memory: rate at which a matmul can at best read its weights, GB/s.
        call: fixed cost of one matmul, us.
        repack: what each call pays again for its weights, us/MB.
    The unfused collective
        all_gather, reduce_scatter: fixed cost, us; hop: further cost for each peer, us.
        gather, reduce: bytes received by a rank in an all_gather, sent in a reduce_scatter, GB/s.
    The fused op (on CUDA an outline, for sizes that are not known; timeline.py says more with those that are)
        entry: fixed cost of one call, us.
        step: fixed cost of one chunk's multiplication beside the matmul call, us.
        calls: 1 where a step calls a matmul for each weight, 0 where one kernel does all steps.
        kernel: rate of the fused kernel's multiplication relative to the unfused matmul's.
        transfer: fixed cost of one transfer and its signal, us.
        push, pull: rate of a transfer, GB/s.
        copy: rate of a copy inside one rank's memory, GB/s.
        interference: time that multiplication loses for each unit of time a transfer takes beside it:
            1 when transfers use the cores that multiply, near 0 when an engine of their own does them.
    The decision
        margin: least predicted gain, as a share of the unfused time, for which fusing is chosen.
        least_gain: and in us: of small ops little more is known than that they are small.
        granule: rows (or columns) that a chunk should be a multiple of.
    """

    bf16: Quantity
    fp16: Quantity
    fp32: Quantity
    memory: Quantity
    call: Quantity
    repack: Quantity
    all_gather: Quantity
    reduce_scatter: Quantity
    hop: Quantity
    gather: Quantity
    reduce: Quantity
    entry: Quantity
    step: Quantity
    calls: Quantity
    kernel: Quantity
    transfer: Quantity
    push: Quantity
    pull: Quantity
    copy: Quantity
    interference: Quantity
    margin: Quantity
    least_gain: Quantity
    granule: Quantity

    def __str__(self) -> str:
        return _listed(self)


@dataclass(frozen=True)
class KernelModel:
    """Speeds and fixed costs of the persistent CUDA kernels, for timeline.py.

    A tile
        multiprocessors: of the device.
        rate: of one multiprocessor, TFLOP/s; traffic: its loss by loads, per (1/m + 1/n) of a tile.
        last: a last round of which a share f is filled takes f ** last of a round: idle multiprocessors
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
        reserve: multiprocessors left to it, where there is any: a GEMM that fills the device holds them to
            its end, and kernels of NCCL that start meanwhile would wait (rule R2).
    """

    multiprocessors: Quantity
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
        return _listed(self)


def _listed(model: MachineModel | KernelModel) -> str:
    """Every quantity on a line of its own."""
    rows = ((f.name, getattr(model, f.name)) for f in fields(model))
    return "\n".join(f"{name:<21}{q.value:>9g} {q.unit:<8}{q.source}" for name, q in rows)


_ONE_CORE = "two gloo ranks on a two-core x86 server, one thread each"
_H200 = "two H200 GPUs, NVLink, NCCL 2.28, cuBLAS 13.0"

CPU = MachineModel(
    bf16=Quantity(0.45, "TFLOP/s", f"torch.mm, {_ONE_CORE}"),
    fp16=Quantity(0.02, "TFLOP/s", f"torch.mm, {_ONE_CORE}"),
    fp32=Quantity(0.108, "TFLOP/s", f"torch.mm, {_ONE_CORE}"),
    memory=Quantity(40, "GB/s", f"torch.mm with few rows, {_ONE_CORE}"),
    call=Quantity(5, "us", f"torch.mm of 16 rows, {_ONE_CORE}"),
    repack=Quantity(12, "us/MB", f"torch.mm of 16 and 64 rows, {_ONE_CORE}"),
    all_gather=Quantity(150, "us", f"least seen for 1 KB, {_ONE_CORE}"),
    reduce_scatter=Quantity(220, "us", f"least seen for 1 KB, {_ONE_CORE}"),
    hop=Quantity(50, "us", "two and four gloo ranks on two cores"),
    gather=Quantity(1.0, "GB/s", f"fastest seen for 64 KB to 1 MB into new memory, {_ONE_CORE}"),
    reduce=Quantity(0.8, "GB/s", f"fastest seen for 64 KB to 1 MB, {_ONE_CORE}"),
    entry=Quantity(180, "us", f"cpu engine, 2 KB, beside other load, {_ONE_CORE}"),
    step=Quantity(7, "us", f"cpu engine, shards cut in 1, 2 and 4, {_ONE_CORE}"),
    calls=Quantity(1, "", "one torch.mm a chunk and weight"),
    kernel=Quantity(1.0, "", "the same matmul"),
    transfer=Quantity(10, "us", f"cpu engine, shards cut in 1, 2 and 4, {_ONE_CORE}"),
    push=Quantity(10, "GB/s", "half a cold copy's rate, since both ranks copy at once"),
    pull=Quantity(10, "GB/s", "half a cold copy's rate, since both ranks copy at once"),
    copy=Quantity(8, "GB/s", "as push, and it adds or strides"),
    interference=Quantity(1.0, "", "no core is free for the transfer thread"),
    margin=Quantity(0.07, "", "leaves alone what a loaded machine was seen to run slower"),
    least_gain=Quantity(0, "us", "the margin says it all"),
    granule=Quantity(16, "rows", "a matmul of fewer rows runs at half its rate"),
)

CUDA = MachineModel(
    bf16=Quantity(790, "TFLOP/s", f"cuBLAS, M = 8192, {_H200}"),
    fp16=Quantity(790, "TFLOP/s", f"as bf16, {_H200}"),
    fp32=Quantity(45, "TFLOP/s", "CUDA cores of a H200, 67 at its best"),
    memory=Quantity(3500, "GB/s", f"cuBLAS, M = 64, {_H200}"),
    call=Quantity(5, "us", f"cuBLAS, M = 64, {_H200}"),
    repack=Quantity(0, "us/MB", "weights stay in the L2 cache"),
    all_gather=Quantity(20, "us", f"0.5 MB, {_H200}"),
    reduce_scatter=Quantity(20, "us", f"0.5 MB, {_H200}"),
    hop=Quantity(3, "us", "estimate for more than two ranks"),
    gather=Quantity(240, "GB/s", f"all_gather of 12 to 100 MB, {_H200}"),
    reduce=Quantity(220, "GB/s", f"reduce_scatter of 12 to 100 MB, {_H200}"),
    entry=Quantity(40, "us", f"all_gather + matmul, M = 64, {_H200}"),
    step=Quantity(0, "us", "one persistent kernel"),
    calls=Quantity(0, "", "one persistent kernel"),
    kernel=Quantity(0.97, "", f"prototype kernels, {_H200}"),
    transfer=Quantity(10, "us", f"copy engine and 4-byte signal copy, {_H200}"),
    push=Quantity(385, "GB/s", f"copy engine, {_H200}"),
    pull=Quantity(365, "GB/s", f"copy engine, {_H200}"),
    copy=Quantity(1600, "GB/s", "device-to-device copy, reads and writes"),
    interference=Quantity(0.03, "", f"a large GEMM beside a 128 MB copy: 0 to 7 %, {_H200}"),
    margin=Quantity(0.03, "", "noise of a benchmark"),
    least_gain=Quantity(15, "us", f"error of the unfused prediction, M = 64, {_H200}"),
    granule=Quantity(128, "rows", "rows of a common tile"),
)

_ALONE = f"fitted to the kernels alone, {_H200}"
_FUSED = f"fitted to the fused kernels, {_H200}"
_KERNELS = f"fitted to many plans of a shape, plans.json, {_H200}"
_ENGINE = f"fitted to whole calls of two processes, plans.json, {_H200}"
_ESTIMATE = "estimate, to be measured"

KERNEL = KernelModel(
    multiprocessors=Quantity(132, "", "H100, H200"),
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

MACHINES: dict[Device, MachineModel] = {"cpu": CPU, "cuda": CUDA}
