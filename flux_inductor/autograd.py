"""The fused ops as differentiable functions, for eager code and for programs that call them by name.

They are traced (torch.compile, make_fx) as they are: all that needs peers or sizes happens in the ops.

The gradients of a fused op are fused ops again (x_k: rank k's shard, G: the whole gathered x, Y: products):

    all_gather_matmul        Y_i = G @ W_i + b_i
        dx   = reduce_scatter(sum_i dY_i @ W_i.t() + dG)     one matmul_reduce_scatter, the rest its addend
        dW_i = G.t() @ dY_i,  db_i = sum of dY_i's rows      G is kept from the forward call
    matmul_reduce_scatter    z = reduce_scatter(scale * x @ W + b + addend)
        dY   = all_gather(dz)                                one all_gather_matmul, which returns dY too
        dx   = scale * dY @ W.t(),  dW = scale * x.t() @ dY,  db = sum of dY's rows,  daddend = dY

Keeping G costs world times the memory of keeping the shard; it saves a second gather in the backward pass.
A compiled program makes that choice by its own checkpointing policy: there, autograd sees the plain
collectives.

A scatter along the last dim has a gather along the contracted dim as its gradient, for which there is no
fused op; it runs as all_gather, then matmul.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad

from flux_inductor import ops  # noqa: F401  (registers the fused ops)
from flux_inductor.auto_plan import AUTO
from flux_inductor.runtime.groups import group_size, name_of
from flux_inductor.runtime.reference import all_gather, reduce_scatter

Group = dist.ProcessGroup | str | None

_gather_op = torch.ops.flux_inductor.all_gather_matmul.default
_scatter_op = torch.ops.flux_inductor.matmul_reduce_scatter.default


def all_gather_matmul(
    x: Tensor,
    weights: Tensor | Sequence[Tensor],
    group: Group = None,
    *,
    biases: Tensor | Sequence[Tensor | None] | None = None,
    gather_dim: int = 0,
    return_gathered: bool = False,
    plan: str | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Gathers `x` along `gather_dim` over the ranks of `group` and multiplies it by each weight.

    Differentiable in x, weights and biases.

    Args:
        x: this rank's shard [..., m, ..., K]; bfloat16, float16 or float32.
        weights: one weight [K, N], or several that share the gather; `linear.weight.t()` is one.
        group: a process group, its name, or None for the default group.
        biases: one entry a weight (None or [N]); a tensor if there is one weight.
        gather_dim: any dim of x but the last, which is contracted; negative ones count from the end.
        return_gathered: also return the gathered x [..., world * m, ..., K].
        plan: a plan's text; None lets the strategy choose for these shapes when the call runs, also in
            compiled code, by the options that context or environment name then.

    Returns:
        The product [..., world * m, ..., N] if one weight was given as a tensor and nothing else is wanted,
        else a tuple: one product a weight, then the gathered tensor if wanted.

    Raises:
        ValueError: a shape, dtype, dim or plan does not fit; the message names it and the remedy.
        flux_inductor.FusedOpError: a rank died, came too late or called another op.
    """
    single = isinstance(weights, Tensor)
    weight_list = [weights] if isinstance(weights, Tensor) else list(weights)
    bias_list = [biases] if isinstance(biases, Tensor) else list(biases or ())
    name = name_of(group)
    dim = _gather_dim(x, gather_dim)
    text = plan or AUTO
    outputs: Sequence[Tensor]
    if _differentiated(x, *weight_list, *bias_list):
        outputs = _AllGatherMatmul.apply(  # type: ignore[no-untyped-call]
            name, text, dim, return_gathered, len(weight_list), x, *weight_list, *bias_list
        )
    else:
        outputs = _gather_op(x, weight_list, bias_list, name, text, dim, return_gathered)
    return outputs[0] if single and not return_gathered else tuple(outputs)


