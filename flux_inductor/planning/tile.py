"""A tile: what one thread block of a kernel computes at a time."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

TILE = re.compile(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)/([1-9]\d*)x([1-9]\d*)(/pingpong)?", re.ASCII)


@dataclass(frozen=True)
class Tile:
    """What one thread block computes, and the cluster of blocks that share loads.

    Args:
        m, n, k: rows, columns, and depth of one step of the mainloop.
        cluster_m, cluster_n: blocks of a cluster.
        pingpong: two warpgroups take turns at whole tiles, so that one stores while the other multiplies;
            otherwise they share one tile ("cooperative"), and one warpgroup has a tile of 64 rows.
    """

    m: int
    n: int
    k: int
    cluster_m: int
    cluster_n: int
    pingpong: bool = False

    def __str__(self) -> str:
        schedule = "/pingpong" if self.pingpong else ""
        return f"{self.m}x{self.n}x{self.k}/{self.cluster_m}x{self.cluster_n}{schedule}"

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """What decides where tiles lie: m, n, cluster_m, cluster_n."""
        return self.m, self.n, self.cluster_m, self.cluster_n

    @staticmethod
    @lru_cache(maxsize=256)
    def parse(text: str) -> Tile:
        """Reads the text form.

        Raises:
            ValueError: it is malformed.
        """
        match = TILE.fullmatch(text)
        if match is None:
            raise ValueError(f"tile {text!r} is malformed; write for example 256x192x64/2x1")
        m, n, k, cluster_m, cluster_n = map(int, match.groups()[:5])
        return Tile(m, n, k, cluster_m, cluster_n, pingpong=match[6] is not None)
