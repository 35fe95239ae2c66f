"""The compiled CUDA kernels of this installation: the menu of each family, and the kernel for one call."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, get_args

import torch

from flux_inductor import _core
from flux_inductor.planning.problem import Kind, Layout, Problem
from flux_inductor.planning.tiles import Menu, menu_of

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
LAYOUTS: tuple[Layout, ...] = get_args(Layout)

# The kernels' bindings: present if the package was built with nvcc and CUTLASS.
kernels: Any = getattr(_core, "cuda", None)


def require_kernels() -> None:
    """Raises if this installation has no CUDA kernels."""
    if kernels is None:
        raise ValueError(
            "the package was built without CUDA kernels: install nvcc and nvidia-cutlass and build it again, "
            "or leave the pair unfused (strategy='never', or FLUX_INDUCTOR_ENGINE=reference)"
        )


def _compiled(kind: Kind) -> list[Any]:
    lists = {
        "all_gather_matmul": kernels.all_gather_matmul_kernels,
        "matmul_reduce_scatter": kernels.matmul_reduce_scatter_kernels,
    }
    return list(lists[kind]())


@lru_cache
def _by_name(kind: Kind) -> dict[tuple[str, str, str, Layout], Any]:
    return {(one.tile, one.element, one.result, one.layout): one for one in _compiled(kind)}


@lru_cache
def _tiles(kind: Kind, *dtypes: str) -> frozenset[str]:
    """Compiled for the dtypes of operands and results."""
    wanted = (*dtypes, LAYOUTS[0])
    return frozenset(tile for tile, *variant in _by_name(kind) if tuple(variant) == wanted)


def menu(problem: Problem) -> Menu:
    """The tiles that plans may name for the problem and that were compiled."""
    compiled = _tiles(problem.kind, problem.dtype, problem.result or problem.dtype)
    return tuple(tile for tile in menu_of(problem) if str(tile) in compiled)


def kernel_for(problem: Problem, tile: str, layout: Layout) -> Any:
    """The kernel of a tile on the menu.

    Raises:
        ValueError: it was not compiled for this layout of the weight.
    """
    kind, dtype, result = problem.kind, problem.dtype, problem.result or problem.dtype
    kernel = _by_name(kind).get((tile, dtype, result, layout))
    if kernel is None:
        raise ValueError(
            f"no {kind} kernel was compiled for tile {tile}, {dtype} into {result} and a {layout} weight"
        )
    return kernel


def prepare_all() -> None:
    """Loads every kernel on the current device.

    A first load beside a kernel that waits for a signal can wedge the context (rule R3).
    """
    kernels.prepare_call_entry()
    for kind in ("all_gather_matmul", "matmul_reduce_scatter"):
        for kernel in _compiled(kind):
            kernel.prepare()


def compiled_variants() -> list[tuple[str, Layout]]:
    """(dtype, layout of the weight) for which both ops were compiled."""
    gather, scatter = (
        {(element, layout) for _, element, _, layout in _by_name(kind)}
        for kind in ("all_gather_matmul", "matmul_reduce_scatter")
    )
    return sorted(gather & scatter)
