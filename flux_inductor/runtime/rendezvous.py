"""How ranks of one host find each other's shared memory: handles, exchanged through the group's store."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass

from flux_inductor._core import Segment
from flux_inductor.runtime.detect import process_namespace
from flux_inductor.runtime.errors import WorkspaceError
from flux_inductor.runtime.generation import Generation


@dataclass(frozen=True)
class Handle:
    """What a rank tells its peers so that they can map its segment.

    Args:
        pid, fd: the segment is /proc/<pid>/fd/<fd>.
        token: the random number in its header.
        host: the kernel that the rank runs under.
        pids: the namespace in which `pid` means something.
        descriptor: the call that the rank is about to run.
        failure: why the rank could not make its segment; "" if it could.
    """

    pid: int = 0
    fd: int = -1
    token: int = 0
    host: str = ""
    pids: str = ""
    descriptor: str = ""
    failure: str = ""

    @staticmethod
    def of(segment: Segment, descriptor: str) -> Handle:
        host, _, pids = process_namespace().partition("/")
        return Handle(os.getpid(), segment.fd, segment.token, host, pids, descriptor)


def make_segment(descriptor: str, capacity: tuple[int, int], epoch: int) -> tuple[Segment | None, Handle]:
    """This rank's segment of (signals, bytes of one buffer), or none and a handle that tells why."""
    try:
        own = Segment.create(*capacity, epoch)
        return own, Handle.of(own, descriptor)
    except (OSError, MemoryError) as error:
        reason = (
            f"no shared memory for the two buffers of a fused op ({error}); raise the memory limit of the "
            "container or the limits of the process (ulimit -f, -n, -v), make the op smaller, or run unfused "
            "with FLUX_INDUCTOR_ENGINE=reference"
        )
        return None, Handle(descriptor=descriptor, failure=reason)


def exchange(generation: Generation, own: Handle, limit_s: float, check: Callable[[], None]) -> list[Handle]:
    """The handles of all ranks; see `Generation.meet`."""
    texts = generation.meet(json.dumps(asdict(own)), limit_s, check)
    return [Handle(**json.loads(text)) for text in texts]


def check_made(handles: list[Handle]) -> None:
    """Raises WorkspaceError if a rank could not make its segment."""
    for peer, handle in enumerate(handles):
        if handle.failure:
            raise WorkspaceError(f"rank {peer}: {handle.failure}")


def apart(handles: list[Handle]) -> str:
    """Why the ranks cannot map each other's segments; "" if they can. The same on all ranks."""
    hosts = [handle.host for handle in handles]
    if len(set(hosts)) > 1:
        return (
            f"its ranks run on {len(set(hosts))} hosts, and the CPU engine needs all of a group on one; "
            "choose groups that lie on one host"
        )
    namespaces = sorted({handle.pids for handle in handles})
    if len(namespaces) > 1:
        return (
            f"its ranks run in containers with process namespaces of their own ({', '.join(namespaces)}); "
            "start them with one process namespace (docker: --pid)"
        )
    return ""


def open_segment(peer: int, handle: Handle) -> Segment:
    """Maps a peer's segment.

    Raises:
        WorkspaceError: names why it cannot be reached, and the remedy.
    """
    unfused = "or run unfused: FLUX_INDUCTOR_ENGINE=reference, or option strategy='never'"
    try:
        return Segment.open(handle.pid, handle.fd, handle.token)
    except OSError as error:
        raise WorkspaceError(
            f"the shared memory of rank {peer} (process {handle.pid}) cannot be opened ({error}); "
            f"run all ranks as one user, with /proc mounted, {unfused}"
        ) from error
