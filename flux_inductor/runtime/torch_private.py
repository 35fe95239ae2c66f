"""The only place that reaches into torch.distributed's private names (seen alike in torch 2.11 to 2.14)."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._C._autograd import DeviceType
from torch._C._distributed_c10d import (  # type: ignore[attr-defined]
    PrefixStore,
    Store,
    _detect_dma_connectivity,
    _resolve_process_group,
)


def process_group(name: str) -> dist.ProcessGroup:
    """The process group of that name.

    Raises:
        ValueError: there is none in this process, or this rank is not in it.
    """
    try:
        return _resolve_process_group(name)  # type: ignore[arg-type, unused-ignore]
    except Exception as error:
        raise _no_group(name, error) from None


def group_size(name: str) -> int:
    """How many ranks the group of that name has. Unlike a group itself, Dynamo can trace it: a constant.

    Raises:
        ValueError: as `process_group`.
    """
    try:
        return c10d._get_group_size_by_name(name)  # type: ignore[arg-type, unused-ignore]
    except Exception as error:
        raise _no_group(name, error) from None


def _no_group(name: str, error: Exception) -> ValueError:
    return ValueError(
        f"no process group {name!r} on this rank ({error}); pass the name of a group that exists and "
        "that contains this rank, such as torch.distributed.group.WORLD.group_name"
    )


def store(group: dist.ProcessGroup) -> Store:
    """The key-value store of a group; its keys are the group's own, and it outlives the group."""
    return PrefixStore("flux_inductor", c10d._get_process_group_store(group))


def until_destroyed(group: dist.ProcessGroup, callback: Callable[[object], None]) -> object:
    """Calls back when the group is destroyed, also if the program still holds it, while the result lives.

    torch.distributed alone refers to the object of the group's store, and drops it then.
    """
    return weakref.ref(c10d._get_process_group_store(group), callback)


def default_store() -> Store:
    """The store of the default group: keys that all groups of the program share."""
    return c10d._get_default_store()


def own_connection(store: Store) -> Store:
    """The same store, over a connection that no other thread's blocking wait for a key holds up."""
    clone: Store = store.clone()  # type: ignore[attr-defined]
    return clone


def timeout(group: dist.ProcessGroup, device: str) -> timedelta:
    """How long a collective of the group may take."""
    limit = group._get_backend(torch.device(device)).options._timeout
    assert isinstance(limit, timedelta), limit
    return limit


def number_of_groups() -> int:
    """How many process groups this rank is in."""
    return len(c10d._world.pg_map)


def all_groups() -> list[dist.ProcessGroup]:
    """The process groups that this rank is in."""
    return list(c10d._world.pg_map)


def collective_counter(group: dist.ProcessGroup) -> Callable[[], int] | None:
    """Reads how many collectives NCCL has run for a group; None if it runs none of them."""
    if "cuda" not in {device.type for device in group._device_types} or is_fake(group):
        return None
    backend = group._get_backend(torch.device("cuda"))
    if backend.name() != "nccl":
        return None
    counter: Callable[[], int] = backend._get_sequence_number_for_group  # type: ignore[attr-defined]
    return counter


def is_fake(group: dist.ProcessGroup | None) -> bool:
    """Whether the group only pretends, as torch.testing's "fake" backend does for compile-only runs."""
    return "fake" in str(dist.get_backend_config(group))


def nvlink_between_all() -> bool:
    """Whether every pair of this host's CUDA devices is joined by NVLink."""
    links = _detect_dma_connectivity(DeviceType.CUDA, "nvlink").matrix
    return all(links[a][b] > 0 for a in range(len(links)) for b in range(len(links)) if a != b)


def symmetric_empty(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory of this rank that others of a group can map.

    It lies in no pool of torch's caching allocator: when the tensor goes, nobody else gets the memory, which
    stays for peers that still map it.
    """
    from torch._C._distributed_c10d import _SymmetricMemory

    return _SymmetricMemory.empty_strided_p2p((count,), (1,), dtype, device)


def symmetric_addresses(tensor: torch.Tensor, group: str) -> list[int]:
    """Each rank's memory, made by `symmetric_empty`, as this rank addresses it.

    All ranks call it together.
    """
    import torch.distributed._symmetric_memory as symmetric_memory

    handle = symmetric_memory.rendezvous(tensor, group)  # type: ignore[arg-type, unused-ignore]
    offset = tensor.data_ptr() - handle.buffer_ptrs[handle.rank]
    return [address + offset for address in handle.buffer_ptrs]


def capturing_here() -> bool:
    """Whether the current stream is being captured into a CUDA graph."""
    try:
        return torch.cuda.is_current_stream_capturing()
    except RuntimeError:  # the context is broken
        return False


@cache
def pool_streams(device: int) -> list[int]:
    """The handles of the streams that torch hands out on a device in turn, and never destroys."""
    each = 32
    with torch.cuda.device(device):
        return [torch.cuda.Stream(priority=level).cuda_stream for level in (0, -1) for _ in range(each)]


# The index of the current CUDA device, and a tensor there of some sizes, strides and dtype. Compiled code
# allocates in this way; the dispatcher would double the cost.
current_cuda_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: -1)
empty_strided_cuda: Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor] = (
    torch._C._dynamo.guards._empty_strided_cuda  # type: ignore[attr-defined]
)
