"""One call of a fused op on the CPU engine: its waits, and what their failures mean to people."""

from __future__ import annotations

from torch import Tensor

from flux_inductor import _core
from flux_inductor.runtime import errors, trace
from flux_inductor.runtime.errors import REMEDY, FusedOpError


class Call:
    """What the ops of cpu_gather.py and cpu_scatter.py do with the workspace while they run."""

    def __init__(self, op: str, descriptor: str, rank: int, group: str, limit_s: float) -> None:
        self.op = op
        self.descriptor = descriptor
        self.rank = rank
        self.group = group
        self.limit_s = limit_s
        self.workspace: _core.Workspace | None = None  # once the ranks have met

    @property
    def where(self) -> str:
        return f"{self.op} on rank {self.rank} of group {self.group!r}"

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
        with trace.span(self.rank, "wait", owner, index):
            outcome = self.workspace.wait(signal, peer)
        if outcome is not None:
            raise self._error(outcome, f"chunk {index} of rank {owner}'s shard from rank {peer}")

    def check(self, outcome: _core.Outcome | None) -> None:
        if outcome is not None:
            raise self._error(outcome, "the end of its transfers")

    def mismatch(self, peer: int, theirs: str) -> errors.MismatchError:
        return errors.MismatchError(
            f"{self.where} does not match what rank {peer} calls at the same place in the group's order.\n"
            f"  rank {self.rank}: {self.descriptor}\n"
            f"  rank {peer}: {theirs}\n"
            f"All ranks of a group must run the same fused ops in one order. {REMEDY}"
        )

    def _error(self, outcome: _core.Outcome, awaited: str) -> FusedOpError:
        if outcome.verdict == "mismatch":
            return self.mismatch(outcome.peer, outcome.text)
        if outcome.verdict == "failed":
            kind = getattr(errors, outcome.text.partition(":")[0], FusedOpError)
            error: FusedOpError = kind(
                f"{self.where} gave up because rank {outcome.peer} failed: {outcome.text}"
            )
            return error
        state = f"the signal of rank {outcome.peer} shows epoch {outcome.seen}, expected {outcome.expected}"
        if outcome.verdict == "lost":
            return errors.PeerLostError(
                f"{self.where} waited for {awaited}, but rank {outcome.peer} has ended or has destroyed the "
                f"group ({state}). {REMEDY}"
            )
        return errors.PeerTimeoutError(
            f"{self.where} waited {self.limit_s:g} s for {awaited}: {state}. If the rank is only slow, "
            "raise the timeout of the process group; FLUX_INDUCTOR_ENGINE must be the same on all ranks. "
            f"{REMEDY}"
        )
