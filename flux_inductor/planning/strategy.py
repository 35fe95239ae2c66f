"""Which plan a problem gets: all legal candidates are enumerated, the fastest is taken.

"Leave it unfused" is one of them; `choose` says in a sentence, with the numbers, why it won or lost.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, TypeAlias

import sympy

from flux_inductor.planning.architecture import Architecture
from flux_inductor.planning.architectures import architecture_of, check_reserve
from flux_inductor.planning.cost import predict
from flux_inductor.planning.installed import Installed
from flux_inductor.planning.machine import MachineModel
from flux_inductor.planning.plan import UNFUSED, Plan, PlanTable, single
from flux_inductor.planning.problem import Problem, Size
from flux_inductor.planning.table import MOST_ROWS, SizesOfM, table_by_m
from flux_inductor.planning.topology import Device, Topology

Mode: TypeAlias = Literal["auto", "always", "never"]

MODES: tuple[Mode, ...] = ("auto", "always", "never")

NO_ENGINE: dict[Device, str] = {
    "cpu": "no engine here executes fused ops on the CPU",
    "cuda": "the package was built without CUDA kernels",
}
# Stands for an unknown number of strips (a batch, say) beside unknown rows.
TYPICAL_STRIPS = 8
# Stands for an unknown N or K when everything must be fused.
NOMINAL = 1024
# N of a gather and K of a scatter are priced as the next multiple of this. Ranks that share 313 columns have
# 157 and 156 of them: nearly all such neighbours then have one price, and decide alike. No price is finer.
PRICED = 16


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
            "no-engine", "kernel" (it lacks something), "unknown-size" or "not-profitable".
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
    installed: Installed,
    reserve: int | None = None,
) -> Decision:
    """The fastest plan for `problem` among the ranks of `topology`.

    All arguments must be the same on every rank of the group: then so is the plan. So a size that is unknown
    until the program runs has no likely value here, which ranks could see differently. With such an M the
    plan is a table by its ranges; with such an N or K, "auto" leaves the pair unfused. Answers are cached.

    Args:
        mode: "auto" fuses what is predicted faster by the machine's margin, "always" whatever is legal,
            "never" nothing.
        reserve: SMs that CUDA kernels leave to other communication; None: some where the topology
            says that there is other communication.
        installed: the engines that there are. On another device the decision is unfused and says so,
            whatever the mode: a fused op never runs on the reference engine unasked.

    Raises:
        ValueError: an unknown mode, or a `reserve` that leaves no room.
    """
    if mode not in MODES:
        raise ValueError(f"strategy {mode!r} is unknown; valid: {', '.join(MODES)}")
    if reserve is not None:
        check_reserve(reserve, topology)
    kept_free = reserve_of(topology) if reserve is None else reserve
    if not architecture_of(topology).most_reserve:
        kept_free = 0
    return _choose(problem, topology, mode, kept_free, installed)


def reserve_of(topology: Topology) -> int:
    """SMs that kernels leave to other communication, unless the user says otherwise."""
    return architecture_of(topology).reserve if topology.shared else 0


@lru_cache(maxsize=4096)
def _choose(
    problem: Problem,
    topology: Topology,
    mode: Mode,
    reserve: int,
    installed: Installed,
) -> Decision:
    obstacle = _obstacle(problem, topology, mode, installed)
    if obstacle is not None:
        code, reason = obstacle
        return Decision(single(UNFUSED), False, None, None, code, reason)
    unknown = _unknown(problem)
    if unknown and mode == "auto":
        reason = f"size {unknown} of N or K is unknown until the program runs"
        return Decision(single(UNFUSED), False, None, None, "unknown-size", reason)
    settled = priced(_settle(problem))
    architecture = architecture_of(topology)
    plans = candidates(settled, architecture, reserve)
    if settled.symbols:
        return _decide_by_m(settled, mode, architecture, plans)
    return _decide(settled, mode, architecture, plans)


def _obstacle(
    problem: Problem,
    topology: Topology,
    mode: Mode,
    installed: Installed,
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
        what = (
            "hosts, or containers with process namespaces of their own"
            if topology.device == "cpu"
            else "hosts"
        )
        return "no-schedule", f"no schedule yet for a group that spans {topology.nodes} nodes ({what})"
    if topology.link == "pcie":
        return "no-schedule", "no schedule yet for PCIe links, which want a ring"
    if not installed.executes(topology.device):
        return "no-engine", NO_ENGINE[topology.device]
    limit = architecture_of(topology).limit(problem)
    if not limit and not installed.has_kernel(topology.device, problem):
        written = "x @ W.t()" if problem.layout == "k_major" else "x @ W"
        limit = f"no kernel was compiled for {problem.dtype} and weights that lie as in {written}"
    return ("kernel", limit) if limit else None


def _unknown(problem: Problem) -> str:
    """Symbols of N and K, as text."""
    sizes = [size for size in (*problem.columns, problem.depth) if isinstance(size, sympy.Expr)]
    symbols = {symbol for size in sizes for symbol in size.free_symbols}
    return ", ".join(sorted(str(symbol) for symbol in symbols))


def _settle(problem: Problem) -> Problem:
    """The problem with every size known but the one through which M varies (see SizesOfM)."""

    def known(size: Size) -> int:
        if isinstance(size, int):
            return size
        return max(int(size.subs(dict.fromkeys(size.free_symbols, NOMINAL))), 1)

    columns = tuple(known(size) for size in problem.columns)
    if problem.split == "columns":
        columns = tuple(-(-size // problem.world) * problem.world for size in columns)
    both = isinstance(problem.rows, sympy.Expr) and isinstance(problem.strips, sympy.Expr)
    strips = TYPICAL_STRIPS if both else problem.strips
    return replace(problem, strips=strips, columns=columns, depth=known(problem.depth))


def priced(problem: Problem) -> Problem:
    """The problem with those sizes rounded up that may differ between ranks; all must be known."""

    def up(size: Size) -> int:
        assert isinstance(size, int), size
        return -(-size // PRICED) * PRICED

    return problem.op.priced(problem, up)


def candidates(problem: Problem, architecture: Architecture, reserve: int = 0) -> tuple[Plan, ...]:
    """Every fused plan that is legal for the problem; of those that the model finds equal, the best first."""
    sizes = architecture.chunks(problem)
    plans = [
        Plan("mesh", direction, chunk, reserve=reserve)
        for direction in problem.op.directions[architecture.device]
        # Stores of a kernel are cut by it, whatever a plan says before it is completed.
        for chunk in (sizes[:1] if direction == "store" else sizes)
    ]
    return architecture.completed(problem, plans)


def _fastest(problem: Problem, plans: Collection[Plan], architecture: Architecture) -> tuple[float, Plan]:
    """Microseconds and plan; of equals, the first."""
    timed = ((predict(problem, plan, architecture), plan) for plan in plans)
    return min(timed, key=lambda pair: pair[0])


def _figures(fused_us: float, unfused_us: float) -> str:
    return f"predicted {fused_us:.0f} us fused against {unfused_us:.0f} us unfused"


def worth_us(unfused_us: float, machine: MachineModel) -> float:
    """The longest predicted time for which a fused op is chosen."""
    return unfused_us - max(machine.margin.value * unfused_us, machine.least_gain.value)


def _asked(machine: MachineModel) -> str:
    least = f" and {machine.least_gain.value:.0f} us" if machine.least_gain.value else ""
    return f"a gain of {machine.margin.value:.0%}{least} or more"


def _decide(problem: Problem, mode: Mode, architecture: Architecture, fused: tuple[Plan, ...]) -> Decision:
    fused_us, plan = _fastest(problem, fused, architecture)
    unfused_us = predict(problem, UNFUSED, architecture)
    figures = _figures(fused_us, unfused_us)
    if mode == "always":
        return Decision(single(plan), True, fused_us, unfused_us, "", f"strategy is 'always'; {figures}")
    if fused_us > worth_us(unfused_us, architecture.machine):
        reason = f"{figures}; {_asked(architecture.machine)} is asked for"
        return Decision(single(UNFUSED), False, fused_us, unfused_us, "not-profitable", reason)
    return Decision(single(plan), True, fused_us, unfused_us, "", figures)


def _decide_by_m(
    problem: Problem, mode: Mode, architecture: Architecture, fused: tuple[Plan, ...]
) -> Decision:
    sizes = SizesOfM(problem)
    # Of equals the first wins. Unfused is handicapped, so that a plan must beat it by the margin.
    plans = fused if mode == "always" else (UNFUSED, *fused)

    def time(concrete: Problem, plan: Plan) -> float:
        predicted = float(predict(concrete, plan, architecture))
        return predicted if plan.fused or mode == "always" else worth_us(predicted, architecture.machine)

    table = table_by_m(sizes, plans, time)
    told = sizes.problem(_number_to_tell(sizes, table))
    fused_us, unfused_us = _fastest(told, fused, architecture)[0], predict(told, UNFUSED, architecture)
    figures = f"at M={told.m}: {_figures(fused_us, unfused_us)}"
    if not table.fused:
        reason = f"no M up to {MOST_ROWS} has {_asked(architecture.machine)}; {figures}"
        return Decision(table, False, fused_us, unfused_us, "not-profitable", reason)
    asked = "strategy is 'always'" if mode == "always" else "by ranges of M"
    return Decision(table, True, fused_us, unfused_us, "", f"{asked}; {figures}")


def _number_to_tell(sizes: SizesOfM, table: PlanTable) -> int:
    """The size whose times the decision tells: where fusing begins, or the largest if nowhere."""
    bounds = [0, *(bound for bound, _ in table.entries if bound is not None)]
    for below, (_, plan) in zip(bounds, table.entries, strict=True):
        if plan.fused:
            return below // sizes.unit + 1
    return sizes.count
