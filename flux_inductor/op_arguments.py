"""The arguments of the fused ops: checked before anything is launched, and described as a call object."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from flux_inductor.dtypes import DTYPE_NAMES
from flux_inductor.planning.ops.all_gather_matmul import GatherCall
from flux_inductor.planning.ops.matmul_reduce_scatter import REDUCE_OPS, ReduceOp, ScatterCall
from flux_inductor.planning.problem import Layout
from flux_inductor.runtime.groups import group_size


def gather_call(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    group: str,
    dim: int,
    return_gathered: bool,
) -> GatherCall:
    """An all_gather_matmul.

    Raises:
        ValueError: an argument does not fit; names it and the remedy.
    """
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
    return GatherCall(
        shape=tuple(x.shape),
        columns=tuple(weight.shape[1] for weight in weights),
        dtype=DTYPE_NAMES[x.dtype],
        layout=_layout(weights),
        world=group_size(group),
        dim=dim,
        return_gathered=return_gathered,
    )


def scatter_call(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    addend: Tensor | None,
    group: str,
    dim: int,
    reduce_op: str,
    scale: float,
    out_dtype: torch.dtype | None = None,
) -> ScatterCall:
    """A matmul_reduce_scatter.

    Raises:
        ValueError: an argument does not fit; names it and the remedy.
    """
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
    return ScatterCall(
        shape=tuple(x.shape),
        columns=weight.shape[1],
        dtype=DTYPE_NAMES[x.dtype],
        layout=_layout([weight]),
        world=world,
        dim=dim,
        reduce_op=cast(ReduceOp, reduce_op),
        scale=scale,
        out_dtype=DTYPE_NAMES[out_dtype or x.dtype],
        addend=addend is not None,
    )


def check_no_gradient(op: str, operands: Sequence[object]) -> None:
    """Run as a plain op, a call would lose the gradient, or fail in the middle, with its peers waiting.

    Raises:
        ValueError: a tensor among the operands, or in a list of them, requires grad.
    """
    for operand in operands:
        if isinstance(operand, (list, tuple)):
            check_no_gradient(op, operand)
        elif isinstance(operand, Tensor) and operand.requires_grad:
            raise ValueError(
                f"{op}: an operand of shape {tuple(operand.shape)} requires grad, and the op "
                f"torch.ops.flux_inductor.{op} is not differentiable; call flux_inductor.{op}, which is, or "
                "call the op under torch.no_grad()"
            )


def _layout(weights: Sequence[Tensor]) -> Layout:
    """Comparing a symbolic stride would add a guard; nothing is decided by the layout of a traced call."""
    strides = [weight.stride(0) for weight in weights]
    return "k_major" if all(isinstance(one, int) and one == 1 for one in strides) else "n_major"


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _may_equal(a: int | torch.SymInt, b: int | torch.SymInt) -> bool:
    """False if the sizes are known to differ; comparing symbolic ones would add a guard, so run time does."""
    return not (isinstance(a, int) and isinstance(b, int)) or a == b


def _check_operands(op: str, x: Tensor, weights: Sequence[Tensor]) -> None:
    _require(x.dim() >= 2, f"{op}: x has shape {tuple(x.shape)}; it needs at least two dims, [..., K]")
    _require(
        x.dtype in DTYPE_NAMES,
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
