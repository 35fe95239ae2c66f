"""How long a pair takes, unfused and by each plan, in microseconds.

Each formula is written once and evaluated on numbers, which is fast, or on symbols, which gives a sympy
expression to print. Its terms are the quantities of a MachineModel (machine.py) and, of a problem:
    flops, weights (their number), weight_bytes, shard_bytes, strips, world, chunks (of one shard),
    rate (TFLOP/s, the quantity of the dtype), kept (1 when the gathered tensor is returned, else 0),
    apart (1 when shards lie in more than one strip, else 0).

A fused op is a pipeline of P = (world - 1) * chunks equal transfers of time x beside world * chunks equal
multiplications of time s. The k-th arrival lets P - k + 1 multiplications follow it, which is linear in k, so
only the first and the last arrival can bound the whole:
    all_gather_matmul      max(world * chunks * s + i P x,  x + P s,      P x + s)
    matmul_reduce_scatter  max(world * chunks * s + i P x,  P s + x + s,  s + P x + s)
where i is the interference: 0 if multiplication does not notice a transfer, 1 if it stands still.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import sympy

from flux_inductor.planning.architecture import Architecture
from flux_inductor.planning.machine import MachineModel
from flux_inductor.planning.ops.op import Microseconds, Op, Terms
from flux_inductor.planning.plan import UNFUSED, Direction, Plan
from flux_inductor.planning.problem import Problem

_PROBLEM_TERMS = (
    *("flops", "weights", "weight_bytes", "shard_bytes", "strips"),
    *("world", "chunks", "rate", "kept", "apart"),
)
_MACHINE_TERMS = tuple(quantity.name for quantity in fields(MachineModel))
_MEGA, _KILO = 1e6, 1e3  # TFLOP/s and GB/s, a microsecond


def matmul_us(t: Terms) -> Microseconds:
    """The unfused matmuls alone."""
    return _passes_us(t) + _arithmetic_us(t)


def collective_us(op: Op, t: Terms) -> Microseconds:
    """The unfused collective alone, and the copy that brings shards in strips together or apart."""
    start, rate = op.collective_cost(t)
    regroup = t.apart * t.world * t.shard_bytes / (_KILO * t.copy)
    return start + (t.world - 1) * (t.hop + t.shard_bytes / (_KILO * rate)) + regroup


def plain_collective_us(op: str, size: int, world: int, machine: MachineModel) -> float:
    """A collective that is no part of a pair, alone.

    Args:
        op: "all_gather", "reduce_scatter" or "all_reduce", which is a reduce_scatter and an all_gather in
            one. Another one is taken for an all_gather, which moves at least as much.
        size: bytes of its input on each rank.
    """
    shard = size if op not in ("reduce_scatter", "all_reduce") else size / world
    gather = _hops_us(machine.gather.value, shard, world, machine)
    reduce = _hops_us(machine.reduce.value, shard, world, machine)
    if op == "reduce_scatter":
        return machine.reduce_scatter.value + reduce
    return machine.all_gather.value + gather + (reduce if op == "all_reduce" else 0)


def _hops_us(rate: float, shard: float, world: int, machine: MachineModel) -> float:
    return (world - 1) * (machine.hop.value + shard / (_KILO * rate))


def unfused_us(op: Op, t: Terms) -> Microseconds:
    """The pair as the user wrote it: one after the other."""
    return collective_us(op, t) + matmul_us(t)


def step_us(op: Op, t: Terms) -> Microseconds:
    """One chunk's multiplication in a fused op."""
    calls = t.calls * op.matmuls_of_step(t)
    return t.step + calls * _passes_us(t) + _arithmetic_us(t) / t.kernel / (t.world * t.chunks)


def transfer_us(direction: Direction, t: Terms) -> Microseconds:
    """One chunk's transfer in a fused op."""
    rate = t.pull if direction == "pull" else t.push
    return t.transfer + t.shard_bytes / t.chunks / (_KILO * rate)


def copies_us(op: Op, direction: Direction, t: Terms) -> Microseconds:
    """Copies inside a rank's memory that nothing hides."""
    return op.copied_shards(direction, t) * t.shard_bytes / (_KILO * t.copy)


