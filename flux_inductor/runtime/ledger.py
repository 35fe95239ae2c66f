"""A rank's page of shared memory in which the other ranks of its host read what it has run.

It has a header, a ring of the latest runs (where each began in the count of collectives, and which sequence
of collectives it was), and records of those sequences. One process writes, others read whenever they like;
each word is written at once, and a record is complete before a word points to it. A run costs its writer two
stores. No thread has to answer for a rank that is busy or waits.
"""

from __future__ import annotations

import json
import mmap
import os
import random
from dataclasses import dataclass

from flux_inductor.planning.exchange import Site, Stand, Verdict
from flux_inductor.runtime.detect import host_identity
from flux_inductor.runtime.errors import WorkspaceError

_TOKEN, _RUNS, _BEGUN, _FUSED, _CAPTURED, _LEFT, _FAILURE = range(7)  # words of the header
_HEADER = 8
RING = 4096  # runs that others can still read about
_IDS = 24  # bits of a ring's word that name the record, by its first word; the others count collectives
WORDS = 1 << 21  # of the page, which takes memory only where something was written


@dataclass(frozen=True)
class Handle:
    """How peers find a page: /proc/<pid>/fd/<fd>, with a random token in its first word."""

    pid: int
    fd: int
    token: int
    host: str
    pids: str

    def to_json(self) -> str:
        return json.dumps([self.pid, self.fd, self.token, self.host, self.pids])

    @staticmethod
    def from_json(text: str | bytes) -> Handle:
        return Handle(*json.loads(text))


def _namespace() -> str:
    return os.readlink("/proc/self/ns/pid")


