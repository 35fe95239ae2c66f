"""The shared state of one process group on the CUDA engine.

csrc/cuda/host/workspace.h describes workspaces, two slots in turn and the order of calls. Here is what all
ranks do together on the host: they agree on each call that they meet for the first time (rule R7), and make
the workspace larger when such a call needs it. Calls seen before cost no exchange: a running digest over all
calls is compared along with the next new one. What happens when a call fails on one rank: cuda_order.py.
"""

from __future__ import annotations

import ctypes
import json
import logging
import secrets
import threading
import time
from hashlib import sha256
from typing import NoReturn

import torch
import torch.distributed as dist

from flux_inductor.runtime import cuda_memory, cuda_watchdog, groups, torch_private
from flux_inductor.runtime.bound import BoundCalls
from flux_inductor.runtime.cuda_error import PAST_USE, not_prepared, unfinished, unlike_calls, what_failed
from flux_inductor.runtime.cuda_kernels import kernels, prepare_all, require_kernels
from flux_inductor.runtime.cuda_memory import CudaMemory, Need, Place, make_memory
from flux_inductor.runtime.cuda_order import Notice, Notices, Order, notices_of
from flux_inductor.runtime.cuda_prepare import Prepared, Seat
from flux_inductor.runtime.errors import (
    REMEDY,
    DeadGroupError,
    FusedOpError,
    PeerLostError,
)
from flux_inductor.runtime.generation import Generation

_EAGER = 1  # what a workspace returns for a call that is on the device
_LOOK_PERIOD_S = 0.1  # for peers that cannot come any more, while this rank waits for them

_log = logging.getLogger("flux_inductor")


