"""Which calls this rank has put on its device, which it had to leave out, and what its peers say of theirs.

A kernel takes whatever a peer sends as call i for call i, so ranks must never disagree on which call that
is. They do if a call fails on one rank before it begins (no memory for its results, say), and the program
goes on. Without a rule, rank 0 leaves out batch 1, rank 1 does not: then rank 0's batch 2 meets rank 1's
batch 1, all sizes are the same, and both ranks get wrong results without a word.

The rule: a rank that has left out a call begins no other one before all ranks have met on the host and told
how many calls they have begun and left out. At the same time it publishes a notice in the store, with the
index of the call. Each rank's watchdog reads notices (a few times a second):

- If the rank has begun that call, its kernels wait, or will, for data that never come: it ends their waits,
  and its group is dead. Rank 0's next call meets nobody, finds the group dead, and says so.
- If it has not, it takes part in the meeting before its next call. Where all ranks have left out the same
  calls, as when all of them run out of memory, they go on; otherwise all of them raise.

So data of one call are never taken for another's: what has been sent was sent by ranks whose numbers
agreed, and the rank that left out a call sends nothing until they agree again. A rank whose group died
publishes a notice as well, of the first call that it has not begun: peers that have begun it would wait up
to their time limit.
"""

from __future__ import annotations

import json
import threading
import weakref
from dataclasses import asdict, dataclass
from typing import Literal, TypeAlias
from zlib import crc32

from torch._C._distributed_c10d import PrefixStore, Store

from flux_inductor.runtime import torch_private

Verdict: TypeAlias = Literal["none", "doubt", "dead", "lost"]


@dataclass(frozen=True)
class Notice:
    """What a rank tells the others of a call that it has not begun.

    Args:
        call: the index of the call among those that the rank has begun, from 1 on.
        left_out: how many calls the rank has left out so far, this one included.
        dead: the rank's group is dead.
        why: what happened there.
    """

    rank: int
    call: int
    left_out: int
    dead: bool
    why: str


class Order:
    """Counts calls. Those captured into a graph do not count: who replays it, and when, is unknown."""

    def __init__(self) -> None:
        self.begun = 0
        self.left_out = 0
        self._settled = 0  # of those left out, by all ranks alike
        self._noticed = 0  # of those left out, by the rank that left out most
        self._notices: list[Notice] = []
        self._digest = 0

    @property
    def in_doubt(self) -> bool:
        """Whether ranks must compare their counts before the next call."""
        return self.left_out_here or self._noticed > self._settled

    @property
    def left_out_here(self) -> bool:
        """Whether this rank has left out calls of which it does not know yet whether all have."""
        return self.left_out > self._settled

    def begin(self, token: bytes) -> None:
        """One more call is on the device; `token` stands for what all ranks agreed on."""
        self._digest = crc32(token, self._digest)
        self.begun += 1

    def leave_out(self, calls: int = 1) -> None:
        self.left_out += calls

    def settle(self) -> None:
        """All ranks have the same counts."""
        self._settled = self.left_out

    def counts(self) -> list[int]:
        """Equal on all ranks that ran the same calls in one order."""
        return [self.begun, self.left_out, self._digest]

    def hear(self, notices: list[Notice]) -> None:
        self._notices += notices
        self._noticed = max([self._noticed, *(notice.left_out for notice in notices)])

    def judge(self) -> tuple[Verdict, Notice | None]:
        """What notices mean for this rank, and which one does: "lost" if the rank has begun the call.

        A rank counts a call when it is on the device, so all notices are looked at again each time.
        """
        for notice in self._notices:
            # In this order: once a call is counted that follows a meeting, the meeting's end is visible.
            if self.begun >= notice.call and self._open(notice):
                return "lost", notice
        for notice in self._notices:
            if notice.dead:
                return "dead", notice
        for notice in self._notices:
            if self._open(notice):
                return "doubt", notice
        return "none", None

    def _open(self, notice: Notice) -> bool:
        return notice.dead or notice.left_out > self._settled


class Notices:
    """Those of one group, in a store.

    Args:
        store: one that all ranks of the group share.
        rank: this one.
    """

    def __init__(self, store: Store, rank: int) -> None:
        self._store = store
        self._rank = rank
        self._next = 1
        self._reading = threading.Lock()  # by the watchdog, and by a call that waits in a meeting

    def tell(self, notice: Notice) -> None:
        """Never raises: a store that has ended has nobody to tell."""
        try:
            self._store.set(f"notice/{self._store.add('notices', 1)}", json.dumps(asdict(notice)))
        except RuntimeError:
            return

    def news(self) -> list[Notice]:
        """The other ranks' notices since the last time. Never raises."""
        with self._reading:
            return self._read()

    def _read(self) -> list[Notice]:
        found: list[Notice] = []
        try:
            while self._store.check([f"notice/{self._next}"]):
                notice = Notice(**json.loads(self._store.get(f"notice/{self._next}")))
                self._next += 1
                if notice.rank != self._rank:
                    found.append(notice)
        except RuntimeError:
            return found
        return found


_connections: weakref.WeakKeyDictionary[Store, Store] = weakref.WeakKeyDictionary()
_connecting = threading.Lock()


def notices_of(store: Store, key: str, rank: int) -> Notices:
    """The notices under `key`, over a connection that all groups of this process share.

    It is not the program's own: that one serves nobody else while a thread of the program waits for a key.
    """
    with _connecting:
        if store not in _connections:
            _connections[store] = torch_private.own_connection(store)
        return Notices(PrefixStore(f"flux_inductor/cuda/{key}", _connections[store]), rank)
