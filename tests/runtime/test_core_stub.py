"""The stubs of the compiled core name what it has, class by class, and nothing else."""

from __future__ import annotations

import ast
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import flux_inductor
from flux_inductor import _core

FOLDER = Path(flux_inductor.__file__).parent
CUDA = getattr(_core, "cuda", None)


def public(names: list[str]) -> set[str]:
    return {name for name in names if not name.startswith("_")}


def declared(body: list[ast.stmt]) -> dict[str, set[str]]:
    """The public names of a stub; of classes, those of their members."""
    names: dict[str, set[str]] = {}
    for node in body:
        if isinstance(node, ast.ClassDef):
            names[node.name] = set(declared(node.body))
        elif isinstance(node, ast.FunctionDef):
            names[node.name] = set()
        elif isinstance(node, ast.AnnAssign):
            assert isinstance(node.target, ast.Name)
            names[node.target.id] = set()
        elif isinstance(node, ast.ImportFrom):  # a submodule
            names |= {
                alias.asname: set() for alias in node.names if alias.asname == alias.name.split("_")[-1]
            }
    return {name: names[name] for name in public(list(names))}


def found(module: Any) -> dict[str, set[str]]:
    """As `declared`, in the module itself."""
    every = {name: getattr(module, name) for name in public(dir(module))}
    return {
        name: public(dir(value)) if isinstance(value, type) else set[str]() for name, value in every.items()
    }


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("_core", _core),
        ("_core_sm90", _core.sm90),
        ("_core_testing", _core.testing),
        pytest.param("_core_cuda", CUDA, marks=pytest.mark.skipif(CUDA is None, reason="no CUDA kernels")),
        pytest.param(
            "_core_cuda_testing",
            getattr(CUDA, "testing", None),
            marks=pytest.mark.skipif(CUDA is None, reason="no CUDA kernels"),
        ),
    ],
)
def test_a_stub_names_what_its_module_has(name: str, module: ModuleType) -> None:
    written = declared(ast.parse((FOLDER / f"{name}.pyi").read_text()).body)
    if CUDA is None:
        written.pop("cuda", None)
    assert written == found(module)
