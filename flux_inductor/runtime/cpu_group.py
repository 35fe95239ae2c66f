"""The shared state of one process group on the CPU engine, and the calls that run in it.

A group's calls are serialised by a lock, and both ops share one workspace. It grows when a call needs more:
every rank comes to the same decision at the same call, since descriptors are compared first.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from flux_inductor import _core
from flux_inductor.runtime import groups, liveness, rendezvous, torch_private, trace
from flux_inductor.runtime.bound import BoundCalls
from flux_inductor.runtime.cpu_call import Call
from flux_inductor.runtime.errors import (
    REMEDY,
    DeadGroupError,
    FusedOpError,
    PeerLostError,
    WorkspaceError,
)
from flux_inductor.runtime.generation import Generation
from flux_inductor.runtime.groups import process_group

FIRST_EPOCH = 0  # the epoch before the first call
CLOSE_LIMIT_S = 1.0
LOOK_PERIOD_S = 0.2  # between looks for ranks that ended before the first call; each asks the store
INLINE_BYTES = 128 << 10  # a call that moves less does so itself: a thread takes longer to wake


class RanksApart(Exception):
    """The ranks cannot share memory, as all of them know; see `CpuGroup.apart`."""


class CpuGroup:
    """What this rank keeps for one process group. See `groups.GroupState`."""

    def __init__(self, name: str, group: dist.ProcessGroup) -> None:
        self.name = name
        self.rank = group.rank()
        self.world = group.size()
        self.limit_s = 0.0  # the timeout of the process group, read at each call
        self.lock = threading.Lock()
        self._generation = Generation("cpu", torch_private.store(group), self.rank, self.world)
        self._thread = _core.TransferThread()
        self._workspace: _core.Workspace | None = None
        self._own: _core.Segment | None = None
        self._capacity = (0, 0)  # signals, bytes of one buffer
        self._epoch = FIRST_EPOCH
        self._buffers: dict[tuple[int, torch.dtype], Tensor] = {}
        self._scratch = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._bound = groups.state_of(name, BoundCalls)
        self.apart = ""  # why the ranks cannot share memory, once they have met and know
        self._dead = ""
        self._next_look = 0.0

    @property
    def workspace_bytes(self) -> int:
        """Shared memory that this rank owns: header, signals and both buffers."""
        return self._own.size if self._own is not None else 0

    @property
    def scratch_bytes(self) -> int:
        """Private memory that this rank keeps for products that wait to be sent or added."""
        return self._scratch.nbytes

    @contextmanager
    def call(
        self, op: str, descriptor: str, signals: int, buffer_bytes: int, scratch_bytes: int
    ) -> Iterator[Call]:
        """One call of a fused op, from its announcement to the end of its transfers.

        Args:
            descriptor: what all ranks must agree on, compared with every peer's.
            signals, buffer_bytes: what the call needs of the workspace.
            scratch_bytes: what it needs of private memory.

        Raises:
            RanksApart: nothing has begun, on no rank, and none of the group's calls ever will.
            FusedOpError: and the group is dead, as it is after any other exception that leaves the body.
        """
        if self._bound.refused:
            descriptor += f", calls refused before: {self._bound.refused}"
        with self.lock:
            if self._dead:
                raise DeadGroupError(f"group {self.name!r} failed before: {self._dead}")
            self.limit_s = torch_private.timeout(process_group(self.name), "cpu").total_seconds()
            call = Call(op, descriptor, self.rank, self.name, self.limit_s)
            try:
                self._reserve_scratch(scratch_bytes)
                workspace = call.workspace = self._prepare(call, signals, buffer_bytes)
                yield call
                call.check(workspace.end())
                self._epoch = workspace.epoch
            except RanksApart:
                raise
            except BaseException as error:
                self._fail(error)
                raise
            if trace.recording():
                for moved in workspace.moved():
                    trace.add(trace.TraceEvent(self.rank, "move", *moved))

    def buffer(self, dtype: torch.dtype) -> Tensor:
        """This rank's buffer of the running call, flat."""
        assert self._own is not None
        key = ((self._epoch + 1) & 1, dtype)
        if key not in self._buffers:
            with torch.inference_mode(False):  # kept for later calls, which may be outside of it
                self._buffers[key] = torch.frombuffer(self._own.buffer(key[0]), dtype=dtype)
        return self._buffers[key]

    def scratch(self, dtype: torch.dtype, count: int) -> Tensor:
        """The first `count` elements of the running call's private memory, kept from call to call."""
        return self._scratch[: count * dtype.itemsize].view(dtype)

    def fail(self, error: BaseException) -> None:
        """Ends the group on all ranks, since this one will not make a call that they may have begun (R9)."""
        with self.lock:
            self._fail(error)

    def end(self, error: BaseException) -> None:
        """Ends the group on all ranks, for a failure outside of its calls."""
        self._fail(error)

    def _reserve_scratch(self, size: int) -> None:
        if self._scratch.numel() < size:
            with torch.inference_mode(False):
                self._scratch = torch.empty(size, dtype=torch.uint8, device="cpu")

    def close(self) -> None:
        """Gives everything back, but for a call that another thread is still waiting in: that keeps what it
        uses, and ends by itself. Neither the program's end nor another group has to wait for it."""
        self._dead = self._dead or "it was destroyed"
        if not groups.ending():
            self._generation.leave()
        if not self.lock.acquire(timeout=CLOSE_LIMIT_S):
            return
        try:
            if self._workspace is not None:
                self._workspace.leave()
            self._release()
            self._scratch = torch.empty(0, dtype=torch.uint8, device="cpu")
            del self._thread
        finally:
            self.lock.release()

    def _release(self) -> None:
        self._buffers.clear()
        self._workspace = self._own = None

    def _fail(self, error: BaseException) -> None:
        if self._dead:
            return
        why = f"{type(error).__name__}: {error}"
        self._dead = f"{why}. {REMEDY}"
        if self._workspace is not None:
            self._workspace.fail(why)
        self._generation.fail(why)

    def _prepare(self, call: Call, signals: int, buffer_bytes: int) -> _core.Workspace:
        """Begins the call in a workspace that is large enough."""
        workspace = self._workspace
        stale = (self._epoch + 1) % _core.EPOCH_RENEWAL == 0
        fits = signals <= self._capacity[0] and buffer_bytes <= self._capacity[1]
        if workspace is None or stale or not fits:
            if workspace is not None:
                workspace.begin(call.descriptor, self.limit_s)
                call.check(workspace.confirm_all())
            capacity = max(signals, self._capacity[0]), max(buffer_bytes, self._capacity[1])
            workspace = self._meet(call, capacity)
        workspace.begin(call.descriptor, self.limit_s)
        return workspace

    def _meet(self, call: Call, capacity: tuple[int, int]) -> _core.Workspace:
        """Makes a new segment and finds those of the peers; the old ones stay until all have been found."""
        liveness.publish_process()
        own, handle = rendezvous.make_segment(call.descriptor, capacity, self._epoch)
        try:
            handles = rendezvous.exchange(
                self._generation, handle, self.limit_s, lambda: self._check_peers(call)
            )
            for peer, theirs in enumerate(handles):
                if theirs.descriptor != call.descriptor:
                    raise call.mismatch(peer, theirs.descriptor)
            rendezvous.check_made(handles)
            self.apart = rendezvous.apart(handles)
            if self.apart:
                raise RanksApart
            assert own is not None
            segments = [
                own if peer == self.rank else rendezvous.open_segment(peer, theirs)
                for peer, theirs in enumerate(handles)
            ]
            workspace = self._make_workspace(segments, [theirs.pid for theirs in handles])
        except RanksApart:
            raise
        except BaseException as error:
            if own is not None:
                self._own = own  # late peers find the failure in it
                own.announce_failure(f"{type(error).__name__}: {error}")
            # A failure that a peer has told may be of any class; those of the call itself name it already.
            if isinstance(error, FusedOpError) and not str(error).startswith(call.where):
                raise type(error)(f"{call.where}: {error}. {REMEDY}") from error.__cause__
            raise
        self._release()
        self._workspace, self._own, self._capacity = workspace, own, capacity
        return workspace

    def _make_workspace(self, segments: list[_core.Segment], pids: list[int]) -> _core.Workspace:
        try:
            return _core.Workspace(self.rank, segments, pids, self._thread, self._epoch, INLINE_BYTES)
        except ProcessLookupError as error:
            raise PeerLostError(f"a rank has ended before the call began ({error})") from error
        except OSError as error:
            raise WorkspaceError(
                f"the peers' processes cannot be watched ({error}); Linux 5.3 or newer is needed, or run "
                "unfused: FLUX_INDUCTOR_ENGINE=reference"
            ) from error

    def _check_peers(self, call: Call) -> None:
        """Raises if a peer has ended, or, in the workspace that is being replaced, has failed or left."""
        if self._workspace is not None:
            call.check(self._workspace.health())
        elif time.monotonic() > self._next_look:
            self._next_look = time.monotonic() + LOOK_PERIOD_S
            ended = liveness.ended_rank(process_group(self.name))
            if ended is not None:
                raise PeerLostError(f"the process of rank {ended} has ended before the ranks met")
