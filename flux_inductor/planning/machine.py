"""What the cost model knows about a machine: named quantities, each with unit, value and origin.

A measurement replaces a default with `dataclasses.replace(CPU, link=Quantity(9.1, "GB/s", "calibrate"))`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


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
        return listed(self)


def listed(model: DataclassInstance) -> str:
    """Every quantity of a model on a line of its own."""
    rows = ((f.name, getattr(model, f.name)) for f in fields(model))
    return "\n".join(f"{name:<21}{q.value:>9g} {q.unit:<8}{q.source}" for name, q in rows)


_ONE_CORE = "two gloo ranks on a two-core x86 server, one thread each"
H200 = "two H200 GPUs, NVLink, NCCL 2.28, cuBLAS 13.0"

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
    bf16=Quantity(790, "TFLOP/s", f"cuBLAS, M = 8192, {H200}"),
    fp16=Quantity(790, "TFLOP/s", f"as bf16, {H200}"),
    fp32=Quantity(45, "TFLOP/s", "CUDA cores of a H200, 67 at its best"),
    memory=Quantity(3500, "GB/s", f"cuBLAS, M = 64, {H200}"),
    call=Quantity(5, "us", f"cuBLAS, M = 64, {H200}"),
    repack=Quantity(0, "us/MB", "weights stay in the L2 cache"),
    all_gather=Quantity(20, "us", f"0.5 MB, {H200}"),
    reduce_scatter=Quantity(20, "us", f"0.5 MB, {H200}"),
    hop=Quantity(3, "us", "estimate for more than two ranks"),
    gather=Quantity(240, "GB/s", f"all_gather of 12 to 100 MB, {H200}"),
    reduce=Quantity(220, "GB/s", f"reduce_scatter of 12 to 100 MB, {H200}"),
    entry=Quantity(40, "us", f"all_gather + matmul, M = 64, {H200}"),
    step=Quantity(0, "us", "one persistent kernel"),
    calls=Quantity(0, "", "one persistent kernel"),
    kernel=Quantity(0.97, "", f"prototype kernels, {H200}"),
    transfer=Quantity(10, "us", f"copy engine and 4-byte signal copy, {H200}"),
    push=Quantity(385, "GB/s", f"copy engine, {H200}"),
    pull=Quantity(365, "GB/s", f"copy engine, {H200}"),
    copy=Quantity(1600, "GB/s", "device-to-device copy, reads and writes"),
    interference=Quantity(0.03, "", f"a large GEMM beside a 128 MB copy: 0 to 7 %, {H200}"),
    margin=Quantity(0.03, "", "noise of a benchmark"),
    least_gain=Quantity(15, "us", f"error of the unfused prediction, M = 64, {H200}"),
    granule=Quantity(128, "rows", "rows of a common tile"),
)
