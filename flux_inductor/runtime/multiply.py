"""Matmuls into given memory, of matrices that lie in strips."""

from __future__ import annotations

import torch
from torch import Tensor

WORTHWHILE_ROWS = 32  # below it, one matmul of all strips and a copy beat one matmul a strip


def with_blas_strides(weight: Tensor) -> Tensor:
    """The weight itself, row- or column-major, which every matmul takes as it is; else a copy made once."""
    return weight if 1 in weight.stride() else weight.contiguous()


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, scale: float, out: Tensor) -> None:
    """out = scale * (x @ weight) + bias, of [rows, K], [K, N] and [N]."""
    if bias is not None and scale != 0.0:
        torch.addmm(bias, x, weight, alpha=scale, out=out)
        return
    torch.mm(x, weight, out=out)
    if scale != 1.0:
        out.mul_(scale)
    if bias is not None:  # addmm with alpha=0 skips the product, and with it NaN and Inf
        out.add_(bias)


def multiply_strips(x: Tensor, weight: Tensor, bias: Tensor | None, scale: float, out: Tensor) -> None:
    """The same for each strip of [strips, rows, K], into [strips, rows, N]; the strips may lie apart.

    If `out` has a wider dtype, the product alone is in x's.
    """
    strips, rows, _ = x.shape
    if out.dtype != x.dtype:
        product = x.new_empty(out.shape)
        multiply_strips(x, weight, None, 1.0, product)
        out.copy_(product)
        if scale != 1.0:
            out.mul_(scale)
        if bias is not None:
            out.add_(bias)
    elif strips == 1:
        multiply(x[0], weight, bias, scale, out[0])
    elif out.is_contiguous():
        multiply(x.reshape(strips * rows, -1), weight, bias, scale, out.view(strips * rows, -1))
    elif rows >= WORTHWHILE_ROWS:
        for strip in range(strips):
            multiply(x[strip], weight, bias, scale, out[strip])
    else:
        block = out.new_empty(strips * rows, out.shape[-1])
        multiply(x.reshape(strips * rows, -1), weight, bias, scale, block)
        out.copy_(block.view(out.shape))