class _Page:
    """Words and records; a record is its count of sites, a word of state for each, then text."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self.words = memoryview(memory).cast("q")

    def text(self, word: int) -> str:
        start = 8 * (word + 1)
        return str(self._memory[start : start + self.words[word]], "utf-8")

    def verdict(self, record: int, number: int) -> Verdict | None:
        state = self.words[record + 1 + number]
        if state == 0:
            return None
        return Verdict(*json.loads(self.text(abs(state))))

    def texts(self, record: int) -> list[str]:
        """Digest of a sequence, then its sites."""
        return self.text(record + 1 + self.words[record]).split("\n")

    def close(self) -> None:
        self.words.release()
        self._memory.close()


class Ledger(_Page):
    """This rank's own page.

    Raises:
        WorkspaceError: there is no shared memory.
    """

    def __init__(self) -> None:
        try:
            self._fd = os.memfd_create("flux_inductor_ledger", os.MFD_CLOEXEC)
            os.ftruncate(self._fd, 8 * WORDS)
            super().__init__(mmap.mmap(self._fd, 8 * WORDS))
        except OSError as error:
            raise WorkspaceError(
                f"no shared memory for what ranks tell each other about compiled graphs ({error}); raise the "
                "limits of the process (ulimit -f, -n, -v)"
            ) from error
        self.token = random.SystemRandom().getrandbits(62)
        self.words[_TOKEN] = self.token
        self._runs = 0
        self._free = _HEADER + RING

    def handle(self) -> Handle:
        return Handle(os.getpid(), self._fd, self.token, host_identity(), _namespace())

    def ran(self, start: int, record: int) -> None:
        """A run of that sequence begins at that count."""
        runs = self._runs
        self.words[_HEADER + runs % RING] = start << _IDS | record
        self._runs = self.words[_RUNS] = runs + 1

    def add(self, digest: str, sites: list[str]) -> int:
        """Makes the record of a sequence that was never run before."""
        record = self._take(1 + len(sites))
        self._write("\n".join([digest, *sites]))
        self.words[record] = len(sites)
        return record

    def announce(self) -> None:
        """A sequence has begun its first run: after the run is in the ring."""
        self.words[_BEGUN] += 1

    def decide(self, record: int, number: int, verdict: Verdict) -> None:
        where = self._write(json.dumps([verdict.plan, verdict.because]))
        self.words[record + 1 + number] = where if verdict.fused else -where
        self.words[_FUSED] += verdict.fused

    def captured(self) -> None:
        """Runs of this rank go into a CUDA graph, whose replays nobody counts."""
        self.words[_CAPTURED] = 1

    def fail(self, why: str) -> None:
        if not self.words[_FAILURE]:
            self.words[_FAILURE] = self._write(why)

    def close(self) -> None:
        """Those who have mapped the page see that this rank has left the group."""
        self.words[_LEFT] = 1
        super().close()
        os.close(self._fd)

    def _write(self, text: str) -> int:
        data = text.encode()
        word = self._take(1 + -(-len(data) // 8))
        self._memory[8 * (word + 1) : 8 * (word + 1) + len(data)] = data
        self.words[word] = len(data)
        return word

    def _take(self, words: int) -> int:
        taken = self._free
        if taken + words > WORDS:
            raise WorkspaceError(
                f"this process has compiled more graphs with collectives than {8 * WORDS >> 20} MiB of "
                "their descriptions hold; compile with dynamic shapes (torch._dynamo.mark_dynamic)"
            )
        self._free += words
        return taken


class PeerLedger(_Page):
    """The page of another rank of this host."""

    def __init__(self, rank: int, handle: Handle, memory: mmap.mmap) -> None:
        super().__init__(memory)
        self.rank, self.pid, self.token = rank, handle.pid, handle.token
        self.seen = self.noticed = self.watched_until = 0  # of `begun`, `begun`, `count`: see agreement.py
        self._sites: dict[int, tuple[str, tuple[Site, ...]]] = {}

    @staticmethod
    def open(rank: int, handle: Handle) -> PeerLedger | None:
        """None if it belongs to a making of the group that the rank has left, or whose process is gone.

        Raises:
            WorkspaceError: it cannot be reached.
        """
        if (handle.host, handle.pids) != (host_identity(), _namespace()):
            raise _unreachable(rank, handle, "it runs on another host, or in another container")
        try:
            fd = os.open(f"/proc/{handle.pid}/fd/{handle.fd}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except PermissionError as error:
            raise _unreachable(rank, handle, str(error)) from error
        except OSError:
            return None
        try:
            page = PeerLedger(rank, handle, mmap.mmap(fd, 8 * WORDS, prot=mmap.PROT_READ))
        except (OSError, ValueError):
            return None  # the number is that of another file now
        finally:
            os.close(fd)
        if page.words[_TOKEN] != handle.token or page.left:
            page.close()
            return None
        return page

    @property
    def left(self) -> bool:
        """Whether the rank has destroyed the group."""
        return self.words[_LEFT] > 0

    @property
    def begun(self) -> int:
        """Counts the sequences that the rank has begun to run for the first time."""
        return self.words[_BEGUN]

    @property
    def fuses(self) -> bool:
        """Whether the rank has anything that it runs fused for good."""
        return self.words[_FUSED] > 0

    @property
    def replays(self) -> bool:
        """Whether the rank may replay CUDA graphs."""
        return self.words[_CAPTURED] > 0

    @property
    def failure(self) -> str:
        where = self.words[_FAILURE]
        return self.text(where) if where else ""

    @property
    def count(self) -> int:
        """Of the collectives that the rank's runs have reached."""
        runs = self.words[_RUNS]
        if not runs:
            return 0
        start, record = self._run(runs - 1)
        return start + self.words[record]

    def at(self, index: int) -> Stand | None:
        """What the rank does at that count; None if it is not there yet.

        Raises:
            LookupError: that is too long ago, or never was.
        """
        runs = self.words[_RUNS]
        first, behind = max(runs - RING + 1, 0), runs  # one slot may be being written
        if not runs:
            return None
        if index < self._run(first)[0]:
            raise LookupError(f"rank {self.rank} has run more than {RING} graphs since, and tells of no more")
        while behind - first > 1:
            middle = (first + behind) // 2
            first, behind = (middle, behind) if self._run(middle)[0] <= index else (first, middle)
        start, record = self._run(first)
        number = index - start
        return self._stand(record, number) if number < self.words[record] else None

    def _run(self, run: int) -> tuple[int, int]:
        word = self.words[_HEADER + run % RING]
        return word >> _IDS, word & ((1 << _IDS) - 1)

    def _stand(self, record: int, number: int) -> Stand:
        if record not in self._sites:
            digest, *sites = self.texts(record)
            self._sites[record] = digest, tuple(map(Site.parse, sites))
        digest, known = self._sites[record]
        return Stand(self.rank, f"{digest}/{number}", known[number], self.verdict(record, number))


def _unreachable(rank: int, handle: Handle, why: str) -> WorkspaceError:
    return WorkspaceError(
        f"what rank {rank} (process {handle.pid}) tells about its graphs cannot be read: {why}. Run all "
        "ranks of the group on one host, as one user, with /proc mounted and one process namespace, or run "
        "unfused: option strategy='never'"
    )
