"""The compiled core (csrc/bindings.cpp). Addresses are integers; sizes are bytes, unless said otherwise."""

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from flux_inductor import _core_cuda as cuda  # only where it was built with the CUDA kernels
from flux_inductor import _core_sm90 as sm90
from flux_inductor import _core_testing as testing

__all__ = ["cuda", "sm90", "testing"]  # beside what follows

ELEMENT_BYTES: dict[str, int]  # by dtype: bf16, fp16, fp32
ALIGNMENT: int  # of the addresses that `describe` calls aligned
EPOCH_RENEWAL: int

def use_exchange_table(capsule: object) -> None: ...
def describe(*operands: Tensor | Sequence[Tensor | None] | None) -> bytes: ...
def sum(
    dtype: str, result: int, pitch: int, partials: Sequence[int], count: int, width: int, scale: float
) -> None: ...
def clusters_of(tile: tuple[int, int, int, int], strips: int, rows: int, n: int) -> tuple[int, int]:
    """Rows and columns of clusters in a part of strips * rows rows and n columns.

    Args:
        tile: m, n, cluster_m, cluster_n, here and below.
    """

def cut_rows(rows: int, chunk: int, last: int = 0) -> list[tuple[int, int]]:
    """[first, last) of each chunk of a shard: `chunk` rows, then one of `last` (0: as any)."""

class GatherSchedule:
    """The order in which one rank multiplies for all_gather_matmul (csrc/core/gather_schedule.h)."""

    def __init__(
        self,
        world: int,
        rank: int,
        strips: int,
        rows: int,
        n: int,
        k: int,
        tile: tuple[int, int, int, int],
        sweep: int,
        chunk: int,
        last: int = 0,
        slices: int = 1,
    ) -> None: ...
    def chunks(self, source: int) -> list[tuple[int, int, int, int]]:
        """First and last row, slices, and the clusters of its part before the first one that needs it."""

    def clusters(self) -> list[list[tuple[int, int, int, int, list[tuple[int, int, int]]]]]:
        """The tiles of each cluster, in order: part, strip, m, n, waits.

        A wait is the first and the last signal, and the column of K up to which the tile may load then.
        """

    def copies(self) -> list[tuple[int, int, int, int, int, int]]:
        """What the rank sends, in order: peer, first and last row, first and last column of K, signal."""

class ScatterSchedule:
    """The order in which one rank multiplies for matmul_reduce_scatter (csrc/core/scatter_schedule.h).

    `at_once` are the clusters of the kernel, as many as the device holds.
    """

    def __init__(
        self,
        world: int,
        rank: int,
        strips: int,
        rows: int,
        n: int,
        tile: tuple[int, int, int, int],
        sweep: int,
        chunk_columns: int,
        stores: bool = False,
    ) -> None: ...
    def clusters_of_chunks(self) -> list[int]:
        """How many clusters each chunk of a part has."""

    def turns(self, at_once: int) -> tuple[int, int]:
        """The claim with which own tiles begin to take turns with a peer's, and for how many claims."""

    def clusters(self, at_once: int) -> list[list[tuple[int, int, int, int, int]]]:
        """The tiles of the cluster that gets each claim: part, strip, m, n, chunk."""

    def chunks(self) -> list[tuple[int, int, int, int, int, int, int]]:
        """Of the peers' parts, in the order in which they are complete.

        part, index, first and last row of the part seen as [strips * rows, n], first and last column, tiles.
        """

class SignalLayout:
    def __init__(self, world: int, chunks: int) -> None: ...
    def arrived(self, peer: int, chunk: int) -> int: ...
    def ready(self, owner: int, chunk: int) -> int: ...
    @property
    def count(self) -> int: ...

class Buffer:
    def __buffer__(self, flags: int, /) -> memoryview: ...

class Segment:
    @staticmethod
    def create(signals: int, buffer_bytes: int, epoch: int) -> Segment: ...
    @staticmethod
    def open(pid: int, fd: int, token: int) -> Segment: ...
    @property
    def fd(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def token(self) -> int: ...
    def announce_failure(self, why: str) -> None: ...
    def buffer(self, parity: int) -> Buffer: ...

class Outcome:
    @property
    def verdict(self) -> Literal["timeout", "lost", "failed", "mismatch", "cancelled"]: ...
    @property
    def peer(self) -> int: ...
    @property
    def expected(self) -> int: ...
    @property
    def seen(self) -> int: ...
    @property
    def text(self) -> str: ...

class Transfers:
    """`rows` are the fields of csrc/cpu/transfers.h, one list a transfer."""

    def __init__(self, push: bool, rows: Sequence[Sequence[int]]) -> None: ...

class TransferThread:
    def __init__(self) -> None: ...

class Workspace:
    def __init__(
        self,
        rank: int,
        segments: Sequence[Segment],
        pids: Sequence[int],
        thread: TransferThread,
        epoch: int,
        inline_bytes: int,
    ) -> None: ...
    @property
    def epoch(self) -> int: ...
    def begin(self, descriptor: str, limit_s: float) -> None: ...
    def confirm_all(self) -> Outcome | None: ...
    def start(self, transfers: Transfers, local: int, record: bool) -> None: ...
    def raise_signal(self, signal: int) -> None: ...
    def wait(self, signal: int, peer: int) -> Outcome | None: ...
    def end(self) -> Outcome | None: ...
    def fail(self, why: str) -> None: ...
    def leave(self) -> None: ...
    def health(self) -> Outcome | None: ...
    def moved(self) -> list[tuple[int, int, int, int]]: ...