class CudaGroup:
    """What this rank keeps for one process group. See `groups.GroupState`."""

    current_device = staticmethod(torch_private.current_cuda_device)
    empty_strided = staticmethod(torch_private.empty_strided_cuda)

    def __init__(self, name: str, group: dist.ProcessGroup) -> None:
        require_kernels()
        self.name = name
        self.rank = group.rank()
        self.world = group.size()
        self.limit_s = torch_private.timeout(group, "cuda").total_seconds()
        self.lock = threading.Lock()
        self.device = torch.device("cpu")  # until the first call
        self.device_index = -1
        self.sms = 0
        self._generation = Generation("cuda", torch_private.store(group), self.rank, self.world)
        self._notices: Notices | None = None  # when the ranks have met
        self._agreed: set[str] = set()
        self._order = Order()
        self._bound = groups.state_of(name, BoundCalls)
        self._refused = 0  # of its calls, those that are counted in the order
        self._memory: CudaMemory | None = None
        self._kept: list[CudaMemory] = []  # of graphs that may still be replayed
        self._errors = torch.empty(0)
        self._state = ctypes.c_uint32(0)  # the record's first word
        self._dead = ""
        self._reported = False
        self._over = False  # nothing is to be looked for any more: it is closed, or its waits were ended
        self._next_look = 0.0

    @property
    def workspace_bytes(self) -> int:
        """Symmetric device memory that this rank owns, captured workspaces included."""
        return sum(memory.symmetric_bytes for memory in self._memories())

    @property
    def seat(self) -> Seat:
        """For what is prepared, once there is a device."""
        return Seat(self.rank, self.device_index, self.sms)

    def _memories(self) -> list[CudaMemory]:
        return [*self._kept, *([self._memory] if self._memory is not None else [])]

    def use(self, device: torch.device) -> None:
        """Before a call is bound: the first one's device is that of the group.

        Raises:
            ValueError: the tensors are on another device than those before.
        """
        with self.lock:
            if self.device_index < 0:
                self._settle_on(device)
        if device != self.device:
            raise ValueError(
                f"the tensors are on {device}, but fused ops of group {self.name!r} run on {self.device}, "
                f"where the tensors of rank {self.rank}'s first call were; move the tensors"
            )

    def _settle_on(self, device: torch.device) -> None:
        self._errors = cuda_memory.make_error_record(device)
        self._state = ctypes.c_uint32.from_address(self._errors.data_ptr())
        with torch.cuda.device(device):
            prepare_all()
        self.sms = torch.cuda.get_device_properties(device).multi_processor_count
        self.device, self.device_index = device, device.index
        cuda_watchdog.watch(self)

    def check(self) -> None:
        """Before a call touches CUDA: after a failed wait the process's CUDA context is gone.

        Raises:
            FusedOpError: the group has failed.
        """
        if self._dead:
            raise DeadGroupError(f"group {self.name!r} failed before: {self._dead}")
        if self._state.value:
            self._raise()

    def allow(self, prepared: Prepared) -> None:
        """Before anything of a call is made or recorded.

        Raises:
            ValueError: the call is being captured into a CUDA graph, and ranks have to meet before it.
        """
        if prepared.descriptor in self._agreed and not self._order.in_doubt:
            return
        if torch_private.capturing_here():
            raise not_prepared(prepared.descriptor, self.rank)

    def run(self, prepared: Prepared, op: str, *operands: object) -> None:
        """Puts a call on the current stream; `op` is the name of the workspace's method.

        Raises:
            ValueError: the call is being captured into a CUDA graph, but never ran before.
            FusedOpError: ranks do not match, did not come, or have no memory; the group is dead.
            RuntimeError: CUDA refused a copy or a launch; the group is dead unless it was a capture.
        """
        with self.lock:
            if self._dead:
                raise DeadGroupError(f"group {self.name!r} failed before: {self._dead}")
            self._count_refused()
            if prepared.descriptor not in self._agreed or self._order.in_doubt:
                self._agree(prepared)
            assert self._memory is not None
            try:
                ran = getattr(self._memory.workspace, op)(prepared.call, *operands)
            except Exception as error:
                # This rank is a call behind now: its next one could write what a peer still reads (rule R6).
                # Nothing of a capture has run yet.
                if not torch_private.capturing_here():
                    self.fail(f"{op} could not be started: {error}", self._order.begun + 1)
                raise
            if ran == _EAGER:
                self._order.begin(prepared.token)
        if not ran:
            self.check()

    def leave_out(self, prepared: Prepared, error: BaseException) -> None:
        """A call of this rank has failed before anything of it was begun. Peers may begin it all the same.

        The group lives on if all ranks leave it out; see cuda_order.py.
        """
        with self.lock:
            if self._dead or self._state.value or torch_private.capturing_here():
                return  # nothing of a capture has run
            self._order.leave_out()
            why = f"{prepared.descriptor} could not begin there ({type(error).__name__}: {error})"
            self._tell(why, self._order.begun + 1, dead=False)

    def _count_refused(self) -> None:
        """What this rank has refused before an engine saw it is left out as well."""
        refused = self._bound.refused - self._refused
        if not refused:
            return
        self._refused += refused
        self._order.leave_out(refused)
        self._tell("a call was refused there, whose error says why", self._order.begun + 1, dead=False)

    def _tell(self, why: str, call: int, dead: bool) -> None:
        if self._notices is not None:
            self._notices.tell(Notice(self.rank, call, self._order.left_out, dead, why))

    def _agree(self, prepared: Prepared) -> None:
        """Agrees with all ranks on a call that none like it ran before, and makes room for it."""
        self.allow(prepared)
        descriptor = prepared.descriptor
        try:
            self._compare(descriptor)
            if self._memory is None or not self._memory.capacity.covers(prepared.need):
                self._grow(prepared.need)
        except BaseException as error:
            self.fail(f"{type(error).__name__}: {error}", self._order.begun + 1)
            if self._order.left_out_here and isinstance(error, FusedOpError):
                raise DeadGroupError(
                    f"group {self.name!r} is dead since a call failed on rank {self.rank} before it began, "
                    f"and other ranks did begin it: {error}"
                ) from error
            raise
        self._order.settle()
        self._agreed.add(descriptor)

    def _raise(self) -> NoReturn:
        """Raises what a kernel has recorded."""
        deadline = time.monotonic() + 1
        while (error := self.error()) is None and time.monotonic() < deadline:
            time.sleep(0.001)  # the record is being written
        if error is None:  # whatever ended the context stopped the kernel in the middle of its record
            error = unfinished(self.name, self.rank)
        self.fail(f"{type(error).__name__}: {error}", self._order.begun)
        raise error

    def error(self) -> FusedOpError | None:
        """What a kernel of this group has recorded, if any. Needs no synchronisation, and no CUDA."""
        record = kernels.read_error(self._errors.data_ptr()) if self.device_index >= 0 else None
        if record is None:
            return None
        if record[0] == 0:  # this rank has ended the waits itself
            return PeerLostError(self._dead)
        return what_failed(record, self.name, self.rank, self.limit_s)

    def fail(self, why: str, call: int) -> None:
        """The group is dead, and the peers are told.

        Args:
            call: the first one that this rank has not begun, or not finished.
        """
        if self._dead:
            return
        self._dead = why
        self._generation.fail(why)
        self._tell(why, call, dead=True)

    def look(self) -> None:
        """See `cuda_watchdog.Watched`."""
        if self._over:
            return
        if (error := self.error()) is not None and not self._reported:
            self._reported = True
            _log.error("%s", error)
            self.fail(f"{type(error).__name__}: {error}", self._order.begun)
        if not self._dead and self.lock.acquire(blocking=False):  # else a call will see to it
            try:
                self._count_refused()
            finally:
                self.lock.release()
        self._listen()

    def _listen(self) -> FusedOpError | None:
        """Hears what peers will not do. What they do not, and this rank has begun, waits no longer."""
        if self._notices is None:
            return None
        self._order.hear(self._notices.news())
        verdict, notice = self._order.judge()
        if notice is None or (verdict == "doubt" and notice.left_out <= self._order.left_out):
            return None
        why = f"rank {notice.rank} of group {self.name!r} does not run call {notice.call}: {notice.why}. "
        why += REMEDY
        if verdict == "lost":
            why += f" Rank {self.rank} has begun that call. {PAST_USE}"
        error = PeerLostError(why)
        if verdict != "doubt":
            self.fail(f"{type(error).__name__}: {error}", min(notice.call, self._order.begun + 1))
        if verdict == "lost":
            self._over = True
            kernels.end_waits(self._errors.data_ptr())
            _log.error("%s", error)
        return error

    def end(self, error: BaseException) -> None:
        """Ends the group, for a failure outside of its calls."""
        self.fail(f"{type(error).__name__}: {error}", self._order.begun + 1)

    def close(self) -> None:
        """Frees the memory, once nothing runs in it any more; never raises."""
        healthy = not self._state.value
        self._dead = self._dead or "it was destroyed"
        self._over = True
        if not groups.ending():
            self._generation.leave()
        memories = self._memories()
        self._memory, self._kept = None, []
        if memories:
            # The record, too: waits look at it.
            cuda_memory.free([*memories, self._errors], self.device, healthy and not groups.ending())

    def _compare(self, descriptor: str) -> None:
        counts = [descriptor, *self._order.counts()]
        texts = self._meet(json.dumps([*counts, secrets.token_hex(8)]))
        for peer, text in enumerate(texts):
            if (theirs := json.loads(text)[:-1]) != counts:
                raise unlike_calls(self.name, self.rank, counts, peer, theirs)
        if self._notices is None:  # under a key that no other making of the group has
            key = sha256("".join(texts).encode()).hexdigest()[:16]
            self._notices = notices_of(torch_private.default_store(), key, self.rank)

    def _grow(self, need: Need) -> None:
        torch.cuda.synchronize(self.device)
        self._meet("")  # nothing of any rank is in flight: the old workspace may go
        old, self._memory = self._memory, None
        capacity = need.joined(old.capacity) if old is not None else need.joined(Need())
        if old is not None and old.workspace.captured:
            self._kept.append(old)
        del old
        place = Place(
            self.name, self.rank, self.world, self.device, self._errors, round(self.limit_s * 1e9), self._meet
        )
        self._memory = make_memory(place, capacity)

    def _meet(self, text: str) -> list[str]:
        return self._generation.meet(text, self.limit_s, self._check_peers)

    def _check_peers(self) -> None:
        """Raises while this rank waits for others on the host, if they cannot come any more."""
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + _LOOK_PERIOD_S
        if (error := self._listen()) is not None:
            raise error
