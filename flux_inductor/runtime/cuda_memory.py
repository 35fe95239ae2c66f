"""A group's symmetric memory: made by all ranks together, as large as the largest call so far.

Nothing of it lies in a memory pool of torch's: such a pool may be the private one of a CUDA graph or the
program's own, and whoever owns it takes back what it does not know. Whatever torch itself allocates to map
the peers' memory does come from its caching allocator, so all is made in a thread of its own: pools are
chosen by thread or by stream.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from flux_inductor.runtime import torch_private
from flux_inductor.runtime.cuda_kernels import kernels
from flux_inductor.runtime.errors import WorkspaceError

_ALIGNMENT = 2 << 20  # bytes; pages of device memory
_WORDS = 2  # 32-bit words in a signal
_LINE = 16  # signals in a cache line, at which own words begin
_THREAD = "flux_inductor memory"
_PAUSE_S = 0.05  # between looks whether captures have ended

Result = TypeVar("Result")


@dataclass(frozen=True)
class Need:
    """What a call needs of its workspace.

    Args:
        slot_bytes: of one of the two slots that peers' data arrives in.
        signals: of one of the two sets of signals.
        counters: of one of the two sets of words in the rank's own memory.
    """

    slot_bytes: int = 0
    signals: int = 0
    counters: int = 0

    def covers(self, other: Need) -> bool:
        return (
            self.slot_bytes >= other.slot_bytes
            and self.signals >= other.signals
            and self.counters >= other.counters
        )

    def joined(self, other: Need) -> Need:
        """The larger of each, the slot rounded up to pages."""
        slot = max(self.slot_bytes, other.slot_bytes)
        return Need(
            -(-slot // _ALIGNMENT) * _ALIGNMENT,
            max(self.signals, other.signals),
            max(self.counters, other.counters),
        )


@dataclass(frozen=True)
class CudaMemory:
    """One workspace and the tensors that hold its memory.

    Args:
        capacity: the largest call that fits.
        workspace: `_core.cuda.Workspace`.
        signals: and, behind them, this rank's own words.
    """

    capacity: Need
    workspace: Any
    slots: Tensor
    signals: Tensor

    @property
    def symmetric_bytes(self) -> int:
        """Device memory that peers can reach."""
        return self.slots.nbytes + self.signals.nbytes

    @property
    def own_words(self) -> Tensor:
        return _own_words(self.signals, self.capacity)


@dataclass(frozen=True)
class Place:
    """Whose memory it is.

    Args:
        errors: the group's error record, pinned host memory.
        meet: exchanges a text with all ranks and returns theirs, by rank; raises if one does not come.
    """

    group: str
    rank: int
    world: int
    device: torch.device
    errors: Tensor
    limit_ns: int
    meet: Callable[[str], list[str]]


def make_memory(place: Place, capacity: Need) -> CudaMemory:
    """Allocates and maps a workspace. All ranks call it together, with nothing of the group in flight.

    Raises:
        WorkspaceError: on all ranks, if one of them cannot.
    """
    return outside_of_pools(place.device, lambda: _make(place, capacity))


def make_error_record(device: torch.device) -> Tensor:
    """Pinned host memory, which kernels write when a wait fails; zero at first."""
    size = kernels.ERROR_RECORD_BYTES
    return outside_of_pools(device, lambda: torch.zeros(size, dtype=torch.uint8).pin_memory())


def outside_of_pools(device: torch.device, make: Callable[[], Result]) -> Result:
    """What `make` returns when another thread calls it, where no memory pool, and no mode, is in use."""
    made: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            kernels.allow_beside_captures()
            with torch.cuda.device(device):
                made.append(make())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name=_THREAD, daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return made[0]


def _words_begin(capacity: Need) -> int:
    signals: int = kernels.symmetric_signals(capacity.signals)
    return -(-signals // _LINE) * _LINE


def _own_words(signals: Tensor, capacity: Need) -> Tensor:
    words: Tensor = signals[_words_begin(capacity) :].view(torch.int32)
    return words[: kernels.own_words(capacity.counters)]


def _make(place: Place, capacity: Need) -> CudaMemory:
    failure = ""
    own = -(-kernels.own_words(capacity.counters) // _WORDS)
    try:
        slots = torch_private.symmetric_empty(2 * capacity.slot_bytes, torch.uint8, place.device)
        signals = torch_private.symmetric_empty(_words_begin(capacity) + own, torch.int64, place.device)
        signals.zero_()
        torch.cuda.synchronize(place.device)
    except RuntimeError as error:  # out of memory among them
        failure = f"{type(error).__name__}: {error}"
    _raise_if_any(place, place.meet(failure), capacity)
    try:
        workspace = kernels.Workspace(
            world=place.world,
            rank=place.rank,
            device=place.device.index,
            slots=torch_private.symmetric_addresses(slots, place.group),
            slot_bytes=capacity.slot_bytes,
            signals=torch_private.symmetric_addresses(signals, place.group),
            signals_per_set=capacity.signals,
            own_words=_own_words(signals, capacity).data_ptr(),
            counters=capacity.counters,
            errors=place.errors.data_ptr(),
            wait_limit_ns=place.limit_ns,
        )
    except RuntimeError as error:
        failure = f"{type(error).__name__}: {error}"
    # Signals of all ranks are zero, and mapped, and all ranks are ready, before any rank goes on.
    _raise_if_any(place, place.meet(failure), capacity)
    return CudaMemory(capacity, workspace, slots, signals)


def _raise_if_any(place: Place, failures: list[str], capacity: Need) -> None:
    for rank, failure in enumerate(failures):
        if failure:
            raise WorkspaceError(
                f"2 x {capacity.slot_bytes >> 20} MiB of symmetric memory for group {place.group!r} cannot "
                f"be set up on rank {rank}: {failure}. Free device memory, check that the GPUs of the group "
                "can address each other's memory (nvidia-smi topo -p2p r), or run unfused: "
                "FLUX_INDUCTOR_ENGINE=reference, or option strategy='never'"
            )


def capturing(device: torch.device) -> bool:
    """Whether a thread of this process captures a CUDA graph, as far as torch's own streams tell."""
    return bool(kernels.any_capturing(torch_private.pool_streams(device.index)))


def drained(device: torch.device) -> bool:
    """Waits until the device is idle; false if it cannot be waited for. Not during a capture."""
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:  # the context is broken
        return False
    return True


def free(kept: list[object], device: torch.device, usable: bool) -> None:
    """Drops the references in `kept`, the last ones, once the device is idle. A capture is not disturbed.

    Args:
        usable: whether the device can still be used. If not, to free anything would end the process badly.
    """
    if usable and capturing(device):
        threading.Thread(target=_free_later, args=(kept, device), name=_THREAD, daemon=True).start()
    elif not usable or not drained(device):
        _never_free(kept)


def _free_later(kept: list[object], device: torch.device) -> None:
    while capturing(device):
        time.sleep(_PAUSE_S)
    if not drained(device):
        _never_free(kept)


def _never_free(kept: object) -> None:
    """It goes with the process: by one reference that nobody gives back."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
