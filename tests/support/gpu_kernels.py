"""The compiled CUDA kernels, as the tests and benchmarks use them without the runtime.

``FLUX_INDUCTOR_CUDA_MODULE`` may name a shared library that holds the bindings alone, for work on the
kernels.
"""

import importlib.util
import os
from typing import Any

import torch


def load_kernels() -> Any:
    """The module with the kernels' bindings; None without a GPU for them, or where they were not built."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return None
    path = os.environ.get("FLUX_INDUCTOR_CUDA_MODULE")
    if path is None:
        import flux_inductor._core as core

        return getattr(core, "cuda", None)
    spec = importlib.util.spec_from_file_location(os.path.basename(path).split(".")[0], path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.cuda


kernels = load_kernels()
ELEMENTS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def layout_of(weight: torch.Tensor) -> tuple[str, int]:
    """Layout and leading stride of a weight [K, N] that is contiguous in one of its dims."""
    if weight.stride(0) == 1:
        return "k_major", weight.stride(1)
    assert weight.stride(1) == 1, weight.stride()
    return "n_major", weight.stride(0)


def find(entries: list[Any], tile: str, weight: torch.Tensor, result: torch.dtype | None = None) -> Any:
    """The entry of a kernel list with this tile that multiplies by this weight, into that dtype."""
    wanted = (tile, ELEMENTS[weight.dtype], ELEMENTS[result or weight.dtype], layout_of(weight)[0])
    for entry in entries:
        if (entry.tile, entry.element, entry.result, entry.layout) == wanted:
            return entry
    raise ValueError(f"no kernel for {wanted}; there are {sorted({e.tile for e in entries})}")
