"""The build of the compiled core makes again what has changed, and nothing else."""

from __future__ import annotations

import importlib
import os
import re
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


def test_kernels_are_compiled_once_for_each_family(build_core: ModuleType, tmp_path: Path) -> None:
    cuda = build_core.Cuda("nvcc", tmp_path, ())
    jobs = [job for job in build_core.compile_jobs(tmp_path, cuda) if job.source.suffix == ".cu"]
    assert len({job.object for job in jobs}) == len(jobs)
    tables = sorted((ROOT / "csrc/cuda").rglob("families.def"))
    assert len(tables) == 2
    for table in tables:
        (source,) = table.parent.glob("*.cu")
        mine = [job for job in jobs if job.source == source]
        assert len(mine) == len({job.command for job in mine}) == table.read_text().count("FLUX_FAMILY(")
        macros = set(re.findall(r"FLUX_[A-Z]+", source.read_text()))
        for job in mine:
            defined = {word[2:].partition("=")[0] for word in job.command if word.startswith("-DFLUX_")}
            assert macros == defined
    packed = {Path(path).resolve() for path in build_core.BuildCore.get_source_files(None)}
    assert packed >= {*tables, *(job.source for job in jobs)}, "a source distribution lacks them"
    once = [job for job in jobs if not job.source.with_name("families.def").exists()]
    assert len(once) == len({job.source for job in once}) > 0


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
