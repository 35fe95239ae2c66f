"""The compiled CUDA kernels of this installation: the menu of each family, and the kernel for one call."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, get_args

from flux_inductor import _core
from flux_inductor.planning.installed import Variant
from flux_inductor.planning.ops import OPS
from flux_inductor.planning.ops.op import Op
from flux_inductor.planning.problem import Layout, Problem
from flux_inductor.planning.sm90.fit import menu_of
from flux_inductor.planning.sm90.tiles import Menu
from flux_inductor.planning.tile import Tile

LAYOUTS: tuple[Layout, ...] = get_args(Layout)

# The kernels' bindings: None unless the package was built with nvcc and CUTLASS.
if TYPE_CHECKING:
    kernels = _core.cuda
else:
    kernels = getattr(_core, "cuda", None)


def require_kernels() -> None:
    """Raises if this installation has no CUDA kernels."""
    if kernels is None:
        raise ValueError(
            "the package was built without CUDA kernels: install nvcc and nvidia-cutlass and build it again, "
            "or leave the pair unfused (strategy='never', or FLUX_INDUCTOR_ENGINE=reference)"
        )


def _compiled(op: Op) -> list[Any]:
    return list(getattr(kernels, f"{op.name}_kernels")())


@lru_cache
def _by_name(op: Op) -> dict[tuple[str, str, str, Layout], Any]:
    return {(one.tile, one.element, one.result, one.layout): one for one in _compiled(op)}


@lru_cache
def _tiles(op: Op, *dtypes: str) -> frozenset[str]:
    """Compiled for the dtypes of operands and results."""
    wanted = (*dtypes, LAYOUTS[0])
    return frozenset(tile for tile, *variant in _by_name(op) if tuple(variant) == wanted)


def menu(problem: Problem) -> Menu:
    """The tiles that plans may name for the problem and that were compiled."""
    compiled = _tiles(problem.op, problem.dtype, problem.result or problem.dtype)
    return tuple(tile for tile in menu_of(problem) if str(tile) in compiled)


def kernel_for(problem: Problem, tile: Tile, layout: Layout) -> Any:
    """The kernel of a tile on the menu.

    Raises:
        ValueError: it was not compiled for this layout of the weight.
    """
    op, dtype, result = problem.op, problem.dtype, problem.result or problem.dtype
    kernel = _by_name(op).get((str(tile), dtype, result, layout))
    if kernel is None:
        raise ValueError(
            f"no {op.name} kernel was compiled for tile {tile}, {dtype} into {result} and a {layout} weight"
        )
    return kernel


def prepare_all() -> None:
    """Loads every kernel on the current device.

    A first load beside a kernel that waits for a signal can wedge the context (rule R3).
    """
    kernels.prepare_call_entry()
    for op in OPS:
        for kernel in _compiled(op):
            kernel.prepare()


def compiled_variants() -> list[Variant]:
    """For which all ops were compiled."""
    each = [{(element, layout) for _, element, _, layout in _by_name(op)} for op in OPS]
    return sorted(set.intersection(*each))
