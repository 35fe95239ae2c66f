"""Makes the results of bound calls: as torch.empty does, with all that it looks up found before."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

EmptyStrided: TypeAlias = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]
Make: TypeAlias = Callable[[], Tensor]


def maker(empty_strided: EmptyStrided, shape: Sequence[int], dtype: torch.dtype) -> Make:
    """What makes a contiguous tensor on the current device, at each call."""
    sizes = [max(size, 1) for size in shape]  # as torch.empty has it, also without elements
    strides = tuple(math.prod(sizes[dim + 1 :]) for dim in range(len(sizes)))
    return partial(empty_strided, tuple(shape), strides, dtype)
