"""The shared state of one process group on the CUDA engine.

Workspaces, two slots in turn and the order of calls are described in csrc/cuda/workspace.h. Here is what all
ranks do together on the host: they agree on each call that they meet for the first time (rule R7), and make
the workspace larger when such a call needs it. Calls seen before cost no exchange: a running digest over all
calls is compared along with the next new one.
"""

from __future__ import annotations

import ctypes
import json
import threading
import time
from typing import NoReturn
from zlib import crc32

import torch
import torch.distributed as dist

from flux_inductor.runtime import cuda_watchdog, groups, rendezvous, torch_private
from flux_inductor.runtime.cuda_kernels import kernels, prepare_all, require_kernels
from flux_inductor.runtime.cuda_memory import CudaMemory, Need, Place, make_memory
from flux_inductor.runtime.cuda_prepare import Prepared
from flux_inductor.runtime.errors import DeadGroupError, FusedOpError, MismatchError, PeerTimeoutError

REMEDY = "The group is dead for fused ops now; destroy it and make it anew."
_OPS = {1: "all_gather_matmul", 2: "matmul_reduce_scatter"}


def _drained(device: torch.device) -> bool:
    """Waits until the device is idle; false if it cannot be waited for."""
    try:
        if torch.cuda.is_current_stream_capturing():
            return False  # waiting would break the capture
        torch.cuda.synchronize(device)
    except RuntimeError:  # the context is broken
        return False
    return True


