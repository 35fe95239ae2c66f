"""How long a persistent CUDA kernel takes, beside the transfers that it waits for or causes; microseconds.

Resident clusters claim tiles in order and all tiles take the same time, so tiles are done in rounds: the i-th
ends one round after the one `at_once` places before it. A tile that waits for a chunk delays those that come
`at_once`, 2 * `at_once`, ... places later, and no others. So the end of the whole is the largest of

    all tiles' rounds, if nothing waits,
    all_gather_matmul      the arrival of a chunk + the rounds of the tiles from its first one on,
    matmul_reduce_scatter  the arrival of a chunk + the rounds of the tiles from its first one on, less one:
                           only the epilogue needs the peers' partials,

over all chunks. Which tile is the first to need a chunk, the kernel's order says: a sweep across two chunks
holds tiles of both. In a reduce_scatter a chunk leaves when its last tile is done; in an all_gather at once.
Of a chunk that comes in slices a tile starts with the first, and only the last one's share of the tile
follows the last one's arrival.
The copy engine moves one chunk after another. Stores of the kernel need no engine, but nothing queues them:
where those of a round take longer than the round, they stall the next one. So own tiles, which leave the link
alone, take turns with the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flux_inductor.planning.sm90.model import KERNEL

_KILO = 1e3  # GB/s: bytes a microsecond


@dataclass(frozen=True)
class Rounds:
    """The tiles of one launch, counted in clusters.

    Args:
        parts: of the product, one a rank.
        tiles: of one part.
        at_once: what the device holds.
        us: of one round.
    """

    parts: int
    tiles: int
    at_once: int
    us: float

    @property
    def all_tiles(self) -> int:
        return self.parts * self.tiles

    def time(self, tiles: int) -> float:
        """Of so many tiles in a row."""
        full, rest = divmod(tiles, self.at_once)
        return self.us * (full + ((rest / self.at_once) ** KERNEL.last.value if rest else 0.0))

    def rest(self, tiles: int, start: float) -> float:
        """Of the last tiles, from `start` on. Where all run at once, those before may still be there."""
        shared = self.all_tiles <= self.at_once and start < self.us
        return self.time(self.all_tiles if shared else tiles)


@dataclass(frozen=True)
class Turns:
    """Where own tiles take turns with the last peer's.

    Args:
        begin: tiles before that, all of them for peers.
        tiles: of both, until only own ones are left.
    """

    begin: int
    tiles: int


@dataclass(frozen=True)
class Gathered:
    """A chunk of a shard, on its way to who multiplies it.

    Args:
        size: bytes.
        before: of each launch, how many tiles of a part come before the first one that needs the chunk.
        slices: in which it travels.
    """

    size: int
    before: tuple[int, ...]
    slices: int = 1


def gather_us(
    launches: Sequence[Rounds], shards: Sequence[Sequence[Gathered]], *, keep: float = 0.0
) -> float:
    """all_gather_matmul with launches one after another, of which the first ones wait.

    Args:
        shards: chunks of the peers' shards, in the order of their arrival.
        keep: the rate, GB/s, at which the kernel also stores the gathered tensor; 0: it does not.
    """
    arrivals = []  # place of the part, chunk, when its first slice has arrived, and the last
    clock = 0.0
    for place, shard in enumerate(shards, start=1):
        for chunk in shard:
            one = KERNEL.chunk.value + chunk.size / chunk.slices / (_KILO * KERNEL.copies.value)
            arrivals.append((place, chunk, clock + one, clock + one * chunk.slices))
            clock += one * chunk.slices
    end = KERNEL.gather_interference.value * clock
    for index, launch in enumerate(launches):
        end += KERNEL.launch.value + launch.time(launch.all_tiles)
        for place, chunk, first, last in arrivals:  # copies run while the kernel is launched
            rounds = launch.rest((launch.parts - place) * launch.tiles - chunk.before[index], first)
            begun = min(launch.us, rounds) * (chunk.slices - 1) / chunk.slices
            end = max(end, max(first, last - begun) + rounds)
    if keep:
        last_shard = shards[-1]
        rate = _KILO * keep
        gathered = (1 + len(shards)) * sum(chunk.size for chunk in last_shard)
        end += KERNEL.kept_interference.value * gathered / rate
        end = max(end, gathered / rate, clock + last_shard[-1].size / rate)
    return KERNEL.fork.value + end


def push_us(rounds: Rounds, chunks: Sequence[int], tile_bytes: int, addition: float) -> float:
    """matmul_reduce_scatter whose partials the copy engine moves.

    Args:
        chunks: tiles of each chunk of a part.
        tile_bytes: of the product, in one cluster's tile.
        addition: from the last partial of a tile to its stored sum.
    """
    moved = (rounds.parts - 1) * rounds.tiles * tile_bytes / (_KILO * KERNEL.blocks.value)
    busy = rounds.time(rounds.all_tiles) + KERNEL.scatter_interference.value * moved
    done, free, late = 0, 0.0, 0.0
    for peer in range(rounds.parts - 1):
        left = rounds.tiles
        for tiles in chunks:
            done += tiles
            block = KERNEL.block.value + tiles * tile_bytes / (_KILO * KERNEL.blocks.value)
            free = max(free, rounds.time(done) + KERNEL.notice.value) + block
            if peer == rounds.parts - 2:  # what leaves for the last peer tells what comes in: ranks are alike
                late = max(late, free + addition + max(rounds.time(left) - rounds.us, 0.0))
                left -= tiles
    return KERNEL.fork.value + KERNEL.launch.value + max(busy, late) + _lockstep_us(rounds)


def store_us(rounds: Rounds, turns: Turns, tile_bytes: int, addition: float) -> float:
    """matmul_reduce_scatter whose kernel stores its partials into the peers' memory; arguments as above.

    First come tiles for the peers alone, then those of the last part for a peer and own ones in turns, then
    own ones alone.
    """
    alone, both = turns.begin, turns.tiles
    first = min(rounds.at_once, alone)
    link = first * tile_bytes / (_KILO * KERNEL.stores.value)  # of one round

    def stalls(tiles: int, link: float) -> float:
        return max(KERNEL.stall.value * link, link - rounds.us) * tiles / rounds.at_once

    # The first round's tiles end together, and so do their stores. The next round waits for them, for a round
    # at most, and half as long where every second tile is an own one; or longer, where the link is slower.
    lost = 0.0
    if rounds.all_tiles > rounds.at_once:
        lost = max(min(link, rounds.us) * (0.5 if both else 1.0), link - rounds.us)
    lost += stalls(alone - first, link) + stalls(both, link / 2)
    partials = rounds.time(alone + both) + lost + (link / 2 if both else link)
    own = partials + addition + max(rounds.time(rounds.all_tiles - alone - both) - rounds.us, 0.0)
    return KERNEL.launch.value + max(rounds.time(rounds.all_tiles) + lost, own)


def _lockstep_us(rounds: Rounds) -> float:
    """What is lost where all tiles for the peers end at once, and so do the own ones behind them."""
    together = (rounds.parts - 1) * rounds.tiles <= rounds.at_once
    return KERNEL.lockstep.value * rounds.us if together else 0.0
