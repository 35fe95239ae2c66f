"""Everything decided at compile time about one fused op, as a short text that round-trips.

A plan travels in the graph as a string argument, so that a printed graph explains itself, cache keys see
it, and ranks can compare theirs. One text holds one plan, or a table of plans by rows of the product:

    unfused
    mesh push chunk=64
    mesh push chunk=2560 last=1536 slices=4 tile=128x160x64/2x1 sweep=4
    mesh store chunk=1024 width=1536 tile=256x192x64/2x1 sweep=4 reserve=8
    m<=512: unfused; m<=4096: mesh push chunk=64; mesh push chunk=256
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, TypeAlias, cast, get_args

from flux_inductor.planning.tile import TILE, Tile
from flux_inductor.planning.topology import Device

if TYPE_CHECKING:
    from flux_inductor.planning.ops.op import Op

Route: TypeAlias = Literal["unfused", "mesh"]
Direction: TypeAlias = Literal["push", "pull", "store"]

_COUNT = re.compile(r"[1-9]\d*", re.ASCII)
_SEVERAL = re.compile(r"[2-9]|[1-9]\d+", re.ASCII)
_BOUND = re.compile(r"m<=([1-9]\d*)", re.ASCII)


@dataclass(frozen=True)
class Plan:
    """How one op runs.

    Args:
        route: the way of the chunks; "mesh" sends each straight to where it is needed.
        direction: who executes a transfer: the source's transfer engine ("push") or the target's ("pull"),
            or nobody, since the kernel stores its partial tiles straight into the target's memory ("store").
        chunk: rows (or columns) of a shard that one transfer moves, or that one signal announces; the last
            may be shorter. On CUDA a matmul_reduce_scatter counts the rows of all strips together, and they
            are those of one sweep: where a plan names a sweep, that counts.
        tile: of a CUDA thread block; None: the engine has no tiles, or chooses one when it knows the sizes.
        sweep: rows of clusters that a CUDA kernel sweeps together along the columns; 0: likewise.
        width: columns of the product in a chunk of a CUDA matmul_reduce_scatter, whose chunks are blocks of
            the kernel's own order; 0: likewise.
        reserve: SMs that a CUDA kernel leaves to other communication of the program (rule R2).
        last: rows of the last chunk of the shard that a rank needs last, in a CUDA all_gather_matmul; 0: as
            any other (see csrc/core/gather_chunks.h).
        slices: pieces along K in which it travels; 0: one.
    """

    route: Route
    direction: Direction = "push"
    chunk: int = 0
    tile: Tile | None = None
    sweep: int = 0
    width: int = 0
    reserve: int = 0
    last: int = 0
    slices: int = 0

    def __post_init__(self) -> None:
        assert self.route in get_args(Route), self.route
        assert self.direction in get_args(Direction), self.direction
        if self.route == "unfused":
            assert (self.direction, self.chunk, self.tile) == ("push", 0, None), self
            assert not any((self.sweep, self.width, self.reserve, self.last, self.slices)), self
        else:
            assert self.slices != 1, self
            assert self.chunk >= 1, self.chunk

    @property
    def fused(self) -> bool:
        return self.route != "unfused"

    @property
    def kernel_tile(self) -> Tile:
        """The tile of a plan that was completed for a CUDA kernel."""
        assert self.tile is not None, self
        return self.tile

    def __str__(self) -> str:
        if not self.fused:
            return self.route
        given = ((key, getattr(self, key)) for key in _TOKENS)
        return " ".join([self.route, self.direction, *(f"{key}={value}" for key, value in given if value)])


# What may follow the direction, in the order in which it is written, and what its value looks like.
_TOKENS = {
    "chunk": (_COUNT, "<rows>"),
    "last": (_COUNT, "<rows>"),
    "slices": (_SEVERAL, "<2 or more>"),
    "width": (_COUNT, "<columns>"),
    "tile": (TILE, "<MxNxK/cluster>"),
    "sweep": (_COUNT, "<rows of clusters>"),
    "reserve": (_COUNT, "<SMs>"),
}

UNFUSED = Plan("unfused")


def check_plan(plan: Plan, op: Op, device: Device) -> None:
    """Whether the engine of a device can run the plan.

    Raises:
        ValueError: it cannot; names what it can.
    """
    if not plan.fused:
        return
    valid = op.directions[device]
    if plan.direction not in valid:
        raise ValueError(
            f"plan '{plan}': {op.name} on {device} cannot {plan.direction!r}; valid: {', '.join(valid)}"
        )
    if plan.reserve and device != "cuda":
        raise ValueError(f"plan '{plan}': only CUDA kernels leave SMs alone; remove 'reserve='")
    for key in ("last", "slices"):
        if getattr(plan, key) and not (op.collective_first and device == "cuda"):
            raise ValueError(
                f"plan '{plan}': the chunks of a {op.name} on {device} are all alike; remove '{key}='"
            )


@dataclass(frozen=True)
class PlanTable:
    """Plans by rows of the whole product (Problem.m).

    Args:
        entries: (largest m, inclusive, plan) in rising order; the last one's bound is None: no limit.
    """

    entries: tuple[tuple[int | None, Plan], ...]

    def __post_init__(self) -> None:
        assert self.entries[-1][0] is None, self.entries
        bounds = [0, *(bound for bound, _ in self.entries[:-1] if bound is not None)]
        assert len(bounds) == len(self.entries), self.entries
        assert all(low < high for low, high in pairwise(bounds)), self.entries

    @property
    def fused(self) -> bool:
        """Whether any size runs fused."""
        return any(plan.fused for _, plan in self.entries)

    def at(self, m: int) -> Plan:
        """The plan for a product of `m` rows."""
        for bound, plan in self.entries:
            if bound is None or m <= bound:
                return plan
        raise AssertionError(self.entries)

    def __str__(self) -> str:
        return "; ".join(
            str(plan) if bound is None else f"m<={bound}: {plan}" for bound, plan in self.entries
        )


def single(plan: Plan) -> PlanTable:
    """The table that holds one plan for every size."""
    return PlanTable(((None, plan),))


@lru_cache(maxsize=1024)
def parse_plan(text: str) -> PlanTable:
    """Reads a plan's text: one plan, or entries `m<=<rows>: <plan>` in rising order and one without a bound.

    Raises:
        ValueError: names the wrong token and what may stand there.
    """
    *bounded, last = text.split(";")
    entries: list[tuple[int | None, Plan]] = []
    for part in bounded:
        head, colon, body = part.partition(":")
        match = _BOUND.fullmatch(head.strip())
        if not colon or match is None:
            raise ValueError(
                f"plan {text!r}: {part.strip()!r} must start with a bound such as 'm<=512:', "
                "since only the last entry of a table has none"
            )
        bound = int(match[1])
        previous = entries[-1][0] if entries else None
        if previous is not None and bound <= previous:
            raise ValueError(
                f"plan {text!r}: bound m<={bound} must be larger than the one before, m<={previous}"
            )
        entries.append((bound, _parse_one(body, text)))
    if ":" in last:
        raise ValueError(
            f"plan {text!r}: the last entry {last.strip()!r} must have no bound; "
            "add '; unfused' or another plan for larger sizes"
        )
    return PlanTable((*entries, (None, _parse_one(last, text))))


def _parse_one(part: str, text: str) -> Plan:
    route, *tokens = part.split() or [""]
    if route not in get_args(Route):
        valid = ", ".join(get_args(Route))
        raise ValueError(f"plan {text!r}: unknown route {route!r}; valid: {valid}")
    if route == "unfused":
        if tokens:
            raise ValueError(f"plan {text!r}: 'unfused' takes nothing, remove {tokens[0]!r}")
        return UNFUSED
    direction = tokens[0] if tokens else ""
    if direction not in get_args(Direction):
        valid = ", ".join(get_args(Direction))
        raise ValueError(f"plan {text!r}: {direction!r} after {route!r} is no direction; valid: {valid}")
    fields: dict[str, str] = {}
    for token in tokens[1:]:
        key, _, value = token.partition("=")
        if key not in _TOKENS:
            valid = ", ".join(f"{name}={form}" for name, (_, form) in _TOKENS.items())
            raise ValueError(f"plan {text!r}: unknown token {token!r}; valid: {valid}")
        if key in fields:
            raise ValueError(f"plan {text!r}: {key} is given twice")
        if not _TOKENS[key][0].fullmatch(value):
            example = {"tile": "tile=256x192x64/2x1", "slices": "slices=4"}.get(key, f"{key}=64")
            raise ValueError(f"plan {text!r}: {token!r} is malformed; write for example {example}")
        fields[key] = value
    if "chunk" not in fields:
        raise ValueError(f"plan {text!r}: chunk is missing; add for example chunk=64")
    counts = {key: int(value) for key, value in fields.items() if key != "tile"}
    tile = Tile.parse(fields["tile"]) if "tile" in fields else None
    return Plan(cast(Route, route), cast(Direction, direction), tile=tile, **counts)