def matmul_reduce_scatter(
    x: Tensor,
    weight: Tensor,
    group: Group = None,
    *,
    bias: Tensor | None = None,
    addend: Tensor | None = None,
    scatter_dim: int = 0,
    reduce_op: str = "sum",
    scale: float = 1.0,
    out_dtype: torch.dtype | None = None,
    plan: str | None = None,
) -> Tensor:
    """Sums `scale * x @ weight + bias + addend` over the ranks of `group`, scattered along `scatter_dim`.

    Differentiable in x, weight, bias and addend.

    Args:
        x: [..., K]; bfloat16, float16 or float32.
        weight: [K, N]; `linear.weight.t()` is one.
        group: a process group, its name, or None for the default group.
        bias: [N], added on every rank as written: divide it by the number of ranks to add it once.
        addend: a tensor of the product's shape [..., N], such as the product of another matmul.
        scatter_dim: any dim of the product; it must divide by the number of ranks. Negative ones count from
            the end.
        reduce_op: "sum" or "avg".
        scale: factor of the product.
        out_dtype: torch.float32: sum bf16 or fp16 products in fp32, in which bias and addend may then be.
        plan: a plan's text; None lets the strategy choose for these shapes when the call runs, also in
            compiled code, by the options that context or environment name then.

    Returns:
        This rank's part of the product, its dim `scatter_dim` divided by the number of ranks.

    Raises:
        ValueError: a shape, dtype, dim or plan does not fit; the message names it and the remedy.
        flux_inductor.FusedOpError: a rank died, came too late or called another op.
    """
    name = name_of(group)
    dim = _scatter_dim(x, scatter_dim)
    text = plan or AUTO
    result: Tensor
    if _differentiated(x, weight, bias, addend):
        result = _MatmulReduceScatter.apply(  # type: ignore[no-untyped-call]
            name, text, dim, reduce_op, scale, out_dtype, x, weight, bias, addend
        )
    else:
        result = _scatter_op(x, weight, bias, addend, name, text, dim, reduce_op, scale, out_dtype)
    return result


def _gather_dim(x: Tensor, dim: int) -> int:
    """gather_dim counted from the front, as the op takes it."""
    count = x.dim()
    if count < 2:
        return dim  # the op names such an x
    if not (0 <= dim < count - 1 or -count <= dim < -1):
        raise ValueError(
            f"all_gather_matmul: gather_dim is {dim}; for x of shape {tuple(x.shape)} it must be in "
            f"[0, {count - 2}] or [-{count}, -2], since the last dim is contracted"
        )
    return dim % count


def _scatter_dim(x: Tensor, dim: int) -> int:
    """scatter_dim counted from the front, as the op takes it."""
    count = x.dim()
    if count < 2:
        return dim  # the op names such an x
    if not -count <= dim < count:
        raise ValueError(
            f"matmul_reduce_scatter: scatter_dim is {dim}; for x of shape {tuple(x.shape)}, whose product "
            f"has as many dims, it must be in [-{count}, {count - 1}]"
        )
    return dim % count


def _differentiated(*operands: Tensor | None) -> bool:
    """Whether autograd must see the call, be it to refuse: there are no forward-mode derivatives.

    (Traces of torch.compile see no level of forward mode: there, such derivatives are lost, as with the op.)

    To apply an autograd.Function costs as much as the op; and where gradients are off, it would keep a
    gathered tensor for nothing, since needs_input_grad is true of a parameter even then.
    """
    if torch.is_grad_enabled():
        for operand in operands:
            if operand is not None and operand.requires_grad:
                return True
    return forward_ad._current_level >= 0  # asking each tensor for a tangent would cost more


