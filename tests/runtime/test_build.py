"""The build of the compiled core makes again what has changed, and nothing else."""

from __future__ import annotations

import importlib
import os
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def build_core(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "csrc"))
    return importlib.import_module("build_core")


def touch(path: Path) -> None:
    later = time.time() + 2
    os.utime(path, (later, later))


def test_only_what_has_changed_is_compiled(
    build_core: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a folder"
    (folder / "core").mkdir(parents=True)
    header, source = folder / "one.h", folder / "one.cpp"
    header.write_text("inline int one() { return 1; }\n")
    source.write_text('#include "one.h"\nint two() { return 2 * one(); }\n')
    monkeypatch.setattr(build_core, "CSRC", folder)
    (job,) = build_core.compile_jobs(tmp_path / "build", None)

    assert job.run()
    assert not job.run()
    touch(header)
    assert job.run()
    later = time.time() + 4
    os.utime(job.object, (later, later))
    assert not job.run()
    assert replace(job, command=(*job.command, "-DNEW")).run()
    header.unlink()
    source.write_text("int two() { return 2; }\n")
    assert job.run()

    library = tmp_path / "library.so"
    build_core.link(library, [job.object], None, tmp_path)
    made = library.stat().st_mtime_ns
    build_core.link(library, [job.object], None, tmp_path)
    assert library.stat().st_mtime_ns == made
    source.write_text("int two() { return }\n")
    touch(source)
    with pytest.raises(SystemExit, match=r"failed with status 1:\n.*one\.cpp"):
        job.run()


def test_missing_cuda_tools_are_one_line(
    build_core: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    monkeypatch.delenv("FLUX_INDUCTOR_CUTLASS", raising=False)
    assert build_core.find_cuda() is None
    message = capsys.readouterr().out
    assert message.count("\n") == 1
    assert "building for the CPU only; not found: nvcc, cuda_runtime.h" in message
    monkeypatch.setenv("FLUX_INDUCTOR_CUTLASS", "/nowhere")
    with pytest.raises(SystemExit, match="FLUX_INDUCTOR_CUTLASS=/nowhere: there is no include/cutlass"):
        build_core.find_cuda()
