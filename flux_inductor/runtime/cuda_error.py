"""What the error record of a CUDA group says, in words."""

from __future__ import annotations

from typing import Any

from flux_inductor.runtime.cuda_kernels import kernels
from flux_inductor.runtime.errors import REMEDY, FusedOpError, MismatchError, PeerTimeoutError

_OPS = {1: "all_gather_matmul", 2: "matmul_reduce_scatter"}
PAST_USE = (
    "The kernel has trapped, so that nothing used its result; this process can no longer use its GPU: end "
    "it, and start the program again."
)


Record = tuple[int, int, int, int, int]  # op, source, chunk, expected and seen epoch


def what_failed(record: Record, group: str, rank: int, limit_s: float) -> FusedOpError:
    """What a kernel of `rank` has recorded."""
    op, source, chunk, expected, seen = record
    where = f"{_OPS[op]} on rank {rank} of group {group!r}"
    if chunk == kernels.UNLIKE_CHUNK:
        return MismatchError(
            f"{where}: rank {source} is in another call, or in the same one in another way: one of the two "
            "replays a CUDA graph where the other one calls the op. Capture and replay on all ranks alike. "
            f"{PAST_USE}"
        )
    what = f"chunk {chunk} of rank {source}'s shard"
    if op == 2:
        what = f"chunk {chunk} of rank {source}'s partial product"
    if chunk == kernels.MEETING_CHUNK:
        what = f"rank {source} to enter the call"
    if chunk == kernels.OWN_COPIES_CHUNK:
        what = "its own copies to its peers"
    return PeerTimeoutError(
        f"{where} waited {limit_s:g} s for {what}: its signal shows epoch {seen}, expected {expected}. "
        f"{PAST_USE} If the rank is only slow, raise the timeout of the process group."
    )


def unlike_calls(group: str, rank: int, own: list[Any], peer: int, theirs: list[Any]) -> MismatchError:
    """For ranks that are about to begin different calls, or have begun different ones before.

    Args:
        own, theirs: the descriptor of the call that comes next, and `cuda_order.Order.counts`.
    """
    return MismatchError(
        f"rank {rank} of group {group!r} does not match rank {peer}.\n"
        f"  rank {rank}: {_described(*own)}\n"
        f"  rank {peer}: {_described(*theirs)}\n"
        "All ranks of a group must run the same fused ops in one order; if these two are the same, an "
        f"earlier call differed. {REMEDY}"
    )


def _described(descriptor: str, begun: int, left_out: int, _: int) -> str:
    return f"call {begun + 1}, {descriptor}" + (f", after {left_out} that failed" if left_out else "")


def not_prepared(descriptor: str, rank: int) -> ValueError:
    """For a call that ranks must meet for, in a capture."""
    return ValueError(
        f"{descriptor} is captured into a CUDA graph, but rank {rank} never ran it, or a rank has left out a "
        "call since. Ranks agree on a call and make room for it at its first run, and a capture cannot wait "
        "for other ranks: run the function once with the same shapes before capturing it."
    )


def unfinished(group: str, rank: int) -> FusedOpError:
    """For a record that was begun, and never finished."""
    return FusedOpError(
        f"a fused op of group {group!r} failed on rank {rank}, and the kernel was stopped before it could "
        "say why; this process can no longer use its GPU: end it, and start the program again"
    )
