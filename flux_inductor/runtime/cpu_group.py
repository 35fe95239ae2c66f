"""The shared state of one process group on the CPU engine, and the calls that run in it.

A group's calls are serialised by a lock, and both ops share one workspace. It grows when a call needs more:
every rank comes to the same decision at the same call, since descriptors are compared first.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from flux_inductor import _core
from flux_inductor.runtime import errors, rendezvous, torch_private, trace
from flux_inductor.runtime.errors import DeadGroupError, FusedOpError, WorkspaceError
from flux_inductor.runtime.groups import process_group
from flux_inductor.runtime.rendezvous import Handle

FIRST_EPOCH = 0  # the epoch before the first call
INLINE_BYTES = 128 << 10  # a call that moves less does so itself: a thread takes longer to wake
REMEDY = "The group is dead for fused ops now; destroy it and make it anew."


class CpuGroup:
    """What this rank keeps for one process group. See `groups.GroupState`."""

    def __init__(self, name: str, group: dist.ProcessGroup) -> None:
        self.name = name
        self.rank = group.rank()
        self.world = group.size()
        self.limit_s = 0.0  # the time-out of the process group, read at each call
        self.lock = threading.Lock()
        self._store = torch_private.store(group)
        self._prefix = ""
        self._generation = 0
        self._thread = _core.TransferThread()
        self._workspace: _core.Workspace | None = None
        self._own: _core.Segment | None = None
        self._capacity = (0, 0)  # signals, bytes of one buffer
        self._epoch = FIRST_EPOCH
        self._buffers: dict[tuple[int, torch.dtype], Tensor] = {}
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._dead = ""

    @property
    def workspace_bytes(self) -> int:
        """Shared memory that this rank owns: header, signals and both buffers."""
        return self._own.size if self._own is not None else 0

    @property
    def scratch_bytes(self) -> int:
        """Private memory that this rank keeps for products that wait to be sent or added."""
        return self._scratch.nbytes

    @contextmanager
    def call(self, op: str, descriptor: str, signals: int, buffer_bytes: int) -> Iterator[Call]:
        """One call of a fused op, from its announcement to the end of its transfers.

        Args:
            descriptor: what all ranks must agree on, compared with every peer's.
            signals, buffer_bytes: what the call needs of the workspace.

        Raises:
            FusedOpError: and the group is dead, as it is after any other exception that leaves the body.
        """
        with self.lock:
            if self._dead:
                raise DeadGroupError(f"group {self.name!r} failed before: {self._dead}")
            self.limit_s = torch_private.timeout(process_group(self.name), "cpu").total_seconds()
            call = Call(self, op, descriptor)
            try:
                workspace = call.workspace = self._prepare(call, signals, buffer_bytes)
                yield call
                call.check(workspace.end())
                self._epoch = workspace.epoch
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
            self._buffers[key] = torch.frombuffer(self._own.buffer(key[0]), dtype=dtype)
        return self._buffers[key]

    def scratch(self, dtype: torch.dtype, count: int) -> Tensor:
        """At least `count` elements of private memory, kept from call to call."""
        if self._scratch.numel() < count * dtype.itemsize:
            self._scratch = torch.empty(count * dtype.itemsize, dtype=torch.uint8)
        return self._scratch[: count * dtype.itemsize].view(dtype)

    def close(self) -> None:
        with self.lock:
            if self._workspace is not None:
                self._workspace.leave()
            self._dead = self._dead or "it was destroyed"
            self._release()
            self._scratch = torch.empty(0, dtype=torch.uint8)
            del self._thread

    def _release(self) -> None:
        self._buffers.clear()
        self._workspace = self._own = None

    def _fail(self, error: BaseException) -> None:
        why = f"{type(error).__name__}: {error}"
        self._dead = f"{why}. {REMEDY}"
        if self._workspace is not None:
            self._workspace.fail(why)

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
        if not self._prefix:
            # Each making of the group has its own keys, so that none of a destroyed one are read.
            made = self._store.add(f"flux_inductor/made/{self.rank}", 1)
            self._prefix = f"flux_inductor/{made}"
        self._generation += 1
        prefix = f"{self._prefix}/{self._generation}"
        own, handle = self._make_segment(call.descriptor, capacity)
        try:
            handles = rendezvous.exchange(
                self._store, prefix, self.rank, self.world, handle, self.limit_s, call.check_peers
            )
            for peer, theirs in enumerate(handles):
                if theirs.descriptor != call.descriptor:
                    raise call.mismatch(peer, theirs.descriptor)
            if own is None:
                raise WorkspaceError(handle.failure)
            segments = [
                own if peer == self.rank else rendezvous.open_segment(peer, theirs, handle)
                for peer, theirs in enumerate(handles)
            ]
            pids = [theirs.pid for theirs in handles]
            workspace = _core.Workspace(self.rank, segments, pids, self._thread, self._epoch, INLINE_BYTES)
        except BaseException as error:
            if own is not None:
                self._own = own  # late peers find the failure in it
                own.announce_failure(f"{type(error).__name__}: {error}")
            if isinstance(error, (WorkspaceError, errors.PeerTimeoutError)):
                raise type(error)(f"{call.where}: {error}. {REMEDY}") from error.__cause__
            raise
        self._release()
        self._workspace, self._own, self._capacity = workspace, own, capacity
        return workspace

    def _make_segment(
        self, descriptor: str, capacity: tuple[int, int]
    ) -> tuple[_core.Segment | None, Handle]:
        try:
            own = _core.Segment.create(*capacity, self._epoch)
        except OSError as error:
            reason = (
                f"no shared memory for the two buffers of a fused op ({error.strerror}); raise the memory "
                "limit of the container or of the process (ulimit -f, -v), make the op smaller, or run "
                "unfused with FLUX_INDUCTOR_ENGINE=reference"
            )
            return None, Handle(descriptor=descriptor, failure=reason)
        return own, Handle.of(own, descriptor)


class Call:
    """One running call: its waits, and what their failures mean."""

    def __init__(self, group: CpuGroup, op: str, descriptor: str) -> None:
        self.group = group
        self.op = op
        self.descriptor = descriptor
        self.workspace: _core.Workspace | None = None

    @property
    def where(self) -> str:
        return f"{self.op} on rank {self.group.rank} of group {self.group.name!r}"

    def start(self, transfers: _core.Transfers, local: Tensor) -> None:
        """Lets the transfer thread begin; `local` must live until the call ends."""
        assert self.workspace is not None
        self.workspace.start(transfers, local.data_ptr(), trace.recording())

    def ready(self, signal: int) -> None:
        """Tells whoever transfers them that the bytes behind an own signal are written."""
        assert self.workspace is not None
        self.workspace.raise_signal(signal)

    def wait(self, signal: int, peer: int, owner: int, index: int) -> None:
        """Waits until chunk `index` of `owner`'s shard has come from `peer`."""
        assert self.workspace is not None
        with trace.span(self.group.rank, "wait", owner, index):
            outcome = self.workspace.wait(signal, peer)
        if outcome is not None:
            raise self._error(outcome, f"chunk {index} of rank {owner}'s shard from rank {peer}")

    def check(self, outcome: _core.Outcome | None) -> None:
        if outcome is not None:
            raise self._error(outcome, "the end of its transfers")

    def check_peers(self) -> None:
        """Raises if a peer of the workspace that is being replaced has failed or left."""
        if self.group._workspace is not None:
            self.check(self.group._workspace.health())

    def mismatch(self, peer: int, theirs: str) -> errors.MismatchError:
        return errors.MismatchError(
            f"{self.where} does not match what rank {peer} calls at the same place in the group's order.\n"
            f"  rank {self.group.rank}: {self.descriptor}\n"
            f"  rank {peer}: {theirs}\n"
            f"All ranks of a group must run the same fused ops in one order. {REMEDY}"
        )

    def _error(self, outcome: _core.Outcome, awaited: str) -> FusedOpError:
        if outcome.verdict == "mismatch":
            return self.mismatch(outcome.peer, outcome.text)
        if outcome.verdict == "failed":
            kind = getattr(errors, outcome.text.partition(":")[0], FusedOpError)
            return kind(f"{self.where} gave up because rank {outcome.peer} failed: {outcome.text}")  # type: ignore[no-any-return]
        state = f"the signal of rank {outcome.peer} shows epoch {outcome.seen}, expected {outcome.expected}"
        if outcome.verdict == "lost":
            return errors.PeerLostError(
                f"{self.where} waited for {awaited}, but rank {outcome.peer} has ended or has destroyed the "
                f"group ({state}). {REMEDY}"
            )
        return errors.PeerTimeoutError(
            f"{self.where} waited {self.group.limit_s:g} s for {awaited}: {state}. If the rank is only slow, "
            "raise the time-out of the process group; FLUX_INDUCTOR_ENGINE must be the same on all ranks. "
            f"{REMEDY}"
        )
