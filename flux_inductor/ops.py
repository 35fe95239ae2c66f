"""The fused ops as torch.library ops: schemas, checks, fake kernels, and the choice of the engine.

    flux_inductor::all_gather_matmul(x, weights, biases, group, plan, gather_dim, return_gathered,
                                     place) -> Tensor[]
        x        this rank's shard [..., m, ..., K], at least two dims, any strides
        weights  each [K, N_i], any strides (x @ W and x @ W.t() alike)
        biases   empty, or one entry a weight: None or [N_i]
        returns  one product [..., world * m, ..., N_i] a weight, then, if return_gathered, the whole
                 [..., world * m, ..., K]; all contiguous, none aliasing a workspace

    flux_inductor::matmul_reduce_scatter(x, weight, bias, addend, group, plan, scatter_dim, reduce_op,
                                         scale, out_dtype, place) -> Tensor
        x        [..., K];  weight [K, N];  bias None or [N];  addend None or the product's shape [..., N]
        returns  this rank's part, along scatter_dim, of the sum (or mean) over the ranks of
                 scale * (x @ weight) + bias + addend; contiguous
        with out_dtype float32 and a bfloat16 or float16 product, all but the product is float32: the
                 scaling, the sums and the result. Bias and addend may then have either dtype. Whether the
                 product of one rank is rounded to x's dtype first is left open: torch.mm does it, fp32
                 accumulators need not.

    flux_inductor::agree(group, digest, sites, device) -> Tensor
        tells the other ranks which collectives a graph is about to run (runtime/agreement.py); nothing of use

`group` is a process group's name and `plan` a plan's text, so that a printed graph explains itself and the
compiler's cache keys see both; or plan "auto", which chooses when the op runs (auto_plan.py). `place` says
where in its graph's sequence of collectives an op stands; all ranks agree on what stands there before it
first runs. Calls by hand have none. What an op computes is defined by the reference engine
(runtime/reference.py).

All tensors of a call have one dtype, but for out_dtype: bfloat16, float16 or float32. The ops are not
differentiable; graphs use them below autograd, and people use the functions of the same names in autograd.py.

Rejected: torch.library.custom_op (9 us a call against 2.6 for define + impl); an `out=` overload (it saves
1 us a call in compiled code, and only from torch 2.13 on).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from flux_inductor.auto_plan import AUTO, plan_by_hand, plan_call
from flux_inductor.dtypes import DTYPES
from flux_inductor.op_arguments import check_no_gradient, gather_call, scatter_call
from flux_inductor.options import Options, current
from flux_inductor.planning.ops import ALL_GATHER_MATMUL, MATMUL_REDUCE_SCATTER
from flux_inductor.planning.ops.call import Call
from flux_inductor.planning.ops.op import Op
from flux_inductor.planning.plan import parse_plan
from flux_inductor.runtime.agreed import agree_on_call, agree_on_place, captures
from flux_inductor.runtime.agreement import Agreement
from flux_inductor.runtime.bound import BoundCall, BoundCalls, describe, remember
from flux_inductor.runtime.engine import engine_choice, engine_for, tally_of
from flux_inductor.runtime.groups import state_of
from flux_inductor.runtime.plain_collectives import communicators_seen

_LIBRARY = torch.library.Library("flux_inductor", "DEF")


@dataclass(frozen=True)
class _Definition:
    """What is special about one op. Its arguments are `operands`, group, plan, `flags`, and a place at last.

    Args:
        operands, flags: as the schema writes them.
        returns: likewise.
        describe: checks the operands, the group and the flags, and makes the call of them.
    """

    op: Op
    operands: tuple[str, ...]
    flags: tuple[str, ...]
    returns: str
    describe: Callable[..., Call]

    @property
    def schema(self) -> str:
        arguments = (*self.operands, "str group", "str plan", *self.flags, 'str place=""')
        return f"{self.op.name}({', '.join(arguments)}) -> {self.returns}"


_DEFINITIONS = (
    _Definition(
        ALL_GATHER_MATMUL,
        ("Tensor x", "Tensor[] weights", "Tensor?[] biases"),
        ("int gather_dim", "bool return_gathered"),
        "Tensor[]",
        gather_call,
    ),
    _Definition(
        MATMUL_REDUCE_SCATTER,
        ("Tensor x", "Tensor weight", "Tensor? bias", "Tensor? addend"),
        ("int scatter_dim", "str reduce_op", "float scale", "ScalarType? out_dtype=None"),
        "Tensor",
        scatter_call,
    ),
)


# ---------------------------------------------------------------- fake results


def _fake(definition: _Definition) -> Callable[..., list[Tensor] | Tensor]:
    count = len(definition.operands)
    several = definition.returns == "Tensor[]"

    def fake(*arguments: Any) -> list[Tensor] | Tensor:
        operands, (group, plan, *rest) = arguments[:count], arguments[count:]
        call = definition.describe(*operands, group, *rest[: len(definition.flags)])
        if plan != AUTO:
            parse_plan(plan)
        dtype = DTYPES[call.result_dtype]
        results = [operands[0].new_empty(shape, dtype=dtype) for shape in call.results]
        return results if several else results[0]

    return fake


# ---------------------------------------------------------------- kernels


def _kernel(definition: _Definition) -> Callable[..., list[Tensor] | Tensor]:
    """The op itself: finds the bound call, or binds it, and runs it."""
    count, last, op = (
        len(definition.operands),
        len(definition.operands) + 2 + len(definition.flags),
        definition.op,
    )

    def kernel(*arguments: Any) -> Any:
        operands, group, plan = arguments[:count], arguments[count], arguments[count + 1]
        flags = arguments[count + 2 : last]  # the dispatcher leaves out what has its default
        place = arguments[last] if len(arguments) > last else ""
        calls = state_of(group, BoundCalls)
        try:
            if torch.is_grad_enabled():
                check_no_gradient(op.name, operands)
            key = (op.name, plan, place, _choice(place, group), flags, engine_choice(), describe(*operands))
            bound = calls.known.get(key)
            if bound is not None:
                bound.tally.runs += 1
            else:
                call = definition.describe(*operands, group, *flags)
                bound = _bind(call, operands, group, plan, place)
                remember(calls.known, key, bound)
        except BaseException:
            calls.refused += 1  # peers may have begun it
            raise
        return bound.run(*operands)

    return kernel


def _choice(place: str, group: str) -> tuple[Options, int] | None:
    """What a plan is chosen by, in addition to the call; None for compiled graphs, where it is given."""
    return None if place else (current(), communicators_seen(group))


def _bind(call: Call, operands: Sequence[Any], group: str, plan: str, place: str) -> BoundCall:
    device = operands[0].device.type
    if plan == AUTO:
        agreed = agree_on_call(call, plan_call(call, group, device), group, device)
    else:
        table = parse_plan(plan) if place else plan_by_hand(plan, group, device)
        agreed = agree_on_place(table, call.op, place, group, device)
    m = call.problem.m
    assert isinstance(m, int), call
    chosen = agreed.table.at(m)
    engine = engine_for(call.op, device, group, chosen)
    run = engine.bind(call, operands, group, chosen)
    return BoundCall(tally_of(call.op, engine), agreed.counted(run))


for _one in _DEFINITIONS:
    _LIBRARY.define(_one.schema, tags=(torch.Tag.needs_fixed_stride_order,))
    _LIBRARY.impl(_one.op.name, _kernel(_one), "CompositeExplicitAutograd")
    torch.library.register_fake(f"flux_inductor::{_one.op.name}", _fake(_one), lib=_LIBRARY)


# ---------------------------------------------------------------- agreement

_LIBRARY.define("agree(str group, str digest, str sites, Device device) -> Tensor")


@torch.library.register_fake("flux_inductor::agree", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _agree_fake(group: str, digest: str, sites: str, device: torch.device) -> Tensor:
    return torch.empty(0, device=device)


def _agree(group: str, digest: str, sites: str, device: torch.device) -> Tensor:
    state_of(group, Agreement).begin(digest, sites, captures(device.type))
    return _nothing(device)


@lru_cache
def _nothing(device: torch.device) -> Tensor:
    """Without elements, it needs no memory and may be given any number of times."""
    with torch.inference_mode(False):
        return torch.empty(0, device=device)


_LIBRARY.impl("agree", _agree, "CompositeExplicitAutograd")
