"""What ranks of a group must have in common at one collective, and what they all do where they differ.

Ranks may differ, legally: other sizes of weights, another need of the gathered tensor, another cut into
graphs. So only what crosses the link counts. A `Site` says it for one collective of one rank's graph, as a
text that stands in the graph:

    all_gather 4096 bf16                                       left unfused by this rank
    all_gather 4096 bf16 | 1 64 64 bf16 | mesh push chunk=32   fused
    reduce_scatter sum * fp32 | ...                            a size that is known when the program runs

First kind, elements and dtype of what the collective is given, which the unfused program has in common, too.
Then what a fused op moves: strips, rows and the third size (K of a gather, N of a scatter), and the dtype,
which a cast may have changed. Then the plan, as far as the exchange follows it. Not in it: N of a gather and
K of a scatter, whether the gathered tensor is kept, the tile of a gather.

`judge` is a pure function of what all ranks say about one collective. What it has decided for some of the
ranks may stand in place of what they said: the answer is the same. So ranks need not ask at one time.

    rank 0 fuses, rank 1 cannot: both run it unfused. Else rank 0 waits for chunks, rank 1 in its collective.
    rank 0 has decided to fuse in an earlier run and cannot take it back, rank 1 cannot fuse: a conflict.
    rank 0 plans chunks of 64 rows, rank 1 of 32: rank 1 takes rank 0's plan.
    rank 0 gathers 4096 elements, rank 1 scatters: a conflict, as it would be one without this package.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations

from flux_inductor.planning.ops.op import Op
from flux_inductor.planning.plan import Plan, PlanTable, parse_plan
from flux_inductor.planning.problem import Problem, Size
from flux_inductor.planning.topology import Device

ANY = "*"
_BAR = " | "


@dataclass(frozen=True)
class Site:
    """One collective of one rank's graph.

    Args:
        moves: kind, elements and dtype of the collective's input.
        geometry: of what the fused op moves; "" if this rank leaves the collective unfused.
        plan: the exchange's part of the plan; "" likewise.
    """

    moves: str
    geometry: str = ""
    plan: str = ""

    @property
    def fused(self) -> bool:
        return bool(self.plan)

    def __str__(self) -> str:
        return _BAR.join([self.moves, self.geometry, self.plan]) if self.fused else self.moves

    @staticmethod
    def parse(text: str) -> Site:
        return Site(*text.split(_BAR))


@dataclass(frozen=True)
class Verdict:
    """What all ranks do at one collective.

    Args:
        plan: text of the exchange's plan; "" to run unfused.
        because: why it runs unfused, for people.
    """

    plan: str = ""
    because: str = ""

    @property
    def fused(self) -> bool:
        return bool(self.plan)


@dataclass(frozen=True)
class Stand:
    """What one rank does at a collective.

    Args:
        place: where the collective stands in its graph, "<digest of the sequence>/<number>".
        decided: what was decided about it in an earlier run; None if nothing was.
    """

    rank: int
    place: str
    site: Site
    decided: Verdict | None = None

    @property
    def bound(self) -> bool:
        """Fused, and not to be taken back."""
        return self.decided is not None and self.decided.fused

    @property
    def able(self) -> bool:
        """Whether the rank runs it fused, or can."""
        return self.decided.fused if self.decided is not None else self.site.fused

    def __str__(self) -> str:
        state = "fused since an earlier run" if self.bound else "can fuse" if self.able else "unfused"
        return f"{self.site} ({state}; collective {self.place})"


@dataclass(frozen=True)
class Conflict:
    """Two ranks that cannot go together."""

    one: Stand
    other: Stand


def judge(stands: Sequence[Stand]) -> Verdict | Conflict:
    """What all ranks do. `stands` has one for each rank, in their order."""
    for one, other in combinations(stands, 2):
        if not alike(one.site.moves, other.site.moves):
            return Conflict(one, other)
    bound = [stand for stand in stands if stand.bound]
    unable = [stand for stand in stands if not stand.able]
    for stand in bound:
        others = (other for other in stands if other is not stand)
        contrary = next((other for other in others if not _go_together(stand, other)), None)
        if contrary is not None:
            return Conflict(*sorted((stand, contrary), key=lambda each: each.rank))
    if bound:
        assert bound[0].decided is not None
        return bound[0].decided
    if unable:
        first = unable[0]
        why = (
            first.decided.because
            if first.decided is not None
            else f"rank {first.rank} cannot fuse it: {first}"
        )
        return Verdict(because=why)
    for one, other in combinations(stands, 2):
        if not alike(one.site.geometry, other.site.geometry):
            return Verdict(because=f"ranks {one.rank} and {other.rank} move it otherwise: {one}; {other}")
    return Verdict(stands[0].site.plan)


def _go_together(bound: Stand, other: Stand) -> bool:
    if other.bound:
        assert bound.decided is not None
        assert other.decided is not None
        return bound.decided.plan == other.decided.plan
    return other.able and alike(bound.site.geometry, other.site.geometry)


def alike(one: str, other: str) -> bool:
    """Whether two texts agree in every word; an unknown size agrees with any."""
    ours, theirs = one.split(), other.split()
    return len(ours) == len(theirs) and all(
        a == b or ANY in (a, b) for a, b in zip(ours, theirs, strict=True)
    )


def digest_of(text: str) -> str:
    """A short name for it."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def size_text(size: Size) -> str:
    return str(size) if isinstance(size, int) else ANY


def moves_text(collective: str, elements: Size, dtype: str) -> str:
    """Of a collective, such as "all_gather" or "reduce_scatter sum", with so many elements as its input."""
    return f"{collective} {size_text(elements)} {dtype}"


def geometry(problem: Problem) -> str:
    """Of what is moved: one rank's shard of a gather, the whole product of a scatter."""
    width = problem.op.moved_width(problem)
    sizes = " ".join(map(size_text, (problem.strips, problem.rows, width)))
    cut = " by columns" if problem.split == "columns" else ""
    result = f" as {problem.result}" if problem.result_dtype != problem.dtype else ""
    return f"{sizes} {problem.dtype}{result}{cut}"


def exchange_of(table: PlanTable, op: Op, device: Device) -> str:
    """The part of a plan, or of a table of plans, that all ranks follow. "" if nothing is fused."""
    if not table.fused:
        return ""
    return str(_each(table, lambda plan: op.exchange(plan, device) if plan.fused else plan))


def _each(table: PlanTable, change: Callable[[Plan], Plan]) -> PlanTable:
    return PlanTable(tuple((bound, change(plan)) for bound, plan in table.entries))


@lru_cache(maxsize=1024)
def adopted(own: PlanTable, op: Op, device: Device, agreed: str) -> PlanTable:
    """This rank's plan for the exchange that was agreed on: its own, or else one that is fitted anew."""
    if exchange_of(own, op, device) == agreed:
        return own
    reserve = max(plan.reserve for _, plan in own.entries)
    return _each(parse_plan(agreed), lambda plan: replace(plan, reserve=reserve) if plan.fused else plan)
