"""Which making of a process group a meeting belongs to.

A group that is destroyed and made anew may have its old name and its old keys in the store: the default
group, and groups of `new_group(use_local_synchronization=True)`, whose name is a hash of their ranks. (Other
groups are numbered: each making has keys of its own.) Ranks cannot count makings, each for itself: one whose
data loader failed has never used the old making, and would count one less for ever.

So each rank draws a random number for each making that it uses, and publishes it with what it has seen of the
others'. A generation is the list of all ranks' numbers, and it is agreed on when every rank publishes the
same list. Texts of a meeting have the list in their keys.

**No text of another making is read.** A list that rank A agrees on contains A's new number. Whoever publishes
that list, or writes under it, has read the number after A drew it.

**Ranks that all use the new making agree on it.** Each rank's number is then its last, every rank comes to
see all of them, and publishes the same list; what it published before was another one.

Two ranks, of which 0 had used the old making and failed there, and 1 had not: 0's old number is in the store
when 1 comes. Either it has left the making: then its number counts for nothing, and 1 waits for the new one.
Or it has not: then 1 is late in the old making, and raises the failure at once. For a state is closed by
`destroy_process_group`, at the latest (see groups.py), and gloo makes a group on all ranks together: so 1 is
in a new making only after 0 has destroyed the old one.

NCCL makes a group on each rank by itself. If 1 makes it anew while 0 still uses the old one, 1 ignores 0's
old number if it knows it from the old making, and waits for the new one. If it does not know it (it never
used the old making), the two agree, as NCCL's own communicators do, which exchange their id under one key:
programs must not make such groups anew before all ranks have destroyed them.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace

from torch._C._distributed_c10d import PrefixStore, Store

from flux_inductor.runtime.errors import PeerLostError, PeerTimeoutError, peer_failure

LOOK_PERIOD_S = 0.1  # between looks for peers that have failed or left, while texts of a meeting are missing
_KEY = "flux_inductor/generation"  # in the group's store


@dataclass(frozen=True)
class _Record:
    """What a rank publishes of one making.

    Args:
        seen: the ranks' numbers, "" for those that it has not seen.
        failed: why its group is dead; "" if it is not.
        left: it has destroyed this making.
    """

    seen: tuple[str, ...]
    failed: str = ""
    left: bool = False


# Numbers of peers in makings that this process has left.
_past: set[str] = set()


class Generation:
    """What one engine of this rank shares with those of the others in one making of a process group.

    Args:
        engine: its name; engines of one group know nothing of each other.
        store: the group's.
    """

    def __init__(self, engine: str, store: Store, rank: int, world: int) -> None:
        self.rank = rank
        self.world = world
        self._store = PrefixStore(f"{_KEY}/{engine}", store)
        self._number = secrets.token_hex(8)
        self._record = _Record(tuple(self._number if peer == rank else "" for peer in range(world)))
        self._published = False
        self._changing = threading.Lock()  # a thread may close the group beside another's call
        self._agreed = ""
        self._meetings = 0
        self._companions: set[str] = set()  # numbers of peers that have seen this rank's
        self._live: set[str] = set()  # numbers of peers that had not left when this rank saw them

    def meet(self, text: str, limit_s: float, check: Callable[[], None]) -> list[str]:
        """The texts of all ranks at this meeting; the ranks come to all meetings in one order.

        Args:
            limit_s: how long to wait for the others.
            check: called again and again meanwhile; raises to give up.

        Raises:
            PeerTimeoutError: ranks did not come in time.
            PeerLostError: a rank has destroyed the group, or has made it anew.
            FusedOpError: of the class that a rank named when it failed (see `fail`).
        """
        deadline, expired = time.monotonic() + limit_s, f"waited {limit_s:g} s for ranks"
        self._open(deadline, expired, check)
        self._meetings += 1
        prefix = f"meeting/{self._agreed}/{self._meetings}"
        self._store.set(f"{prefix}/{self.rank}", text)
        waiting, next_look = _Waiting(deadline, expired, check), 0.0
        missing = [peer for peer in range(self.world) if peer != self.rank]
        while missing := [peer for peer in missing if not self._store.check([f"{prefix}/{peer}"])]:
            if time.monotonic() > next_look:
                self.look(missing)
                next_look = time.monotonic() + LOOK_PERIOD_S
            waiting.pause(missing)
        return [self._store.get(f"{prefix}/{peer}").decode() for peer in range(self.world)]

    def look(self, awaited: list[int]) -> None:
        """Raises if a rank of this generation has failed, or one of those awaited has left. Waits for nobody.

        Raises:
            PeerLostError, FusedOpError: as `meet`.
        """
        for peer, number in enumerate(self._record.seen):
            if peer == self.rank or not number:
                continue
            record = self._read(number)
            if record.failed:
                raise peer_failure(peer, record.failed)
            if record.left and peer in awaited:
                raise PeerLostError(f"rank {peer} has destroyed the group")

    def fail(self, why: str) -> None:
        """Tells ranks that wait in a meeting, or come to one, that this rank's group is dead. Never raises.

        Args:
            why: the name of the error's class, a colon, its text.
        """
        with self._changing:
            if not self._record.failed:
                self._change(replace(self._record, failed=why))

    def leave(self) -> None:
        """Tells the other ranks that this one has destroyed the group. Never raises."""
        with self._changing:
            _past.update(self._companions)
            if self._published:
                self._change(replace(self._record, left=True))

    def _change(self, record: _Record) -> None:
        self._record = record
        with suppress(RuntimeError):  # the store has ended, and nobody can be told
            self._publish()

    def _publish(self) -> None:
        self._store.set(self._key(self._number), json.dumps(asdict(self._record)))
        if not self._published:  # who finds the number finds its record
            self._store.set(f"number/{self.rank}", self._number)
            self._published = True

    def _open(self, deadline: float, expired: str, check: Callable[[], None]) -> None:
        """Agrees with all ranks on the generation, once."""
        waiting = _Waiting(deadline, expired, check)
        while not self._agreed:
            seen, absent = self._look_around()
            with self._changing:
                if not self._published or seen != self._record.seen:
                    self._record = replace(self._record, seen=seen)
                    self._publish()
            if absent:
                waiting.pause(absent)
            else:
                self._agreed = hashlib.sha256(" ".join(seen).encode()).hexdigest()[:16]

    def _look_around(self) -> tuple[tuple[str, ...], list[int]]:
        """The ranks' numbers, and the ranks that do not publish the same ones."""
        seen, records = list(self._record.seen), {}
        for peer in range(self.world):
            if peer == self.rank:
                continue
            number = self._number_of(peer)
            if not number:
                continue
            record = self._read(number)
            if not record.left:
                self._live.add(number)
            if self._number in record.seen:
                self._companions.add(number)
            if record.failed and number in self._live:
                self._companions.add(number)
                raise peer_failure(peer, record.failed)
            seen[peer] = "" if record.left else number
            records[peer] = record.seen
        return tuple(seen), [
            peer for peer in range(self.world) if peer != self.rank and records.get(peer) != tuple(seen)
        ]

    def _number_of(self, peer: int) -> str:
        """The last that a rank has published; "" if there is none, or one of a making that is past."""
        key = f"number/{peer}"
        number = self._store.get(key).decode() if self._store.check([key]) else ""
        return "" if number in _past else number

    def _read(self, number: str) -> _Record:
        fields = json.loads(self._store.get(self._key(number)))
        return _Record(tuple(fields["seen"]), fields["failed"], fields["left"])

    @staticmethod
    def _key(number: str) -> str:
        return f"record/{number}"


class _Waiting:
    """For something in a store: in pauses that grow, up to a deadline."""

    def __init__(self, deadline: float, expired: str, check: Callable[[], None]) -> None:
        self._deadline, self._expired, self._check = deadline, expired, check
        self._pause_s = 0.0002

    def pause(self, missing: list[int]) -> None:
        """Raises PeerTimeoutError when it is too late."""
        self._check()
        if time.monotonic() > self._deadline:
            raise PeerTimeoutError(f"{self._expired} {missing} to begin their call")
        time.sleep(self._pause_s)
        self._pause_s = min(1.5 * self._pause_s, 0.02)
