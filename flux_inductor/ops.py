"""The fused ops as torch.library ops: schemas, checks, fake kernels, and the choice of the engine.

    flux_inductor::all_gather_matmul(x, weights, biases, group, plan, gather_dim, return_gathered,
                                     place) -> Tensor[]
        x        this rank's shard [..., m, ..., K], at least two dims, any strides
        weights  each [K, N_i], any strides (x @ W and x @ W.t() alike)
        biases   empty, or one entry a weight: None or [N_i]
        returns  one product [..., world * m, ..., N_i] a weight, then, if return_gathered, the whole
                 [..., world * m, ..., K]; all contiguous, none aliasing a workspace

    flux_inductor::matmul_reduce_scatter(x, weight, bias, addend, group, plan, scatter_dim, reduce_op,
                                         scale, place, out_dtype) -> Tensor
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

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from flux_inductor.auto_plan import AUTO, plan_by_hand, plan_gather, plan_scatter
from flux_inductor.options import Options, current
from flux_inductor.planning.exchange import gather_moves, scatter_moves
from flux_inductor.planning.plan import parse_plan
from flux_inductor.runtime.agreed import agree_on_call, agree_on_place, captures
from flux_inductor.runtime.agreement import Agreement
from flux_inductor.runtime.bound import BoundCall, BoundCalls, describe, remember
from flux_inductor.runtime.engine import engine_choice, engine_for, tally_of
from flux_inductor.runtime.groups import group_size, state_of
from flux_inductor.runtime.plain_collectives import communicators_seen

FUSED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
REDUCE_OPS = ("sum", "avg")

_LIBRARY = torch.library.Library("flux_inductor", "DEF")
_TAGS = (torch.Tag.needs_fixed_stride_order,)

_LIBRARY.define(
    "all_gather_matmul(Tensor x, Tensor[] weights, Tensor?[] biases, str group, str plan, "
    'int gather_dim, bool return_gathered, str place="") -> Tensor[]',
    tags=_TAGS,
)
_LIBRARY.define(
    "matmul_reduce_scatter(Tensor x, Tensor weight, Tensor? bias, Tensor? addend, str group, str plan, "
    'int scatter_dim, str reduce_op, float scale, str place="", ScalarType? out_dtype=None) -> Tensor',
    tags=_TAGS,
)
_LIBRARY.define("agree(str group, str digest, str sites, Device device) -> Tensor")


# ---------------------------------------------------------------- checks


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _may_equal(a: int | torch.SymInt, b: int | torch.SymInt) -> bool:
    """False if the sizes are known to differ; comparing symbolic ones would add a guard, so run time does."""
    return not (isinstance(a, int) and isinstance(b, int)) or a == b


def _check_operands(op: str, x: Tensor, weights: Sequence[Tensor]) -> None:
    _require(x.dim() >= 2, f"{op}: x has shape {tuple(x.shape)}; it needs at least two dims, [..., K]")
    _require(
        x.dtype in FUSED_DTYPES,
        f"{op}: x is {x.dtype}; fused ops take bfloat16, float16 or float32: convert it, or leave the "
        "collective and the matmul apart",
    )
    _require(len(weights) > 0, f"{op}: no weight was given; pass at least one [K, N]")
    for weight in weights:
        _require(
            weight.dim() == 2 and _may_equal(weight.shape[0], x.shape[-1]),
            f"{op}: a weight of shape {tuple(weight.shape)} does not multiply x of shape {tuple(x.shape)}; "
            f"it must be [{x.shape[-1]}, N]",
        )
        _check_like(op, "a weight", weight, x)


def _check_like(op: str, what: str, tensor: Tensor, x: Tensor, wide: torch.dtype | None = None) -> None:
    """`wide`: another dtype that the tensor may have."""
    _require(
        tensor.dtype in (x.dtype, wide) and tensor.device == x.device,
        f"{op}: {what} is {tensor.dtype} on {tensor.device}, x is {x.dtype} on {x.device}; "
        "all tensors of a fused op share one dtype and device",
    )


def _check_bias(
    op: str, bias: Tensor | None, weight: Tensor, x: Tensor, wide: torch.dtype | None = None
) -> None:
    if bias is None:
        return
    _require(
        bias.dim() == 1 and _may_equal(bias.shape[0], weight.shape[1]),
        f"{op}: a bias of shape {tuple(bias.shape)} does not fit a weight of shape {tuple(weight.shape)}; "
        f"it must be [{weight.shape[1]}]",
    )
    _check_like(op, "a bias", bias, x, wide)


def _check_no_gradient(op: str, *operands: Tensor | None) -> None:
    """Run as a plain op, the call would lose the gradient, or fail in the middle, with its peers waiting."""
    for operand in operands:
        if operand is not None and operand.requires_grad:
            raise ValueError(
                f"{op}: an operand of shape {tuple(operand.shape)} requires grad, and the op "
                f"torch.ops.flux_inductor.{op} is not differentiable; call flux_inductor.{op}, which is, or "
                "call the op under torch.no_grad()"
            )


def check_gather(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], dim: int) -> None:
    op = "all_gather_matmul"
    _check_operands(op, x, weights)
    _require(
        0 <= dim < x.dim() - 1,
        f"{op}: gather_dim is {dim}; for x of shape {tuple(x.shape)} it must be in [0, {x.dim() - 2}], "
        "since the last dim is contracted",
    )
    _require(
        len(biases) in (0, len(weights)),
        f"{op}: {len(biases)} biases for {len(weights)} weights; pass none, or one entry (a tensor or None) "
        "for each weight",
    )
    for bias, weight in zip(biases, weights, strict=False):
        _check_bias(op, bias, weight, x)


def check_scatter(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    addend: Tensor | None,
    group: str,
    dim: int,
    reduce_op: str,
    out_dtype: torch.dtype | None,
) -> None:
    op = "matmul_reduce_scatter"
    _check_operands(op, x, [weight])
    _require(
        out_dtype in (None, x.dtype, torch.float32),
        f"{op}: out_dtype is {out_dtype}, x is {x.dtype}; the sum is made in x's dtype or in torch.float32",
    )
    _check_bias(op, bias, weight, x, out_dtype)
    product = [*x.shape[:-1], weight.shape[1]]
    if addend is not None:
        _require(
            addend.dim() == len(product) and all(map(_may_equal, addend.shape, product)),
            f"{op}: addend has shape {tuple(addend.shape)}; it must have the product's, {tuple(product)}",
        )
        _check_like(op, "addend", addend, x, out_dtype)
    _require(
        reduce_op in REDUCE_OPS,
        f"{op}: reduce_op is {reduce_op!r}; it must be one of {', '.join(REDUCE_OPS)}",
    )
    _require(
        0 <= dim < x.dim(),
        f"{op}: scatter_dim is {dim}; for a product of shape {tuple(product)} it must be in "
        f"[0, {x.dim() - 1}]",
    )
    world = group_size(group)
    _require(
        not isinstance(product[dim], int) or product[dim] % world == 0,
        f"{op}: dim {dim} of the product {tuple(product)} does not divide by the {world} ranks of group "
        f"{group!r}; pad it to a multiple of {world}",
    )


# ---------------------------------------------------------------- kernels


def _gathered_shape(x: Tensor, group: str, dim: int) -> list[int]:
    shape = list(x.shape)
    shape[dim] = shape[dim] * group_size(group)
    return shape


def _rows(x: Tensor) -> int:
    return math.prod(x.shape[:-1])


def _check_plan(plan: str) -> None:
    if plan != AUTO:
        parse_plan(plan)


def _choice(plan: str, place: str, group: str) -> tuple[Options, int] | None:
    """What a plan is chosen by, in addition to the call; None for compiled graphs, where it is given."""
    return None if place else (current(), communicators_seen(group))


@torch.library.register_fake("flux_inductor::all_gather_matmul", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _all_gather_matmul_fake(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor | None],
    group: str,
    plan: str,
    gather_dim: int,
    return_gathered: bool,
    place: str = "",
) -> list[Tensor]:
    check_gather(x, weights, biases, gather_dim)
    _check_plan(plan)
    whole = _gathered_shape(x, group, gather_dim)
    outputs = [x.new_empty([*whole[:-1], weight.shape[1]]) for weight in weights]
    if return_gathered:
        outputs.append(x.new_empty(whole))
    return outputs


def _all_gather_matmul(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor | None],
    group: str,
    plan: str,
    gather_dim: int,
    return_gathered: bool,
    place: str = "",
) -> list[Tensor]:
    calls = state_of(group, BoundCalls)
    try:
        if torch.is_grad_enabled():
            _check_no_gradient("all_gather_matmul", x, *weights, *biases)
        operands = describe(x, weights, biases)
        options = (gather_dim, return_gathered)
        key = (plan, place, _choice(plan, place, group), options, engine_choice(), operands)
        call = calls.gathers.get(key)
        if call is not None:
            call.tally.runs += 1
        else:
            check_gather(x, weights, biases, gather_dim)
            if plan == AUTO:
                problem, table = plan_gather(x, weights, group, gather_dim, return_gathered)
                moves = gather_moves(x.numel(), problem.dtype)
                agreed = agree_on_call(problem, table, moves, group, x.device.type)
            else:
                table = parse_plan(plan) if place else plan_by_hand(plan, group, x.device.type)
                agreed = agree_on_place(table, "all_gather_matmul", place, group, x.device.type)
            chosen = agreed.table.at(group_size(group) * _rows(x))
            engine = engine_for("all_gather_matmul", x.device.type, group, chosen)
            run = engine.bind_gather(x, weights, biases, group, chosen, gather_dim, return_gathered)
            call = BoundCall(tally_of("all_gather_matmul", engine), agreed.counted(run))
            remember(calls.gathers, key, call)
    except BaseException:
        calls.refused += 1  # peers may have begun it
        raise
    return call.run(x, weights, biases)


@torch.library.register_fake("flux_inductor::matmul_reduce_scatter", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _matmul_reduce_scatter_fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    addend: Tensor | None,
    group: str,
    plan: str,
    scatter_dim: int,
    reduce_op: str,
    scale: float,
    place: str = "",
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    check_scatter(x, weight, bias, addend, group, scatter_dim, reduce_op, out_dtype)
    _check_plan(plan)
    shape = [*x.shape[:-1], weight.shape[1]]
    shape[scatter_dim] = shape[scatter_dim] // group_size(group)
    return x.new_empty(shape, dtype=out_dtype)


def _matmul_reduce_scatter(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    addend: Tensor | None,
    group: str,
    plan: str,
    scatter_dim: int,
    reduce_op: str,
    scale: float,
    place: str = "",
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    calls = state_of(group, BoundCalls)
    try:
        if torch.is_grad_enabled():
            _check_no_gradient("matmul_reduce_scatter", x, weight, bias, addend)
        operands = describe(x, weight, bias, addend)
        options = (scatter_dim, reduce_op, scale, out_dtype)
        key = (plan, place, _choice(plan, place, group), options, engine_choice(), operands)
        call = calls.scatters.get(key)
        if call is not None:
            call.tally.runs += 1
        else:
            check_scatter(x, weight, bias, addend, group, scatter_dim, reduce_op, out_dtype)
            if plan == AUTO:
                problem, table = plan_scatter(x, weight, addend, group, scatter_dim, out_dtype)
                moves = scatter_moves(_rows(x) * weight.shape[1], problem.result_dtype, reduce_op)
                agreed = agree_on_call(problem, table, moves, group, x.device.type)
            else:
                table = parse_plan(plan) if place else plan_by_hand(plan, group, x.device.type)
                agreed = agree_on_place(table, "matmul_reduce_scatter", place, group, x.device.type)
            chosen = agreed.table.at(_rows(x))
            engine = engine_for("matmul_reduce_scatter", x.device.type, group, chosen)
            run = engine.bind_scatter(
                x, weight, bias, addend, group, chosen, scatter_dim, reduce_op, scale, out_dtype
            )
            call = BoundCall(tally_of("matmul_reduce_scatter", engine), agreed.counted(run))
            remember(calls.scatters, key, call)
    except BaseException:
        calls.refused += 1  # peers may have begun it
        raise
    return call.run(x, weight, bias, addend)


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
_LIBRARY.impl("all_gather_matmul", _all_gather_matmul, "CompositeExplicitAutograd")
_LIBRARY.impl("matmul_reduce_scatter", _matmul_reduce_scatter, "CompositeExplicitAutograd")
