"""Which parts of the repository may import which."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent


def imported(path: Path) -> Iterator[str]:
    """Modules that a file imports, by their whole names."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = path.relative_to(ROOT).parts[: -node.level] if node.level else ()
            base = ".".join([*package, node.module or ""]).strip(".")
            yield from (f"{base}.{one.name}" for one in node.names)


def imports(folder: str, *but: str) -> Iterator[tuple[str, str]]:
    """(file, imported module) of all files of a folder, but for some of its folders."""
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files, folder
    for path in files:
        name = str(path.relative_to(ROOT))
        if not name.startswith(but):
            yield from ((name, module) for module in imported(path))


def test_tests_and_benchmarks_share_tests_support_alone() -> None:
    for folder in ("benchmarks", "examples", "tests/support"):
        for file, module in imports(folder):
            ours = module.split(".")[0] == "tests"
            assert not ours or f"{module}.".startswith("tests.support."), (file, module)
    for file, module in imports("tests", "tests/benchmarks/"):
        assert not module.startswith("benchmarks"), (file, module)


def test_passes_and_runtime_do_not_import_each_other() -> None:
    """The plan is what they share."""
    for file, module in imports("flux_inductor/passes"):
        assert not module.startswith("flux_inductor.runtime"), (file, module)
    for file, module in imports("flux_inductor/runtime"):
        assert not module.startswith("flux_inductor.passes"), (file, module)


def test_planning_knows_neither_torch_nor_the_rest() -> None:
    for file, module in imports("flux_inductor/planning"):
        assert module.split(".")[0] not in ("torch",), (file, module)
        ours = module.startswith("flux_inductor.")
        assert not ours or module.startswith(("flux_inductor.planning", "flux_inductor._core")), (
            file,
            module,
        )


def test_nothing_but_the_surface_imports_tools() -> None:
    for file, module in imports("flux_inductor", "flux_inductor/tools/", "flux_inductor/__init__.py"):
        assert not module.startswith("flux_inductor.tools") or file == "flux_inductor/backend.py", (
            file,
            module,
        )
