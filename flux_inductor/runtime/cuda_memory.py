"""A group's symmetric memory: made by all ranks together, as large as the largest call so far."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flux_inductor.runtime import torch_private
from flux_inductor.runtime.cuda_kernels import kernels
from flux_inductor.runtime.errors import WorkspaceError

_ALIGNMENT = 2 << 20  # bytes; pages of device memory


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
    """

    capacity: Need
    workspace: Any
    slots: Tensor
    signals: Tensor
    own_words: Tensor

    @property
    def symmetric_bytes(self) -> int:
        """Device memory that peers can reach."""
        return self.slots.nbytes + self.signals.nbytes


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
    failure = ""
    try:
        slots = torch_private.symmetric_empty(2 * capacity.slot_bytes, torch.uint8, place.device)
        signals = torch_private.symmetric_empty(
            kernels.symmetric_signals(capacity.signals), torch.int64, place.device
        )
        own_words = torch.zeros(kernels.own_words(capacity.counters), dtype=torch.int32, device=place.device)
        signals.zero_()
        torch.cuda.synchronize(place.device)
    except RuntimeError as error:  # out of memory among them
        failure = f"{type(error).__name__}: {error}"
    _raise_if_any(place, place.meet(failure), capacity)
    try:
        slot_addresses = torch_private.symmetric_addresses(slots, place.group)
        signal_addresses = torch_private.symmetric_addresses(signals, place.group)
    except RuntimeError as error:
        failure = f"{type(error).__name__}: {error}"
    # Signals of all ranks are zero, and mapped, before any rank goes on.
    _raise_if_any(place, place.meet(failure), capacity)
    workspace = kernels.Workspace(
        world=place.world,
        rank=place.rank,
        device=place.device.index,
        slots=slot_addresses,
        slot_bytes=capacity.slot_bytes,
        signals=signal_addresses,
        signals_per_set=capacity.signals,
        own_words=own_words.data_ptr(),
        counters=capacity.counters,
        errors=place.errors.data_ptr(),
        wait_limit_ns=place.limit_ns,
    )
    return CudaMemory(capacity, workspace, slots, signals, own_words)


def _raise_if_any(place: Place, failures: list[str], capacity: Need) -> None:
    for rank, failure in enumerate(failures):
        if failure:
            raise WorkspaceError(
                f"2 x {capacity.slot_bytes >> 20} MiB of symmetric memory for group {place.group!r} cannot "
                f"be set up on rank {rank}: {failure}. Free device memory, check that the GPUs of the group "
                "can address each other's memory (nvidia-smi topo -p2p r), or run unfused: "
                "FLUX_INDUCTOR_ENGINE=reference, or option strategy='never'"
            )
