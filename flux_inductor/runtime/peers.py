"""The ledgers of a group's other ranks, and the wait for what they do."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch.distributed as dist

from flux_inductor.planning.exchange import Stand
from flux_inductor.runtime import errors, groups, liveness, torch_private
from flux_inductor.runtime.errors import REMEDY, FusedOpError, PeerLostError, PeerTimeoutError, WorkspaceError
from flux_inductor.runtime.ledger import Handle, Ledger, PeerLedger

LOOK_PERIOD_S = 0.2  # between looks for ranks that have ended; each asks the store
LONGEST_PAUSE_S = 0.002


class Peers:
    """Those that are known so far, in `ledgers`.

    Args:
        lane: which of this rank's ledgers the others are to find; each has its own.
        own: that ledger.
    """

    def __init__(self, lane: str, own: Ledger, name: str, group: dist.ProcessGroup) -> None:
        self.ledgers: list[PeerLedger] = []
        self._lane, self._name = lane, name
        self._rank, self._world = group.rank(), group.size()
        self._where = f"rank {self._rank} of group {name!r}"
        self._store = torch_private.store(group)
        # In the place of an earlier one, if the group was destroyed and made anew under its name.
        self._store.set(self._key(self._rank), own.handle().to_json())
        liveness.publish_process()

    def open(self, *, strict: bool) -> None:
        """Maps the ledgers of those that have told where they are.

        Args:
            strict: all of them must be in reach.

        Raises:
            WorkspaceError: one is not.
        """
        known = {self._rank, *(peer.rank for peer in self.ledgers)}
        for rank in range(self._world):
            key = self._key(rank)
            if rank in known or not self._store.check([key]):
                continue
            try:
                peer = PeerLedger.open(rank, Handle.from_json(self._store.get(key)))
            except WorkspaceError as error:
                if strict:
                    raise WorkspaceError(f"{self._where}: {error}. {REMEDY}") from error
                continue
            if peer is not None:
                self.ledgers.append(peer)

    def ask(self, index: int, own: Stand, judge_early: Callable[[Stand], None], alike: bool) -> list[Stand]:
        """What all ranks do at that count, in their order.

        Args:
            judge_early: gets what one rank does as soon as that is known; may raise.
            alike: there is an answer for a graph that looks the same. Then there is nothing to wait for,
                if those who are missing may replay CUDA graphs, which nobody sees.

        Returns:
            Nothing in that case.

        Raises:
            FusedOpError: ranks failed, ended, left the group, or did not come in time.
        """
        group = groups.process_group(self._name)
        limit_s = torch_private.timeout(group, group._device_types[0].type).total_seconds()
        start = time.monotonic()
        next_look, pause_s = start + LOOK_PERIOD_S, 0.00002
        stands = {own.rank: own}
        while True:
            self.open(strict=True)
            self.check_failures()
            for peer in self.ledgers:
                theirs = self._at(peer, index)
                if theirs is not None:
                    stands[peer.rank] = theirs
                    judge_early(theirs)
            missing = [rank for rank in range(self._world) if rank not in stands]
            if not missing:
                return [stands[rank] for rank in range(self._world)]
            if alike and all(peer.replays for peer in self.ledgers if peer.rank in missing):
                return []
            now = time.monotonic()
            if now > next_look:
                next_look = now + LOOK_PERIOD_S
                self._check_present(group, missing, own)
            if now - start > limit_s:
                raise PeerTimeoutError(
                    f"{self._where} waited {limit_s:g} s for ranks {missing} to come to collective {index} "
                    f"of their compiled graphs, which is here {own}. A rank that is only slow needs a longer "
                    "timeout of the process group; one that runs this collective outside of compiled code, "
                    "or from a CUDA graph, cannot be seen: compile it alike on all ranks, or run unfused "
                    f"with FLUX_INDUCTOR_ENGINE=reference on all. {REMEDY}"
                )
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, LONGEST_PAUSE_S)

    def await_count(self, count: int, seconds: float) -> None:
        """Until all known peers have come beyond that count, or the time is over.

        Raises:
            FusedOpError: one of them failed.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and any(peer.count <= count for peer in self.ledgers):
            self.check_failures()
            time.sleep(LONGEST_PAUSE_S)

    def check_failures(self) -> None:
        for peer in self.ledgers:
            if why := peer.failure:
                kind = getattr(errors, why.partition(":")[0], FusedOpError)
                raise kind(f"{self._where} gave up because rank {peer.rank} failed: {why}")

    def close(self) -> None:
        for peer in self.ledgers:
            peer.close()
        self.ledgers.clear()

    def _at(self, peer: PeerLedger, index: int) -> Stand | None:
        try:
            return peer.at(index)
        except LookupError as error:
            raise FusedOpError(f"{self._where}: {error}. {REMEDY}") from error

    def _check_present(self, group: dist.ProcessGroup, missing: list[int], own: Stand) -> None:
        ended = liveness.ended_rank(group)
        left = [peer.rank for peer in self.ledgers if peer.left and peer.rank in missing]
        what = f"the process of rank {ended} has ended" if ended is not None else ""
        if left:
            what = what or f"rank {left[0]} has destroyed the group"
        if what:
            raise PeerLostError(f"{self._where}: {what} before it came to {own}. {REMEDY}")

    def _key(self, rank: int) -> str:
        return f"flux_inductor/ledger/{self._lane}/{rank}"
