"""Which plan a problem gets: all legal candidates are enumerated, the fastest is taken.

"Leave it unfused" is one of them; `choose` says in a sentence, with the numbers, why it won or lost.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, TypeAlias

import sympy

from flux_inductor.planning.cost import predict
from flux_inductor.planning.machine import MACHINES, MachineModel
from flux_inductor.planning.plan import UNFUSED, Direction, Plan, PlanTable, single
from flux_inductor.planning.problem import Problem, Size
from flux_inductor.planning.table import MOST_ROWS, SizesOfM, table_by_m
from flux_inductor.planning.topology import Device, Topology

Mode: TypeAlias = Literal["auto", "always", "never"]
Hints: TypeAlias = Mapping[sympy.Symbol, int]

MODES: tuple[Mode, ...] = ("auto", "always", "never")
DIRECTIONS: tuple[Direction, ...] = ("push", "pull")

# Devices on which an engine executes fused plans.
ENGINES: tuple[Device, ...] = ("cpu",)
# A shard is cut into at most this many chunks: beyond, only fixed costs grow.
MOST_CHUNKS = 32
# Stands for an unknown N or K when everything must be fused and nobody gave a hint.
NOMINAL = 1024


@dataclass(frozen=True)
class Decision:
    """What `choose` found.

    Args:
        plan: by ranges of M; its text is the op's `plan` argument. All unfused when `fused` is False.
        fused: whether any size runs fused.
        fused_us: predicted time of the best fused plan, microseconds, at the size that `reason` names;
            None when nothing may be fused.
        unfused_us: likewise, of collective and matmul one after the other.
        code: "" when fused, else a stable word: "never", "one-rank", "empty", "topology", "no-schedule",
            "no-engine", "unknown-size" or "not-profitable".
        reason: a sentence for people.
    """

    plan: PlanTable
    fused: bool
    fused_us: float | None
    unfused_us: float | None
    code: str
    reason: str


def choose(
    problem: Problem,
    topology: Topology,
    mode: Mode = "auto",
    *,
    engines: Collection[Device] = ENGINES,
    hints: Hints | None = None,
) -> Decision:
    """The fastest plan for `problem` among the ranks of `topology`.

    All arguments must be the same on every rank of the group: then so is the plan. Answers are cached.

    Args:
        mode: "auto" fuses what is predicted faster by the machine's margin, "always" whatever is legal,
            "never" nothing.
        engines: devices on which an engine executes fused plans. On any other the decision is unfused and
            says so, whatever the mode: a fused op never runs on the reference engine unasked.
        hints: likely values of unknown sizes. A symbolic M needs none: the plan becomes a table by ranges
            of M. Its hint picks the size whose times are told; a hint of `strips` beside symbolic `rows` also
            sizes the chunks, which are taken for one strip otherwise. An unknown N or K is taken at its
            hint; without one, "auto" leaves the pair unfused.

    Raises:
        ValueError: an unknown mode.
    """
    if mode not in MODES:
        raise ValueError(f"strategy {mode!r} is unknown; valid: {', '.join(MODES)}")
    return _choose(problem, topology, mode, frozenset(engines), frozenset((hints or {}).items()))


@lru_cache(maxsize=4096)
def _choose(
    problem: Problem,
    topology: Topology,
    mode: Mode,
    engines: frozenset[Device],
    given: frozenset[tuple[sympy.Symbol, int]],
) -> Decision:
    obstacle = _obstacle(problem, topology, mode, engines)
    if obstacle is not None:
        code, reason = obstacle
        return Decision(single(UNFUSED), False, None, None, code, reason)
    hints = dict(given)
    unknown = _unknown(problem, hints)
    if unknown and mode == "auto":
        reason = f"size {unknown} of N or K is unknown until the program runs, and has no hint"
        return Decision(single(UNFUSED), False, None, None, "unknown-size", reason)
    settled = _settle(problem, hints)
    machine = MACHINES[topology.device]
    if settled.symbols:
        return _decide_by_m(settled, mode, machine, hints)
    return _decide(settled, mode, machine)


def _obstacle(
    problem: Problem, topology: Topology, mode: Mode, engines: frozenset[Device]
) -> tuple[str, str] | None:
    """(code, reason) why nothing may be fused, whatever it would gain."""
    if mode == "never":
        return "never", "strategy is 'never'"
    if problem.world == 1:
        return "one-rank", "the group has one rank: there is nothing to transfer"
    if 0 in (problem.m, problem.depth, *problem.columns):
        return "empty", f"the product is empty: M={problem.m} N={problem.columns} K={problem.depth}"
    if topology.ranks != problem.world:
        return "topology", f"the topology has {topology.ranks} ranks, the group {problem.world}"
    if topology.nodes > 1:
        return "no-schedule", f"no schedule yet for a group that spans {topology.nodes} nodes"
    if topology.link == "pcie":
        return "no-schedule", "no schedule yet for PCIe links, which want a ring"
    if topology.device not in engines:
        return "no-engine", f"no engine here executes fused ops on {topology.device}"
    return None


def _unknown(problem: Problem, hints: Hints) -> str:
    """Symbols of N and K that no hint gives, as text."""
    sizes = [size for size in (*problem.columns, problem.depth) if isinstance(size, sympy.Expr)]
    symbols = {symbol for size in sizes for symbol in size.free_symbols}
    return ", ".join(sorted(str(symbol) for symbol in symbols - set(hints)))


def _settle(problem: Problem, hints: Hints) -> Problem:
    """The problem with every size known but the one through which M varies (see SizesOfM)."""

    def known(size: Size, otherwise: int) -> int:
        if isinstance(size, int):
            return size
        values = {symbol: hints.get(symbol, otherwise) for symbol in size.free_symbols}
        return max(int(size.subs(values)), 1)

    columns = tuple(known(size, NOMINAL) for size in problem.columns)
    if problem.split == "columns":
        columns = tuple(-(-size // problem.world) * problem.world for size in columns)
    strips = problem.strips
    if isinstance(problem.rows, sympy.Expr):
        # One strip is the least favourable: its chunks are the smallest.
        strips = known(strips, 1)
    return replace(problem, strips=strips, columns=columns, depth=known(problem.depth, NOMINAL))


def candidates(problem: Problem, machine: MachineModel) -> tuple[Plan, ...]:
    """Every fused plan that is legal for the problem, the largest chunks first."""
    granule = int(machine.granule.value)
    extent = problem.extent
    if isinstance(extent, int):
        chunks = {-(-extent // (1 << power)) for power in range(MOST_CHUNKS.bit_length())}
        # A part of a shard holds whole granules; what rounding makes larger than a shard is the shard.
        chunks = {min(-(-chunk // granule) * granule, extent) for chunk in chunks}
    else:
        # Any size may come: powers of two up to one shard of the table's largest product.
        chunks = {granule << power for power in range((MOST_ROWS // granule).bit_length())}
    ordered = sorted(chunks, reverse=True)
    return tuple(Plan("mesh", direction, chunk) for direction in DIRECTIONS for chunk in ordered)


def _fastest(problem: Problem, plans: Collection[Plan], machine: MachineModel) -> tuple[float, Plan]:
    """Microseconds and plan; of equals, the first."""
    timed = ((predict(problem, plan, machine), plan) for plan in plans)
    return min(timed, key=lambda pair: pair[0])


def _figures(fused_us: float, unfused_us: float) -> str:
    return f"predicted {fused_us:.0f} us fused against {unfused_us:.0f} us unfused"


def _decide(problem: Problem, mode: Mode, machine: MachineModel) -> Decision:
    fused_us, plan = _fastest(problem, candidates(problem, machine), machine)
    unfused_us = predict(problem, UNFUSED, machine)
    figures = _figures(fused_us, unfused_us)
    if mode == "always":
        return Decision(single(plan), True, fused_us, unfused_us, "", f"strategy is 'always'; {figures}")
    if fused_us > (1 - machine.margin.value) * unfused_us:
        reason = f"{figures}; a gain of {machine.margin.value:.0%} or more is asked for"
        return Decision(single(UNFUSED), False, fused_us, unfused_us, "not-profitable", reason)
    return Decision(single(plan), True, fused_us, unfused_us, "", figures)


def _decide_by_m(problem: Problem, mode: Mode, machine: MachineModel, hints: Hints) -> Decision:
    sizes = SizesOfM(problem)
    fused = candidates(problem, machine)
    # Of equals the first wins. Unfused is handicapped, so that a plan must beat it by the margin.
    plans = fused if mode == "always" else (UNFUSED, *fused)

    def time(concrete: Problem, plan: Plan) -> float:
        handicap = 1 if plan.fused else 1 - machine.margin.value
        return float(predict(concrete, plan, machine) * handicap)

    table = table_by_m(sizes, plans, time)
    told = sizes.problem(_number_to_tell(sizes, table, problem, hints))
    fused_us, unfused_us = _fastest(told, fused, machine)[0], predict(told, UNFUSED, machine)
    figures = f"at M={told.m}: {_figures(fused_us, unfused_us)}"
    if not table.fused:
        reason = f"no M up to {MOST_ROWS} gains {machine.margin.value:.0%} or more; {figures}"
        return Decision(table, False, fused_us, unfused_us, "not-profitable", reason)
    asked = "strategy is 'always'" if mode == "always" else "by ranges of M"
    return Decision(table, True, fused_us, unfused_us, "", f"{asked}; {figures}")


def _number_to_tell(sizes: SizesOfM, table: PlanTable, problem: Problem, hints: Hints) -> int:
    """The size whose times the decision tells: the hinted one, else where fusing begins, else the largest."""
    assert isinstance(problem.m, sympy.Expr)
    m = problem.m.subs(hints)
    if m.is_number:
        return max(int(m) // sizes.unit, 1)
    bounds = [0, *(bound for bound, _ in table.entries if bound is not None)]
    for below, (_, plan) in zip(bounds, table.entries, strict=True):
        if plan.fused:
            return below // sizes.unit + 1
    return sizes.count