def fused_us(op: Op, direction: Direction, t: Terms) -> Microseconds:
    """The fused op by a mesh plan."""
    step, transfer = step_us(op, t), transfer_us(direction, t)
    peers = (t.world - 1) * t.chunks
    busy = t.world * t.chunks * step + t.interference * peers * transfer
    return t.entry + _largest(busy, *op.ends(step, transfer, peers)) + copies_us(op, direction, t)


def plan_us(op: Op, plan: Plan, t: Terms) -> Microseconds:
    """The pair by a plan, which may be the unfused one."""
    return fused_us(op, plan.direction, t) if plan.fused else unfused_us(op, t)


def _passes_us(t: Terms) -> Microseconds:
    """What one pass over all weights costs beside arithmetic."""
    return t.weights * t.call + t.repack * t.weight_bytes / _MEGA


def _arithmetic_us(t: Terms) -> Microseconds:
    """The whole product's arithmetic, or the reading of the weights where that takes longer."""
    return _largest(t.flops / (_MEGA * t.rate), t.weight_bytes / (_KILO * t.memory))


def _largest(*times: Microseconds) -> Microseconds:
    if any(isinstance(time, sympy.Expr) for time in times):
        return sympy.Max(*times, evaluate=False)  # evaluation would compare them pairwise: slow
    return max(times)


def named_terms() -> Terms:
    """Every term as a symbol of its name: formulas of it print themselves."""
    names = (*_MACHINE_TERMS, *_PROBLEM_TERMS)
    return Terms(**{name: sympy.Symbol(name, positive=True) for name in names})


def terms(problem: Problem, plan: Plan, machine: MachineModel) -> Terms:
    """Every term's value; those of sizes that the problem leaves open are expressions of them."""
    return Terms(
        **{name: getattr(machine, name).value for name in _MACHINE_TERMS},
        flops=problem.flops,
        weights=len(problem.columns),
        weight_bytes=sum(problem.columns) * problem.depth * problem.itemsize,
        shard_bytes=problem.shard_bytes,
        strips=problem.strips,
        world=problem.world,
        chunks=_chunks(problem, plan),
        rate=getattr(machine, problem.dtype).value,
        kept=int(problem.return_gathered),
        apart=int(problem.strips != 1),
    )


def _chunks(problem: Problem, plan: Plan) -> Any:
    """Chunks of one shard."""
    if not plan.fused:
        return 1
    if plan.width:  # blocks of the part seen as one matrix, its strips one after another
        rows, columns = problem.strips * problem.rows, problem.columns[0]
        return -(-rows // plan.chunk) * -(-columns // plan.width)
    if isinstance(problem.extent, int):
        return -(-problem.extent // plan.chunk)
    return sympy.ceiling(problem.extent / plan.chunk)


def predict(problem: Problem, plan: Plan, architecture: Architecture) -> Microseconds:
    """Microseconds by a plan: a float, or an expression of the sizes that the problem leaves open."""
    known = architecture.fused_us(problem, plan) if plan.fused else None
    return plan_us(problem.op, plan, terms(problem, plan, architecture.machine)) if known is None else known


def explain(problem: Problem, plan: Plan, architecture: Architecture) -> str:
    """The parts of a fused plan's prediction and of the unfused pair's, one a line, with their formulas.

    The plan's own line is what `predict` says; where the timeline does, the parts are those of the outline.
    """
    assert plan.fused
    op, direction = problem.op, plan.direction
    parts: dict[str, Callable[[Terms], Microseconds]] = {
        "unfused": lambda t: plan_us(op, UNFUSED, t),
        "  collective": lambda t: collective_us(op, t),
        "  matmul": matmul_us,
        str(plan): lambda _: predict(problem, plan, architecture),
        "  entry": lambda t: t.entry,
        "  one step": lambda t: step_us(op, t),
        "  one transfer": lambda t: transfer_us(direction, t),
        "  copies": lambda t: copies_us(op, direction, t),
    }
    values, names = terms(problem, plan, architecture.machine), named_terms()
    lines = []
    for name, part in parts.items():
        time = part(values)
        shown = str(time) if isinstance(time, sympy.Expr) else f"{time:.1f}"
        formula = f"  = {part(names)}" if name.startswith(" ") else ""
        lines.append(f"{name:<24}{shown:>12} us{formula}")
    return "\n".join(lines)
