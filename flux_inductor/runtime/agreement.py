"""What ranks agree on before they run a fused op for the first time: that all of them run it, and how.

Each rank decides by itself what to fuse, from sizes that legally differ between ranks; it may have another
cut into graphs, another graph, or compile again when no other does. So a fused op asks before its first run
what the others do at the same place in the group's order of all_gathers and reduce_scatters, and all come to
one verdict (planning/exchange.py). The protocol:

    At its start a compiled graph writes into this rank's ledger (ledger.py) which sequence of collectives
    begins at which count. It waits for nobody: two stores a run.
    At its own place, and before its first run alone, a fused op waits until the ledgers of all ranks say what
    they do at its count, and judges. The verdict is written down and holds for good.

It waits in the same place, for the same ranks, as the op itself will wait for their chunks. So it cannot
block what the op would not block; each rule has a counter-example of two ranks:

    Ask at the op, not at the start of the graph. Rank 0 has [A of group g, B of group h] in one graph, rank 1
    in two. At the start of its graph rank 0 would wait for rank 1 to begin its second one; that waits in A
    for rank 0.
    Write at the start, not at the collective. Rank 1 leaves B unfused, and nothing of ours runs in its place:
    rank 0 would never hear of it.
    A graph that has run does not ask again. Rank 0 alone compiles its graph anew to print something: the
    others run their old one, whose ledger tells rank 0 what it needs, and need not notice.
    Another graph asks, although its collectives look the same. They are another layer's, of which rank 1 may
    have an empty shard.
    What was decided holds for good. Rank 0 asks while rank 1 is already a run ahead: rank 1 could not take
    back that it has fused it.
    A rank looks at the others again when they have begun a new sequence, and when it has begun one itself.
    Rank 1 alone compiles a graph that cannot fuse what rank 0 has fused since long: whoever comes there
    second sees both, and ends it for both.
    Counts are those of compiled graphs alone, and of all_gathers and reduce_scatters alone. Rank 0 has an
    all_reduce inside of its graph, rank 1 between two graphs: else all counts behind it would differ.

Ledgers are shared memory, since fused ops run on ranks of one host. A message through the store would need a
thread that answers for ranks which wait inside of a collective or are busy.

The host does not see replays of CUDA graphs; captures are not counted either. Ranks that replay alike stay
in step. Where one replays and another runs the same graph, counts drift apart: what is compiled later may
then wait for its limit, or find the wrong collective and say so.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import NoReturn

import torch.distributed as dist

from flux_inductor.planning.exchange import Conflict, Site, Stand, Verdict, judge
from flux_inductor.runtime import errors, groups, liveness, torch_private
from flux_inductor.runtime.errors import (
    REMEDY,
    DeadGroupError,
    FusedOpError,
    MismatchError,
    PeerLostError,
    PeerTimeoutError,
    WorkspaceError,
)
from flux_inductor.runtime.ledger import Handle, Ledger, PeerLedger

LOOK_PERIOD_S = 0.2  # between looks for ranks that have ended; each asks the store
LONGEST_PAUSE_S = 0.002
MOST_RANKS = 64  # of a group whose graphs are looked at before anything is fused: each look asks the store
# A rank that fuses nothing waits at most so long, and only where others have fused ops, for them to come to
# the first collective of a graph that is new to it: in its own collective it could not hear that they raise.
COURTESY_S = 1.0


@dataclass
class _Sequence:
    """The collectives of one graph of this rank, in one group.

    Args:
        record: in the ledger.
        start: the count at which its latest run began.
    """

    digest: str
    text: str
    sites: tuple[Site, ...]
    record: int
    start: int = 0

    @property
    def fuses(self) -> bool:
        return any(site.fused for site in self.sites)


class Agreement:
    """What this rank knows of one group. See `groups.GroupState`."""

    lane = "graphs"

    def __init__(self, name: str, group: dist.ProcessGroup) -> None:
        self.name, self.rank, self.world = name, group.rank(), group.size()
        self.alone = self.world == 1 or torch_private.is_fake(group)
        self.where = f"rank {self.rank} of group {name!r}"
        self._lock = threading.Lock()
        self._known: dict[str, _Sequence] = {}
        self._decided: dict[tuple[str, int], Verdict] = {}  # of the latest sequence that looks the same
        self._peers: list[PeerLedger] = []
        self._count = 0
        self._dead = ""
        if not self.alone:
            self._store = torch_private.store(group)
            self._ledger = Ledger()
            # In the place of an earlier one, if the group was destroyed and made anew under its name.
            self._store.set(self._key(self.rank), self._ledger.handle().to_json())
            liveness.publish_process()

    def begin(self, digest: str, sites: str, capturing: bool = False) -> None:
        """This rank begins to run that sequence of collectives. Waits for nobody, but see COURTESY_S.

        Args:
            sites: one line a collective.
            capturing: the run goes into a CUDA graph.

        Raises:
            MismatchError: another rank is at the same place with something that does not go with it.
            ValueError: the sequence is captured, but never ran.
        """
        if self.alone:
            return
        sequence = self._known.get(digest)
        new = sequence is None
        if sequence is None:
            sequence = self._register(digest, sites, capturing)
        if self._dead and sequence.fuses:
            self._raise_dead()
        if capturing:
            self._ledger.captured()
        if capturing or self._dead:
            return
        with self._lock:
            sequence.start = self._count
            self._count += len(sequence.sites)
            self._ledger.ran(sequence.start, sequence.record)
        if new:
            self._first_run(sequence)
        for peer in self._peers:
            if peer.begun != peer.seen:
                self._look(peer, sequence)

    def verdict(self, place: str, capturing: bool = False) -> Verdict:
        """What all ranks do at a place of this rank's sequence, which has begun.

        Raises:
            FusedOpError: ranks do not go together, have ended, or did not come in time; the group is dead.
            ValueError: no such sequence has begun, or nothing was decided before it is captured.
        """
        digest, _, number = place.partition("/")
        sequence = self._known.get(digest)
        if sequence is None:
            raise ValueError(
                f"a fused op of group {self.name!r} stands at place {place!r} of a graph that did not tell "
                "the other ranks what it does (flux_inductor::agree); call ops by hand without a place"
            )
        if self._dead:
            self._raise_dead()
        stand = self._stand(sequence, int(number))
        if stand.decided is not None:
            return stand.decided
        if capturing:
            raise _never_ran(str(stand.site))
        alike = self._decided.get((sequence.text, int(number)))
        stands = self._ask(sequence.start + int(number), stand, alike)
        answer = judge(stands) if stands else alike
        assert answer is not None
        if isinstance(answer, Conflict):
            self._mismatch(answer)
        self._ledger.decide(sequence.record, int(number), answer)
        self._decided[sequence.text, int(number)] = answer
        if not answer.fused:
            _unfused[self.name, place] = answer.because
        return answer

    def end(self, error: Exception) -> None:
        """The group is dead for fused ops, on the other ranks as well."""
        why = f"{type(error).__name__}: {error}"
        self._dead = self._dead or why
        if not self.alone:
            self._ledger.fail(why)

    def close(self) -> None:
        self._dead = self._dead or "it was destroyed"
        if not self.alone:
            for peer in self._peers:
                peer.close()
            self._peers.clear()
            self._ledger.close()
            self.alone = True

    def _raise_dead(self) -> NoReturn:
        raise DeadGroupError(f"group {self.name!r} failed before: {self._dead}")

    def _register(self, digest: str, text: str, capturing: bool) -> _Sequence:
        sites = tuple(map(Site.parse, text.split("\n")))
        if capturing and any(site.fused for site in sites):
            raise _never_ran(text)
        with self._lock:
            record = self._ledger.add(digest, text.split("\n"))
            return self._known.setdefault(digest, _Sequence(digest, text, sites, record))

    def _first_run(self, sequence: _Sequence) -> None:
        self._ledger.announce()
        if self.world <= MOST_RANKS:
            self._open_peers(strict=False)
        if not sequence.fuses and any(peer.fuses for peer in self._peers):
            deadline = time.monotonic() + COURTESY_S
            while time.monotonic() < deadline and any(peer.count <= sequence.start for peer in self._peers):
                self._check_failures()
                time.sleep(LONGEST_PAUSE_S)
        for peer in self._peers:
            self._look(peer, sequence)

    def _look(self, peer: PeerLedger, sequence: _Sequence) -> None:
        """Whether what the peer does at the places of this run goes with it, as far as it has come."""
        begun = peer.begun
        if begun != peer.noticed:
            peer.noticed, peer.watched_until = begun, peer.count
        for number in range(len(sequence.sites)):
            try:
                theirs = peer.at(sequence.start + number)
            except LookupError:
                continue
            if theirs is None:
                break
            own = self._stand(sequence, number)
            if not (own.able or theirs.able):
                continue
            answer = judge(sorted((own, theirs), key=lambda each: each.rank))
            if isinstance(answer, Conflict):
                self._mismatch(answer)
        if self._count >= peer.watched_until:
            peer.seen = peer.noticed

    def _stand(self, sequence: _Sequence, number: int) -> Stand:
        decided = self._ledger.verdict(sequence.record, number)
        return Stand(self.rank, f"{sequence.digest}/{number}", sequence.sites[number], decided)

    def _ask(self, index: int, own: Stand, alike: Verdict | None) -> list[Stand]:
        """What all ranks do at that count.

        Nothing, if those who are not there may replay CUDA graphs, and there is an answer for the same
        sequence of another graph: this rank alone may have compiled again.
        """
        limit_s = self._limit_s()
        start = time.monotonic()
        next_look, pause_s = start + LOOK_PERIOD_S, 0.00002
        while True:
            self._open_peers(strict=True)
            self._check_failures()
            stands = self._stands(index, own)
            here = {stand.rank for stand in stands}
            missing = [rank for rank in range(self.world) if rank not in here]
            if not missing:
                return stands
            if alike is not None and all(peer.replays for peer in self._peers if peer.rank in missing):
                return []
            now = time.monotonic()
            if now > next_look:
                next_look = now + LOOK_PERIOD_S
                self._check_present(missing, own)
            if now - start > limit_s:
                self._give_up(
                    PeerTimeoutError(
                        f"{self.where} waited {limit_s:g} s for ranks {missing} to come to collective "
                        f"{index} of their compiled graphs, which is here {own}. A rank that is only slow needs "
                        "a longer time-out of the process group; one that runs this collective outside of "
                        "compiled code, or from a CUDA graph, cannot be seen: compile it alike on all ranks, or "
                        f"run unfused with FLUX_INDUCTOR_ENGINE=reference on all. {REMEDY}"
                    )
                )
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, LONGEST_PAUSE_S)

    def _stands(self, index: int, own: Stand) -> list[Stand]:
        stands = [own]
        for peer in self._peers:
            try:
                theirs = peer.at(index)
            except LookupError as error:
                self._give_up(FusedOpError(f"{self.where}: {error}. {REMEDY}"))
            if theirs is not None:
                answer = judge([own, theirs])
                if isinstance(answer, Conflict):  # whatever the others say
                    self._mismatch(answer)
                stands.append(theirs)
        return sorted(stands, key=lambda stand: stand.rank)

    def _open_peers(self, *, strict: bool) -> None:
        """Maps the pages of those that have told where they are; `strict`: all of them must be in reach."""
        known = {self.rank, *(peer.rank for peer in self._peers)}
        for rank in range(self.world):
            key = self._key(rank)
            if rank in known or not self._store.check([key]):
                continue
            try:
                peer = PeerLedger.open(rank, Handle.from_json(self._store.get(key)))
                if peer is not None:
                    self._peers.append(peer)
            except WorkspaceError as error:
                if strict:
                    self._give_up(WorkspaceError(f"{self.where}: {error}. {REMEDY}"))

    def _key(self, rank: int) -> str:
        return f"flux_inductor/ledger/{self.lane}/{rank}"

    def _check_failures(self) -> None:
        for peer in self._peers:
            if why := peer.failure:
                kind = getattr(errors, why.partition(":")[0], FusedOpError)
                self._give_up(kind(f"{self.where} gave up because rank {peer.rank} failed: {why}"))

    def _check_present(self, missing: list[int], own: Stand) -> None:
        ended = liveness.ended_rank(groups.process_group(self.name))
        left = [peer.rank for peer in self._peers if peer.left and peer.rank in missing]
        what = f"the process of rank {ended} has ended" if ended is not None else ""
        if left:
            what = what or f"rank {left[0]} has destroyed the group"
        if what:
            self._give_up(PeerLostError(f"{self.where}: {what} before it came to {own}. {REMEDY}"))

    def _limit_s(self) -> float:
        group = groups.process_group(self.name)
        return torch_private.timeout(group, group._device_types[0].type).total_seconds()

    def _mismatch(self, conflict: Conflict) -> NoReturn:
        sides = "\n".join(f"  rank {stand.rank}: {stand}" for stand in (conflict.one, conflict.other))
        self._give_up(
            MismatchError(
                f"ranks {conflict.one.rank} and {conflict.other.rank} of group {self.name!r} do not go "
                f"together at the same place in their order of collectives:\n{sides}\n"
                "All ranks must run the same collectives in one order; one that was fused in an earlier run "
                f"cannot be left unfused by a rank later. {REMEDY}"
            )
        )

    def _give_up(self, error: FusedOpError) -> NoReturn:
        groups.end(self.name, error)
        raise error


class CallAgreement(Agreement):
    """Of calls whose plan is chosen when they run: each is a sequence of one."""

    lane = "calls"


_unfused: dict[tuple[str, str], str] = {}


def unfused_because(group: str, place: str) -> str:
    """Why an op that was compiled fused runs unfused; "" if it does not, or did not run."""
    return _unfused.get((group, place), "")


def _never_ran(what: str) -> ValueError:
    return ValueError(
        f"a graph is captured into a CUDA graph but never ran: {what}\nRanks agree on fused ops at the first "
        "run, and a capture cannot wait for other ranks: run the function once with the same shapes before "
        "capturing it."
    )
