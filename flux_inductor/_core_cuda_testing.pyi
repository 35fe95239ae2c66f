"""`_core.cuda.testing`: single launches and copies (csrc/cuda/host/bindings_testing.cpp)."""

from collections.abc import Sequence
from typing import overload

from flux_inductor._core_cuda import AllGatherMatmulKernel, MatmulReduceScatterKernel

class AllGatherMatmul:
    """All parameters of one launch, zero at first; see csrc/cuda/all_gather/all_gather_matmul.h."""

    world: int
    rank: int
    strips: int
    rows: int
    n: int
    k: int
    own_shard: int
    own_row_stride: int
    own_strip_stride: int
    gathered: int
    weight: int
    weight_stride: int
    bias: int
    product: int
    kept: int
    signals: int
    epoch: int
    rows_per_chunk: int
    last_rows: int
    slices: int
    group: int
    sms: int
    wait_limit_ns: int
    errors: int

class MatmulReduceScatter:
    """As above; see csrc/cuda/reduce_scatter/matmul_reduce_scatter.h."""

    world: int
    rank: int
    strips: int
    rows: int
    n: int
    k: int
    x: int
    x_row_stride: int
    weight: int
    weight_stride: int
    bias: int
    addend: int
    scale: float
    parts: list[int]
    partials: list[int]
    delivered: list[int]
    counters: int
    arrived: int
    epoch: int
    claims: int
    group: int
    chunk_columns: int
    sms: int
    wait_limit_ns: int
    errors: int

@overload
def launch(kernel: AllGatherMatmulKernel, problem: AllGatherMatmul, stream: int) -> None: ...
@overload
def launch(kernel: MatmulReduceScatterKernel, problem: MatmulReduceScatter, stream: int) -> None: ...
def signals_per_shard(problem: AllGatherMatmul) -> int: ...
def chunks_per_part(kernel: MatmulReduceScatterKernel, problem: MatmulReduceScatter) -> int: ...
def push_shard(
    problem: AllGatherMatmul, gathered: Sequence[int], signals: Sequence[int], stream: int
) -> None:
    """`gathered` and `signals` by rank."""

def push_partials(
    kernel: MatmulReduceScatterKernel,
    problem: MatmulReduceScatter,
    partials: Sequence[int],
    arrived: Sequence[int],
    stream: int,
) -> None:
    """`partials` and `arrived` by rank: where each takes this rank's."""
