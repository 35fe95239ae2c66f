"""The topology of a process group, as planning describes it."""

from __future__ import annotations

import os
from datetime import timedelta
from functools import lru_cache
from pathlib import Path

import torch
import torch.distributed as dist

from flux_inductor.planning.topology import LINKS, Device, Link, Topology
from flux_inductor.runtime import torch_private
from flux_inductor.runtime.errors import PeerTimeoutError
from flux_inductor.runtime.groups import process_group, state_of

_HOST_KEY = "flux_inductor/host/{rank}"


@lru_cache
def host_identity() -> str:
    """A text that two processes share exactly if they run under one kernel (containers of a host do)."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@lru_cache
def process_namespace() -> str:
    """A text that two processes share exactly if a process id means the same process to both."""
    return f"{host_identity()}/{os.readlink('/proc/self/ns/pid')}"


def publish_host() -> None:
    """Tells the other ranks where this rank runs; needed before any of them can detect a topology.

    It waits for nobody, so a rank may do it whenever it learns that it will take part in fused ops.
    """
    if dist.is_initialized() and not torch_private.is_fake(dist.group.WORLD):
        torch_private.default_store().set(_HOST_KEY.format(rank=dist.get_rank()), process_namespace())


class _KnownTopologies:
    """Those of one process group, by device. See `groups.GroupState`."""

    def __init__(self, name: str, group: dist.ProcessGroup) -> None:
        self.of: dict[str, Topology] = {}

    def close(self) -> None:
        self.of.clear()


def topology_of(group: str, device: str) -> Topology:
    """The topology of a process group, detected once. A fake group counts as one host.

    Args:
        group: the group's name.
        device: the type of its tensors' device, "cpu" or "cuda".

    Raises:
        ValueError: no such group, a device that has no engine, or nodes with unequal numbers of ranks.
        PeerTimeoutError: a rank has not published its host in time.
    """
    known = state_of(group, _KnownTopologies).of
    if device not in known:
        known[device] = _detect(process_group(group), device)
    return known[device]


def _detect(pg: dist.ProcessGroup, device: str) -> Topology:
    # The default group has all ranks: who is outside of this group has other data, or other layers, and its
    # collectives with these ranks run beside ours.
    shared = pg.size() < dist.get_world_size()
    if device not in LINKS:
        raise ValueError(f"no engine for device {device!r}; leave its collectives unfused")
    return Topology(
        device, pg.size(), _nodes(pg, device), link=_link(device), shared=shared, sms=_sms(device)
    )


def _sms(device: Device) -> int:
    """Of the current device, taken to be like the others; 0 where it cannot be asked."""
    if device == "cpu" or not torch.cuda.is_available():
        return 0
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count)


def _link(device: Device) -> Link:
    if device == "cpu":
        return "shm"
    return "nvlink" if torch.cuda.is_available() and torch_private.nvlink_between_all() else "pcie"


def _nodes(group: dist.ProcessGroup, device: str) -> int:
    if torch_private.is_fake(group):
        return 1
    publish_host()
    limit = torch_private.timeout(group, device)
    places = {_place_of(rank, limit) for rank in dist.get_process_group_ranks(group)}
    # The CPU engine opens its peers' memory by their process ids. Symmetric memory passes descriptors through
    # sockets in TMPDIR, which containers of one host can share.
    return len(places if device == "cpu" else {place.partition("/")[0] for place in places})


def _place_of(rank: int, limit: timedelta) -> str:
    store, key = torch_private.default_store(), _HOST_KEY.format(rank=rank)
    try:
        store.wait([key], limit)
    except RuntimeError as error:  # a DistStoreError is one; a FileStore raises no more than that
        raise PeerTimeoutError(
            f"rank {rank} compiled or called nothing fused within {limit.total_seconds():g} s, the timeout "
            "of the process group; all ranks of a group must compile what one of them does, also for "
            "flux_inductor.explain()"
        ) from error
    return bytes(store.get(key)).decode()
