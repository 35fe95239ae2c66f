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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist

from flux_inductor.planning.exchange import Site, Stand, Verdict, judge
from flux_inductor.runtime import groups, torch_private
from flux_inductor.runtime.errors import REMEDY, DeadGroupError, FusedOpError, MismatchError
from flux_inductor.runtime.ledger import Ledger, PeerLedger
from flux_inductor.runtime.peers import Peers

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
        self._lock = threading.Lock()
        self._known: dict[str, _Sequence] = {}
        self._decided: dict[tuple[str, int], Verdict] = {}  # of the latest sequence that looks the same
        self._count = 0
        self._dead = ""
        if not self.alone:
            self._ledger = Ledger()
            self._peers = Peers(self.lane, self._ledger, name, group)

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
        if capturing:
            self._ledger.captured()
        if capturing or self._dead:  # in a dead group fused ops raise by themselves, plain collectives go on
            return
        with self._lock:
            sequence.start = self._count
            self._count += len(sequence.sites)
            self._ledger.ran(sequence.start, sequence.record)
        if new:
            self._first_run(sequence)
        for peer in self._peers.ledgers:
            if peer.begun != peer.seen:
                with self._ending():
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
            raise DeadGroupError(f"group {self.name!r} failed before: {self._dead}")
        stand = self._stand(sequence, int(number))
        if stand.decided is not None:
            return stand.decided
        if capturing:
            raise _never_ran(str(stand.site))
        answer = self._ask(sequence, int(number), stand)
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
            self._peers.close()
            self._ledger.close()
            self.alone = True

    def _register(self, digest: str, text: str, capturing: bool) -> _Sequence:
        sites = tuple(map(Site.parse, text.split("\n")))
        if capturing and any(site.fused for site in sites):
            raise _never_ran(text)
        with self._lock:
            record = self._ledger.add(digest, text.split("\n"))
            return self._known.setdefault(digest, _Sequence(digest, text, sites, record))

    def _first_run(self, sequence: _Sequence) -> None:
        self._ledger.announce()
        with self._ending():
            if self.world <= MOST_RANKS:
                self._peers.open(strict=False)
            if not sequence.fuses and any(peer.fuses for peer in self._peers.ledgers):
                self._peers.await_count(sequence.start, COURTESY_S)
            for peer in self._peers.ledgers:
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
            self._judge(sorted((own, theirs), key=lambda each: each.rank))
        if self._count >= peer.watched_until:
            peer.seen = peer.noticed

    def _stand(self, sequence: _Sequence, number: int) -> Stand:
        decided = self._ledger.verdict(sequence.record, number)
        return Stand(self.rank, f"{sequence.digest}/{number}", sequence.sites[number], decided)

    def _ask(self, sequence: _Sequence, number: int, own: Stand) -> Verdict:
        alike = self._decided.get((sequence.text, number))

        def judge_early(theirs: Stand) -> None:
            self._judge([own, theirs])

        with self._ending():
            stands = self._peers.ask(sequence.start + number, own, judge_early, alike is not None)
            if stands:
                return self._judge(stands)
        assert alike is not None
        return alike

    def _judge(self, stands: Sequence[Stand]) -> Verdict:
        """Of some ranks or all.

        Raises:
            MismatchError: they do not go together.
        """
        answer = judge(stands)
        if isinstance(answer, Verdict):
            return answer
        sides = "\n".join(f"  rank {stand.rank}: {stand}" for stand in (answer.one, answer.other))
        raise MismatchError(
            f"ranks {answer.one.rank} and {answer.other.rank} of group {self.name!r} do not go together at "
            f"the same place in their order of collectives:\n{sides}\n"
            "All ranks must run the same collectives in one order; one that was fused in an earlier run "
            f"cannot be left unfused by a rank later. {REMEDY}"
        )

    @contextmanager
    def _ending(self) -> Iterator[None]:
        """What its body raises ends the group on all ranks."""
        try:
            yield
        except FusedOpError as error:
            groups.end(self.name, error)
            raise


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
