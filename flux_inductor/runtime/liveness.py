"""Whether ranks' processes are still there, for the time before the ranks have met in shared memory.

Later, each rank watches its peers' processes itself (csrc/cpu/wait.h). Before that, all it has is the store:
every rank publishes which process it is when it first compiles or calls a fused op. A rank that ends earlier
than that is only missed when the process group's timeout has passed.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch.distributed as dist

from flux_inductor.runtime import torch_private
from flux_inductor.runtime.detect import process_namespace

_KEY = "flux_inductor/process/{rank}"


def publish_process() -> None:
    """Tells the other ranks which process this rank is. It waits for nobody."""
    if dist.is_initialized() and not torch_private.is_fake(dist.group.WORLD):
        torch_private.default_store().set(_KEY.format(rank=dist.get_rank()), _describe(os.getpid()))


def ended_rank(group: dist.ProcessGroup) -> int | None:
    """A rank of the group whose process, in this process namespace, has ended; None if there is none."""
    store, namespace = torch_private.default_store(), process_namespace()
    for rank, world_rank in enumerate(dist.get_process_group_ranks(group)):
        key = _KEY.format(rank=world_rank)
        if not store.check([key]):
            continue
        published = store.get(key).decode()
        place, pid, _ = published.split()
        if place == namespace and _describe(int(pid)) != published:
            return rank
    return None


def _describe(pid: int) -> str:
    """Namespace, pid and start of a process; the start is that of no process if it has ended."""
    return f"{process_namespace()} {pid} {_start(pid) or 'ended'}"


def _start(pid: int) -> str:
    """When the process started, in the kernel's ticks; "" if it has ended, reaped or not."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    state, start = fields[0], fields[19]
    return "" if state in "ZXx" else start
