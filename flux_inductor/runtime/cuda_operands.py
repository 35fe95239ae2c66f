"""How the CUDA kernels read the tensors of a call: in place where they can, else from a copy.

Both are decided once, for a bound call, from strides and from whether addresses are aligned.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flux_inductor._core import ALIGNMENT
from flux_inductor.planning.problem import Layout
from flux_inductor.planning.sm90.limits import GRANULE


def in_place(tensor: Tensor | None, fits: bool) -> bool:
    """Whether the kernels read the tensor, whose strides fit them or not, where it lies."""
    return tensor is None or (fits and not tensor.data_ptr() % ALIGNMENT)


def readable(tensor: Tensor, fits: bool) -> Tensor:
    """The tensor if the kernels read it in place, else a copy: contiguous if its strides do not fit."""
    return tensor if in_place(tensor, fits) else _copy(tensor, fits)


def term_fits(term: Tensor | None, dtype: torch.dtype | None = None) -> bool:
    """Whether the kernels can read a bias or an addend, which must have that dtype if one is given."""
    if term is None:
        return True
    return term.is_contiguous() and not term.is_neg() and dtype in (None, term.dtype)


def readable_term(term: Tensor | None, dtype: torch.dtype | None = None) -> Tensor | None:
    if term is None:
        return None
    term = term if dtype is None else term.to(dtype)
    return readable(term, term_fits(term))


def negated(terms: Sequence[Tensor | None]) -> bool:
    """Whether any is negated lazily: of such lists alone, the dispatcher leaves that to the op."""
    return any(term is not None and term.is_neg() for term in terms)


def _copy(tensor: Tensor, fits: bool) -> Tensor:
    if not fits:
        return tensor.clone(memory_format=torch.contiguous_format)
    strides = tensor.stride()
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def weight_strides(weight: Tensor) -> tuple[bool, Layout, int]:
    """Of a weight [K, N]: whether its strides fit, its layout, and the elements between its rows or columns.

    Those of a matrix, or of a transposed one, fit.
    """
    (depth, columns), (down, across) = weight.shape, weight.stride()
    if across == 1 and down % GRANULE == 0 and down >= columns:
        return True, "n_major", down
    if down == 1 and across % GRANULE == 0 and across >= depth:
        return True, "k_major", across
    return False, "n_major", columns


def row_stride(x: Tensor) -> tuple[bool, int]:
    """Of x [..., K], seen as a matrix: whether its strides fit, and the elements between rows."""
    depth = x.shape[-1]
    if x.stride(-1) != 1:
        return False, depth
    stride, distance = depth, -1  # of rows, and to the next run of them
    for size, step in zip(reversed(x.shape[:-1]), reversed(x.stride()[:-1]), strict=True):
        if size == 1:
            continue
        if distance < 0:
            stride = step
        elif step != distance:
            return False, depth  # strips lie apart
        distance = step * size
    fits = stride % GRANULE == 0 and stride >= depth
    return fits, stride if fits else depth