def _never_free(kept: object) -> None:
    """It goes with the process: by one reference that nobody gives back."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


class CudaGroup:
    """What this rank keeps for one process group. See `groups.GroupState`."""

    def __init__(self, name: str, group: dist.ProcessGroup) -> None:
        require_kernels()
        self.name = name
        self.rank = group.rank()
        self.world = group.size()
        self.limit_s = torch_private.timeout(group, "cuda").total_seconds()
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.device_index = self.device.index
        self.lock = threading.Lock()
        self._store = torch_private.store(group)
        self._prefix = ""
        self._meetings = 0
        self._agreed: set[str] = set()
        self._digest = 0
        self._calls = 0
        self._memory: CudaMemory | None = None
        self._kept: list[CudaMemory] = []  # of graphs that may still be replayed
        self._errors = torch.zeros(kernels.ERROR_RECORD_BYTES, dtype=torch.uint8).pin_memory()
        self._state = ctypes.c_uint32.from_address(self._errors.data_ptr())  # the record's first word
        self._dead = ""
        prepare_all()
        cuda_watchdog.watch(self)

    @property
    def workspace_bytes(self) -> int:
        """Symmetric device memory that this rank owns, captured workspaces included."""
        return sum(memory.symmetric_bytes for memory in self._memories())

    def _memories(self) -> list[CudaMemory]:
        return [*self._kept, *([self._memory] if self._memory is not None else [])]

    def check(self) -> None:
        """Before a call touches CUDA: after a failed wait the process's CUDA context is gone.

        Raises:
            FusedOpError: the group has failed.
        """
        if self._dead:
            raise DeadGroupError(f"group {self.name!r} failed before: {self._dead}")
        if self._state.value:
            self._raise()

    def check_device(self, device: torch.device) -> None:
        """ValueError for tensors on another device than the one that the group's memory is on."""
        if device != self.device:
            raise ValueError(
                f"the tensors are on {device}, but fused ops of group {self.name!r} run on {self.device}, "
                f"which was rank {self.rank}'s current device at the first of them; call "
                f"torch.cuda.set_device({device.index}) before it, or move the tensors"
            )

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
            if prepared.descriptor not in self._agreed:
                self._agree(prepared)
            assert self._memory is not None
            self._digest = crc32(prepared.token, self._digest)
            self._calls += 1
            try:
                done = getattr(self._memory.workspace, op)(prepared.call, *operands)
            except Exception as error:
                # This rank is a call behind now: its next one could write what a peer still reads (rule R6).
                # Nothing of a capture has run yet.
                if not torch.cuda.is_current_stream_capturing():
                    self.fail(f"{op} could not be started: {error}")
                raise
        if not done:
            self.check()

    def _agree(self, prepared: Prepared) -> None:
        """Agrees with all ranks on a call that none like it ran before, and makes room for it."""
        descriptor = prepared.descriptor
        if torch.cuda.is_current_stream_capturing():
            raise ValueError(
                f"{descriptor} is captured into a CUDA graph, but rank {self.rank} never ran it. "
                "Ranks agree on a call and make room for it at its first run, and a capture cannot wait "
                "for other ranks: run the function once with the same shapes before capturing it."
            )
        try:
            self._compare(descriptor)
            if self._memory is None or not self._memory.capacity.covers(prepared.need):
                self._grow(prepared.need)
        except BaseException as error:
            self.fail(f"{type(error).__name__}: {error}")
            raise
        self._agreed.add(descriptor)

    def _raise(self) -> NoReturn:
        """Raises what a kernel has recorded."""
        deadline = time.monotonic() + 1
        while (error := self.error()) is None and time.monotonic() < deadline:
            time.sleep(0.001)  # the record is being written
        if error is None:  # whatever ended the context stopped the kernel in the middle of its record
            error = FusedOpError(
                f"a fused op of group {self.name!r} failed on rank {self.rank}, and the kernel was stopped "
                "before it could say why; this process can no longer use its GPU: end it, and start the "
                "program again"
            )
        self.fail(f"{type(error).__name__}: {error}")
        raise error

    def error(self) -> FusedOpError | None:
        """What a kernel of this group has recorded, if any. Needs no synchronisation, and no CUDA."""
        record = kernels.read_error(self._errors.data_ptr())
        if record is None:
            return None
        op, source, chunk, expected, seen = record
        what = f"chunk {chunk} of rank {source}'s shard"
        if op == 2:
            what = f"chunk {chunk} of rank {source}'s partial product"
        if chunk == kernels.MEETING_CHUNK:
            what = f"rank {source} to enter the call"
        if chunk == kernels.OWN_COPIES_CHUNK:
            what = "its own copies to its peers"
        return PeerTimeoutError(
            f"{_OPS[op]} on rank {self.rank} of group {self.name!r} waited {self.limit_s:g} s for {what}: "
            f"its signal shows epoch {seen}, expected {expected}. The kernel has trapped, so that nothing "
            "used its result; this process can no longer use its GPU: end it, and start the program again. "
            "If the rank is only slow, raise the time-out of the process group."
        )

    def fail(self, why: str) -> None:
        self._dead = self._dead or why

    def end(self, error: BaseException) -> None:
        """Ends the group, for a failure outside of its calls."""
        self.fail(f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """Frees the memory, once nothing runs in it any more; never raises."""
        healthy = not self._state.value
        self._dead = self._dead or "it was destroyed"
        memories = self._memories()
        in_use = (memories, self._errors)  # waits look at the record: other data in it would end them
        self._memory = None
        self._kept.clear()
        # A peer's kernel may still look whether its last signal has got here. The memory stays as long as
        # the peer maps it, but torch would give it to others; so it is never given back: some pages of 2 MiB.
        for memory in memories:
            _never_free(memory.signals)
        if memories and not (healthy and not groups.ending() and _drained(self.device)):
            # A kernel may still use it, or the context is gone, and to free it would end the process badly.
            _never_free(in_use)

    def _compare(self, descriptor: str) -> None:
        own = json.dumps([descriptor, self._calls, self._digest])
        for peer, text in enumerate(self._meet(own)):
            if text == own:
                continue
            theirs, calls, _ = json.loads(text)
            raise MismatchError(
                f"rank {self.rank} of group {self.name!r} does not match rank {peer}.\n"
                f"  rank {self.rank}: call {self._calls}, {descriptor}\n"
                f"  rank {peer}: call {calls}, {theirs}\n"
                "All ranks of a group must run the same fused ops in one order; if these two are the same, "
                f"an earlier call differed. {REMEDY}"
            )

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
        if not self._prefix:
            # Each making of the group has its own keys, so that none of a destroyed one are read.
            made = self._store.add(f"flux_inductor/cuda/made/{self.rank}", 1)
            self._prefix = f"flux_inductor/cuda/{made}"
        self._meetings += 1
        return rendezvous.exchange_texts(
            self._store,
            f"{self._prefix}/{self._meetings}",
            self.rank,
            self.world,
            text,
            self.limit_s,
            lambda: None,
        )
