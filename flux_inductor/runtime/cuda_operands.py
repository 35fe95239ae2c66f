"""How the CUDA kernels read the tensors of a call: in place where they can, else from a copy.

What strides decide is decided once, for a bound call; only addresses are looked at every time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flux_inductor.planning.problem import Layout
from flux_inductor.planning.tiles import GRANULE

ALIGNMENT = 16  # bytes; what TMA asks of addresses


def address_of(tensor: Tensor, fits: bool, copies: list[Tensor]) -> int:
    """The address of the tensor, if its strides fit the kernels and the address does; else that of a copy.

    A copy has the same strides if they fit, and is contiguous if not. It is appended to `copies`, which must
    live until the call is on its streams.
    """
    address = tensor.data_ptr()
    if fits and not address % ALIGNMENT:
        return address
    copies.append(_copy(tensor, fits))
    return copies[-1].data_ptr()


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
