"""flux_inductor: a torch.compile backend that overlaps tensor-parallel collectives with their matmuls.

    model = torch.compile(model, backend="flux_inductor")

is the whole interface for most users, and needs no import of this package.

Importing the package must not import torch: TORCH_LOGS="+flux_inductor" makes torch import it while torch
itself is only half loaded. So names that need torch are loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from flux_inductor.options import Options, options

if TYPE_CHECKING:
    from flux_inductor.autograd import all_gather_matmul, matmul_reduce_scatter
    from flux_inductor.backend import disable, enable
    from flux_inductor.tools.explain import explain
    from flux_inductor.tools.log import report
    from flux_inductor.tools.report import Report

__version__ = "0.1.0"

__all__ = [
    "Options",
    "Report",
    "all_gather_matmul",
    "disable",
    "enable",
    "explain",
    "matmul_reduce_scatter",
    "options",
    "report",
]

_HOMES = {
    "Report": "tools.report",
    "all_gather_matmul": "autograd",
    "disable": "backend",
    "enable": "backend",
    "explain": "tools.explain",
    "matmul_reduce_scatter": "autograd",
    "report": "tools.log",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'flux_inductor' has no attribute {name!r}")
    value: object = getattr(import_module(f"flux_inductor.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
