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
The copy engine moves one chunk after another. Stores of the kernel need no engine, but the tiles of a round
end together, and so do their stores: the link is busy in bursts, and a burst that outlasts its turn stalls
the next round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flux_inductor.planning.machine import KERNEL

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

    def leaves(done: int, tiles: int, free: float) -> float:
        block = KERNEL.block.value + tiles * tile_bytes / (_KILO * KERNEL.blocks.value)
        return max(free, rounds.time(done)) + block

    moved = (rounds.parts - 1) * rounds.tiles * tile_bytes / (_KILO * KERNEL.blocks.value)
    free = rounds.time(rounds.all_tiles) + KERNEL.scatter_interference.value * moved
    late = _last_own_tile(rounds, chunks, leaves, addition)
    return KERNEL.fork.value + KERNEL.launch.value + max(free, late) + _lockstep_us(rounds)


def store_us(rounds: Rounds, chunks: Sequence[int], tile_bytes: int, addition: float) -> float:
    """matmul_reduce_scatter whose kernel stores its partials into the peers' memory; arguments as above."""
    peers = (rounds.parts - 1) * rounds.tiles
    burst = min(rounds.at_once, peers) * tile_bytes / (_KILO * KERNEL.stores.value)
    slow = max(1 + KERNEL.stall.value * burst / rounds.us, burst / rounds.us)

    def leaves(done: int, tiles: int, free: float) -> float:
        return rounds.time(done) * slow + burst

    free = rounds.time(rounds.all_tiles) + (slow - 1) * rounds.time(peers)
    late = _last_own_tile(rounds, chunks, leaves, addition)
    return KERNEL.launch.value + max(free, late)


def _lockstep_us(rounds: Rounds) -> float:
    """What is lost where all tiles for the peers end at once, and so do the own ones behind them."""
    together = (rounds.parts - 1) * rounds.tiles <= rounds.at_once
    return KERNEL.lockstep.value * rounds.us if together else 0.0


def _last_own_tile(
    rounds: Rounds, chunks: Sequence[int], leaves: Callable[[int, int, float], float], addition: float
) -> float:
    """When the own part is done, as far as it waits for the peers' partials.

    Args:
        leaves: when a chunk has left, given how many tiles were done at its end, its own number of tiles, and
            when the one before it had left. What leaves here tells what comes in: the ranks are alike.
    """
    done, free, end = 0, 0.0, 0.0
    for peer in range(rounds.parts - 1):
        left = rounds.tiles
        for tiles in chunks:
            done += tiles
            free = leaves(done, tiles, free)
            if peer == rounds.parts - 2:
                end = max(end, free + addition + max(rounds.time(left) - rounds.us, 0.0))
                left -= tiles
    return end
