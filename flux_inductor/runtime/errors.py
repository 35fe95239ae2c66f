"""What can go wrong while ranks work together. After any of these the group is dead for fused ops."""

from __future__ import annotations

REMEDY = "The group is dead for fused ops now; destroy it and make it anew."


class FusedOpError(RuntimeError):
    """A fused op could not be carried out; the message names the rank, the group, the op and the remedy."""


class MismatchError(FusedOpError):
    """Ranks of one group called different fused ops, shapes or plans at the same place in their order."""


class PeerTimeoutError(FusedOpError, TimeoutError):
    """A peer did not come, or not go on, within the timeout of the process group."""


class PeerLostError(FusedOpError, ConnectionError):
    """A peer's process has ended, or has destroyed the group, in the middle of a call."""


class WorkspaceError(FusedOpError):
    """A workspace could not be made or reached: not enough memory, another host, another user."""


class DeadGroupError(FusedOpError):
    """The group failed in an earlier call; destroy it and make it anew."""


def peer_failure(peer: int, why: str) -> FusedOpError:
    """What a rank raises because a peer has failed: of the peer's class, if that is one of these.

    Args:
        why: the name of the peer's error's class, a colon, its text.
    """
    kinds = {kind.__name__: kind for kind in FusedOpError.__subclasses__()}
    return kinds.get(why.partition(":")[0], FusedOpError)(f"rank {peer} failed: {why}")