def _check_first_order(op: str, *operands: Tensor | None) -> None:
    """Collectives would lose gradients of gradients, without a word."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return
    if any(operand is not None and operand.requires_grad for operand in operands):
        raise ValueError(
            f"{op}: gradients of gradients are not supported; compute its gradient without "
            "create_graph=True, or write it as collective and matmul, which autograd can differentiate twice"
        )


def _flat(x: Tensor) -> Tensor:
    """[..., K] as [rows, K]."""
    return x.flatten(0, -2)


class _AllGatherMatmul(torch.autograd.Function):
    """(group, plan, dim, return_gathered, count, x, *weights, *biases) -> (*products, gathered if wanted)."""

    @staticmethod
    def forward(
        ctx: Any,
        group: str,
        plan: str,
        dim: int,
        return_gathered: bool,
        count: int,
        x: Tensor,
        *parameters: Tensor | None,
    ) -> tuple[Tensor, ...]:
        weights, biases = list(parameters[:count]), list(parameters[count:])
        needs_weight_grad = any(ctx.needs_input_grad[6 : 6 + count])
        outputs = _gather_op(x, weights, biases, group, plan, dim, return_gathered or needs_weight_grad)
        gathered = outputs[count] if needs_weight_grad else None
        ctx.save_for_backward(gathered, *weights)
        ctx.group, ctx.dim, ctx.count = group, dim, count
        return tuple(outputs[: count + int(return_gathered)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        gathered, *weights = ctx.saved_tensors
        _check_first_order("all_gather_matmul", *grads, *weights, gathered)
        count = ctx.count
        grad_products = list(grads[:count])
        grad_gathered = grads[count] if len(grads) > count else None
        grad_x = None
        if ctx.needs_input_grad[5]:
            grad_x = _input_gradient(grad_products, weights, grad_gathered, ctx.group, ctx.dim)
        grad_weights = [
            _flat(gathered).t() @ _flat(dy) if needed and dy is not None else None
            for needed, dy in zip(ctx.needs_input_grad[6 : 6 + count], grad_products, strict=True)
        ]
        grad_biases = [
            _flat(dy).sum(0) if needed and dy is not None else None
            for needed, dy in zip(ctx.needs_input_grad[6 + count :], grad_products, strict=False)  # if any
        ]
        return (None, None, None, None, None, grad_x, *grad_weights, *grad_biases)


def _input_gradient(
    grad_products: Sequence[Tensor | None],
    weights: Sequence[Tensor],
    grad_gathered: Tensor | None,
    group: str,
    dim: int,
) -> Tensor | None:
    """reduce_scatter(sum_i dY_i @ W_i.t() + dG): the last matmul is fused, the others are its addend."""
    pairs = [(dy, w.t()) for dy, w in zip(grad_products, weights, strict=True) if dy is not None]
    if not pairs:
        return (
            None if grad_gathered is None else reduce_scatter(grad_gathered.contiguous(), group, dim, "sum")
        )
    addend = grad_gathered
    for dy, weight in pairs[:-1]:
        addend = dy @ weight if addend is None else addend + dy @ weight
    dy, weight = pairs[-1]
    grad: Tensor = _scatter_op(dy, weight, None, addend, group, AUTO, dim, "sum", 1.0)
    return grad


class _MatmulReduceScatter(torch.autograd.Function):
    """(group, plan, dim, reduce_op, scale, out_dtype, x, weight, bias, addend) -> this rank's part."""

    @staticmethod
    def forward(
        ctx: Any,
        group: str,
        plan: str,
        dim: int,
        reduce_op: str,
        scale: float,
        out_dtype: torch.dtype | None,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        addend: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group, ctx.dim, ctx.reduce_op, ctx.scale = group, dim, reduce_op, scale
        terms = zip((bias, addend), ctx.needs_input_grad[8:], strict=True)
        ctx.wide = any(needed and term is not None and term.dtype != x.dtype for term, needed in terms)
        result: Tensor = _scatter_op(x, weight, bias, addend, group, plan, dim, reduce_op, scale, out_dtype)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        _check_first_order("matmul_reduce_scatter", grad, x, weight)
        if ctx.reduce_op == "avg":
            grad = grad / group_size(ctx.group)
        grad = grad if ctx.wide else grad.to(x.dtype)  # an fp32 term's gradient stays unrounded
        need_x, need_weight, need_bias, need_addend = ctx.needs_input_grad[6:]
        whole, grad_x = _gather_gradient(grad, weight.t(), ctx.group, ctx.dim, need_x)
        grad_weight = _flat(x).t() @ _flat(whole).to(x.dtype) if need_weight else None
        if ctx.scale != 1.0:
            grad_x = None if grad_x is None else grad_x * ctx.scale
            grad_weight = None if grad_weight is None else grad_weight * ctx.scale
        grad_bias = _flat(whole).sum(0) if need_bias else None
        return (*[None] * 6, grad_x, grad_weight, grad_bias, whole if need_addend else None)


def _gather_gradient(
    grad: Tensor, weight: Tensor, group: str, dim: int, need_product: bool
) -> tuple[Tensor, Tensor | None]:
    """all_gather(grad) along dim, and its product with `weight` if that is needed."""
    if need_product and dim < grad.dim() - 1 and grad.dtype == weight.dtype:
        product, whole = _gather_op(grad, [weight], [], group, AUTO, dim, True)
        return whole, product
    whole = all_gather(grad, group, dim)
    return whole, whole.to(weight.dtype) @ weight if need_product else None
