"""The shared state of one process group on the CUDA engine.

Workspaces, two slots in turn and the order of calls are described in csrc/cuda/workspace.h. Here is what all
ranks do together on the host: they agree on each call that they meet for the first time (rule R7), and make
the workspace larger when such a call needs it. Calls seen before cost no exchange: a running digest over all
calls is compared along with the next new one.
"""

from __future__ import annotations

import json
import threading
import time
import zlib
from collections.abc import Callable, Hashable
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from flux_inductor.runtime import cuda_watchdog, rendezvous, torch_private
from flux_inductor.runtime.cuda_kernels import kernels, prepare_all, require_kernels
from flux_inductor.runtime.cuda_memory import CudaMemory, Need, Place, make_memory
from flux_inductor.runtime.cuda_prepare import Prepared
from flux_inductor.runtime.errors import DeadGroupError, FusedOpError, MismatchError, PeerTimeoutError

REMEDY = "The group is dead for fused ops now; destroy it and make it anew."
_OPS = {1: "all_gather_matmul", 2: "matmul_reduce_scatter"}


class CudaGroup:
    """What this rank keeps for one process group. See `groups.GroupState`."""

    def __init__(self, name: str, group: dist.ProcessGroup) -> None:
        require_kernels()
        self.name = name
        self.rank = group.rank()
        self.world = group.size()
        self.limit_s = torch_private.timeout(group, "cuda").total_seconds()
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.lock = threading.Lock()
        self._store = torch_private.store(group)
        self._prefix = ""
        self._meetings = 0
        self._prepared: dict[Hashable, tuple[Prepared, bytes]] = {}
        self._agreed: set[str] = set()
        self._digest = 0
        self._calls = 0
        self._memory: CudaMemory | None = None
        self._kept: list[CudaMemory] = []  # of graphs that may still be replayed
        self._errors = torch.zeros(kernels.ERROR_RECORD_BYTES, dtype=torch.uint8).pin_memory()
        self._dead = ""
        prepare_all()
        cuda_watchdog.watch(self)

    @property
    def workspace_bytes(self) -> int:
        """Symmetric device memory that this rank owns, captured workspaces included."""
        memories = [*self._kept, *([self._memory] if self._memory is not None else [])]
        return sum(memory.symmetric_bytes for memory in memories)

    def run(
        self, key: Hashable, prepare: Callable[[], Prepared], call: Callable[[Any, Prepared], bool]
    ) -> None:
        """Runs a call in the group's workspace.

        Args:
            key: what `prepare` depends on.
            call: puts it on the streams, given the workspace; false if the group has failed.

        Raises:
            ValueError: the kernels cannot run it, or it is being captured into a CUDA graph unprepared.
            FusedOpError: ranks do not match, did not come, or have no memory; the group is dead.
        """
        with self.lock:
            if self._dead:
                raise DeadGroupError(f"group {self.name!r} failed before: {self._dead}")
            known = self._prepared.get(key)
            if known is None:
                known = self._prepared[key] = self._prepare(prepare())
            prepared, token = known
            self._digest = zlib.crc32(token, self._digest)
            self._calls += 1
            assert self._memory is not None
            if not call(self._memory.workspace, prepared):
                self._raise()

    def _prepare(self, prepared: Prepared) -> tuple[Prepared, bytes]:
        """Agrees with all ranks on a call, and makes room for it, unless one like it ran before."""
        descriptor = prepared.descriptor
        if descriptor not in self._agreed:
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
        return prepared, descriptor.encode()

    def _raise(self) -> NoReturn:
        """Raises what a kernel has recorded."""
        deadline = time.monotonic() + 1
        while (error := self.error()) is None and time.monotonic() < deadline:
            time.sleep(0.001)  # the record is being written
        assert error is not None
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
        return PeerTimeoutError(
            f"{_OPS[op]} on rank {self.rank} of group {self.name!r} waited {self.limit_s:g} s for {what}: "
            f"its signal shows epoch {seen}, expected {expected}. Results of this call and of later ones are "
            f"wrong. If the rank is only slow, raise the time-out of the process group. {REMEDY}"
        )

    def fail(self, why: str) -> None:
        self._dead = self._dead or why

    def close(self) -> None:
        # No CUDA call that may fail: the process may be at its end, or its context broken.
        self._dead = self._dead or "it was destroyed"
        self._memory = None
        self._kept.clear()

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
