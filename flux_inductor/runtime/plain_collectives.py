"""Whether a program also runs plain collectives beside its fused ops: rule R2, for ops called eagerly.

A collective that was started before a fused op, and is waited for behind it, needs SMs while the op runs if
it gets to run on some rank only after the op has begun: its kernels wait for each other, and so do the op's.
A compiled graph shows what is in flight beside an op. Eager code does not. But NCCL counts the collectives of
a group, so an op leaves SMs to them as soon as there has been one.

Counted are groups that all of the op's ranks are in. These ranks have issued the same collectives in one
order, so that all of them come to the same answer at the same call. What a rank shares with others is known
from the topology. An op that runs unfused waits for its collective at once, so that this one does not count.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.distributed as dist

from flux_inductor.runtime import torch_private
from flux_inductor.runtime.groups import process_group, state_of

MOST = 2  # groups whose collectives are taken to be in flight at once


class _Counters:
    """Those of the groups around one process group. See `groups.GroupState`."""

    def __init__(self, name: str, group: dist.ProcessGroup) -> None:
        self.seen = 0
        self.own = 0  # collectives of the group's ops
        self.groups = 0
        self.read: list[Callable[[], int]] = []

    def close(self) -> None:
        self.read.clear()


def count_own(group: str) -> None:
    """An op has run a collective of `group` itself."""
    state_of(group, _Counters).own += 1


def communicators_seen(group: str) -> int:
    """How many groups have run plain collectives of all ranks of `group`, up to `MOST`. It never falls."""
    counters = state_of(group, _Counters)
    if counters.seen < MOST:
        groups = torch_private.number_of_groups()
        if groups != counters.groups:
            counters.groups, counters.read = groups, _counters_around(process_group(group))
        moved = sum(read() > 0 for read in counters.read)
        counters.seen = max(counters.seen, min(moved, MOST))
    return counters.seen


def _counters_around(group: dist.ProcessGroup) -> list[Callable[[], int]]:
    ranks = set(dist.get_process_group_ranks(group))
    counters: list[Callable[[], int]] = []
    for other in torch_private.all_groups():
        counter = torch_private.collective_counter(other)
        if counter is not None and ranks <= set(dist.get_process_group_ranks(other)):
            counters.append(partial(_plain, counter, state_of(other.group_name, _Counters)))
    return counters


def _plain(counter: Callable[[], int], known: _Counters) -> int:
    return counter() - known.own
