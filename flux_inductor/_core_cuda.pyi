"""`_core.cuda`: the CUDA engine (csrc/cuda/host). Addresses and streams are integers, sizes are bytes."""

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from flux_inductor import _core_cuda_testing as testing
from flux_inductor.planning.problem import Layout

__all__ = ["testing"]  # beside what follows

ERROR_RECORD_BYTES: int
# What an error record names instead of a chunk, see csrc/cuda/sync.
MEETING_CHUNK: int
OWN_COPIES_CHUNK: int
UNLIKE_CHUNK: int

class AllGatherMatmulKernel:
    @property
    def tile(self) -> str: ...
    @property
    def element(self) -> str: ...
    @property
    def result(self) -> str: ...
    @property
    def layout(self) -> Layout: ...
    def prepare(self) -> int:
        """Loads the kernel on the current device; returns the clusters that it holds at once."""

class MatmulReduceScatterKernel:
    @property
    def tile(self) -> str: ...
    @property
    def element(self) -> str: ...
    @property
    def result(self) -> str: ...
    @property
    def layout(self) -> Layout: ...
    def prepare(self) -> int: ...

def all_gather_matmul_kernels() -> list[AllGatherMatmulKernel]: ...
def matmul_reduce_scatter_kernels() -> list[MatmulReduceScatterKernel]: ...
def prepare_call_entry() -> None:
    """Loads the kernel of the device barrier."""

class GatherShape:
    """See csrc/cuda/all_gather/all_gather_matmul.h; strides in elements."""

    def __init__(
        self,
        *,
        world: int,
        rank: int,
        strips: int,
        rows: int,
        n: int,
        k: int,
        own_row_stride: int,
        own_strip_stride: int,
        weight_stride: int,
        rows_per_chunk: int,
        last_rows: int,
        slices: int,
        group: int,
        sms: int,
    ) -> None: ...

class ScatterShape:
    """See csrc/cuda/reduce_scatter/matmul_reduce_scatter.h; strides in elements."""

    def __init__(
        self,
        *,
        world: int,
        rank: int,
        strips: int,
        rows: int,
        n: int,
        k: int,
        x_row_stride: int,
        weight_stride: int,
        scale: float,
        group: int,
        chunk_columns: int,
        sms: int,
    ) -> None: ...

class GatherCall:
    """all_gather_matmul, bound to its shapes: a kernel and a shape for each weight."""

    def __init__(self, kernels: Sequence[AllGatherMatmulKernel], shapes: Sequence[GatherShape]) -> None: ...
    @property
    def signals_per_shard(self) -> int: ...

class ScatterCall:
    """matmul_reduce_scatter, bound to its shapes.

    Args:
        stores: the kernel's stores are the transport; else the copy engine is.
        device: the index of the one that it will run on, on which the kernel was prepared.
    """

    def __init__(
        self, kernel: MatmulReduceScatterKernel, shape: ScatterShape, stores: bool, device: int
    ) -> None: ...
    @property
    def chunks_per_part(self) -> int: ...

class Workspace:
    """What one rank has of a group's symmetric memory (csrc/cuda/host/workspace.h).

    Its calls run on the current stream, on dense and aligned tensors. They return 0 if the group has failed,
    1 for an eager call, 2 for a captured one.
    """

    def __init__(
        self,
        world: int,
        rank: int,
        device: int,
        slots: Sequence[int],
        slot_bytes: int,
        signals: Sequence[int],
        signals_per_set: int,
        own_words: int,
        counters: int,
        errors: int,
        wait_limit_ns: int,
    ) -> None: ...
    @property
    def captured(self) -> bool:
        """Whether calls in it belong to a graph: then it must live as long as the graph may."""

    def all_gather_matmul(
        self,
        call: GatherCall,
        x: Tensor,
        weights: list[Tensor],
        biases: list[Tensor | None],
        results: list[Tensor],
    ) -> Literal[0, 1, 2]:
        """`results` are the products, then the gathered tensor if it is kept."""

    def matmul_reduce_scatter(
        self,
        call: ScatterCall,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        addend: Tensor | None,
        partials: Tensor | None,
        result: Tensor,
    ) -> Literal[0, 1, 2]: ...

def symmetric_signals(signals: int) -> int:
    """Signals of 8 bytes in the symmetric memory of a rank, with `signals` in a set."""

def own_words(counters: int) -> int:
    """32-bit words of a rank's own memory, with `counters` in a set."""

def read_error(record: int) -> tuple[int, int, int, int, int] | None:
    """Op, source, chunk, expected and seen epoch; None while there is no error."""

def end_waits(record: int) -> None:
    """Makes all waits of the group end, with no reason of their own."""

def any_capturing(streams: Sequence[int]) -> bool: ...
def allow_beside_captures() -> None:
    """What this thread does from now on breaks no capture of another thread's."""
