"""Builds csrc/ into flux_inductor._core: g++ for C++, nvcc for CUDA where it can, only what has changed.

Each source becomes one object under build/, or several where a `families.def` lies beside it. With the object
lie the headers it read (make's format, written by the compiler) and the command that made it. An object is
made again if the command or any of those files changed.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pybind11
from setuptools import Extension
from setuptools.command.build_ext import build_ext

CSRC = Path(__file__).resolve().parent
COMMON_FLAGS = ["-std=c++17", "-O3", "-DNDEBUG"]
CXX_FLAGS = [*COMMON_FLAGS, "-fPIC", "-fvisibility=hidden", "-pthread", "-Wall", "-Wextra"]
NVCC_FLAGS = [
    *COMMON_FLAGS,
    "--expt-relaxed-constexpr",
    "-gencode=arch=compute_90a,code=sm_90a",
    "-Xcompiler=-fPIC,-fvisibility=hidden",
]
SUFFIXES = (".h", ".cuh", ".cpp", ".cu", ".def", ".py")
# What the words of a line of families.def stand for, as macros.
FAMILY_MACROS = ("FLUX_ELEMENT", "FLUX_LAYOUT", "FLUX_RESULT")
NVCC_BYTES = 5 << 30  # one CUTLASS kernel file takes about 4 GB of memory to compile


@dataclass(frozen=True)
class Cuda:
    """Where nvcc, the toolkit and the CUTLASS headers are."""

    nvcc: str
    root: Path
    includes: tuple[Path, ...]


@dataclass(frozen=True)
class Job:
    """One source and the command that compiles it; `-o` and the dependency file come last."""

    source: Path
    object: Path
    command: tuple[str, ...]

    def run(self) -> bool:
        """Compiles if anything changed; returns whether it did."""
        deps, stamp = self.object.with_suffix(".d"), self.object.with_suffix(".cmd")
        command = [*self.command, "-MMD", "-MF", str(deps), "-c", str(self.source), "-o", str(self.object)]
        text = shlex.join(command)
        if _unchanged(self.object, stamp, text, _read_deps(deps)):
            return False
        self.object.parent.mkdir(parents=True, exist_ok=True)
        _run(command)
        stamp.write_text(text)
        return True


class BuildCore(build_ext):
    """setuptools' build_ext for the one extension of this project."""

    def build_extension(self, ext: Extension) -> None:
        if platform.system() != "Linux":
            raise SystemExit(
                "flux_inductor needs Linux: its ranks share memory through memfd and pidfd. "
                "On another system, build inside a Linux container or virtual machine."
            )
        cuda = find_cuda()
        jobs = compile_jobs(Path(self.build_temp) / "core", cuda)
        # nvcc's files come first: they take longest.
        with ThreadPoolExecutor(_parallelism(cuda)) as pool:
            changed = list(pool.map(Job.run, jobs))
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        link(target, [job.object for job in jobs], cuda, Path(self.build_temp))
        print(f"flux_inductor: {sum(changed)} of {len(jobs)} files compiled, {target.name}")

    def get_source_files(self) -> list[str]:
        """All of csrc/ belongs into a source distribution."""
        files = (path for path in CSRC.rglob("*") if path.suffix in SUFFIXES)
        return [os.path.relpath(path) for path in sorted(files)]


def find_cuda() -> Cuda | None:
    """The CUDA tools, or None after one line that says what is missing."""
    homes = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))]
    nvcc = shutil.which("nvcc") or shutil.which(str(homes[0] / "bin/nvcc"))
    if nvcc is not None:
        homes.append(Path(nvcc).resolve().parent.parent)
    root = next((home for home in homes if (home / "include/cuda_runtime.h").is_file()), None)
    cutlass = _cutlass()
    if nvcc is None or root is None or cutlass is None:
        parts = {"nvcc": nvcc, "cuda_runtime.h": root, "CUTLASS headers": cutlass}
        missing = ", ".join(name for name, found in parts.items() if found is None)
        print(f"flux_inductor: building for the CPU only; not found: {missing}")
        return None
    return Cuda(nvcc, root, (cutlass / "include", cutlass / "tools/util/include", root / "include"))


def _cutlass() -> Path | None:
    """The folder that holds include/cutlass: named by the environment, or of the installed nvidia-cutlass."""
    named = os.environ.get("FLUX_INDUCTOR_CUTLASS")
    if named:
        if not (Path(named) / "include/cutlass/cutlass.h").is_file():
            raise SystemExit(
                f"FLUX_INDUCTOR_CUTLASS={named}: there is no include/cutlass/cutlass.h in it; "
                "name a CUTLASS checkout, or unset it to use an installed nvidia-cutlass"
            )
        return Path(named).resolve()
    spec = importlib.util.find_spec("cutlass_library")
    if spec is None or spec.origin is None:
        return None
    source = Path(spec.origin).parent / "source"
    return source if (source / "include/cutlass/cutlass.h").is_file() else None


def compile_jobs(build: Path, cuda: Cuda | None) -> list[Job]:
    """One job for each object; CUDA ones first."""
    cxx = shlex.split(os.environ.get("CXX", "g++"))
    includes = [CSRC, Path(pybind11.get_include()), Path(sysconfig.get_path("include"))]
    flags = [*CXX_FLAGS, *(f"-I{path}" for path in includes)]
    sources = [*CSRC.glob("*.cpp"), *CSRC.glob("core/**/*.cpp"), *CSRC.glob("cpu/**/*.cpp")]
    jobs = []
    if cuda is not None:
        system = [f"-isystem={path}" for path in cuda.includes]
        nvcc = (cuda.nvcc, *NVCC_FLAGS, f"-I{CSRC}", *system)
        for path in sorted(CSRC.glob("cuda/**/*.cu")):
            jobs += [
                Job(path, _object(build, path, family), (*nvcc, *_macros(family)))
                for family in families(path)
            ]
        flags += ["-DFLUX_INDUCTOR_CUDA=1", "-isystem", str(cuda.root / "include")]
        sources += CSRC.glob("cuda/**/*.cpp")
    return [*jobs, *(Job(path, _object(build, path), (*cxx, *flags)) for path in sorted(sources))]


def families(source: Path) -> list[tuple[str, ...]]:
    """What a source is compiled for: the lines of families.def beside it, or once if there is none."""
    table = source.with_name("families.def")
    if not table.exists():
        return [()]
    lines = re.findall(r"^FLUX_FAMILY\((.+)\)$", table.read_text(), re.MULTILINE)
    return [tuple(line.split(", ")) for line in lines]


def _macros(family: tuple[str, ...]) -> list[str]:
    return [f"-D{macro}={word}" for macro, word in zip(FAMILY_MACROS, family, strict=False)]


def _object(build: Path, source: Path, family: tuple[str, ...] = ()) -> Path:
    return build / source.relative_to(CSRC).with_name(".".join((source.name, *family, "o")))


def link(target: Path, objects: list[Path], cuda: Cuda | None, build: Path) -> None:
    """Python needs one symbol of the module; no other library may see, or take for its own, any of the rest.

    What a static libstdc++ or cudart exports, and symbols that the linker makes unique in the whole process
    whoever loaded them, would be shared with torch's libraries, of other versions, if they come later.
    """
    exports = build / "exports.map"
    exports.write_text("{ global: PyInit_*; local: *; };\n")
    command = [*shlex.split(os.environ.get("CXX", "g++")), "-shared", "-pthread", *map(str, objects)]
    command.append(f"-Wl,--version-script={exports}")
    if cuda is not None:
        command += [f"-L{cuda.root / 'lib64'}", "-lcudart_static", "-ldl", "-lrt"]
    command += ["-o", str(target)]
    stamp = build / f"{target.name}.cmd"
    if not _unchanged(target, stamp, shlex.join(command), objects):
        _run(command)
        stamp.write_text(shlex.join(command))


def _unchanged(made: Path, stamp: Path, command: str, inputs: list[Path] | None) -> bool:
    """Whether `made` came from this command and is no older than any of its inputs."""
    if inputs is None or not made.exists() or not stamp.exists() or stamp.read_text() != command:
        return False
    age = made.stat().st_mtime_ns
    return all(path.exists() and path.stat().st_mtime_ns <= age for path in inputs)


def _read_deps(path: Path) -> list[Path] | None:
    """The files that a compiler's dependency file names; None if there is no such file yet."""
    if not path.exists():
        return None
    words = path.read_text().replace("\\\n", " ").partition(":")[2].replace("\\ ", "\0").split()
    return [Path(word.replace("\0", " ")) for word in words]


def _run(command: list[str]) -> None:
    """Runs a compiler; its messages come in one piece, since several run at once."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.stdout:
        print(done.stdout, file=sys.stderr, end="")
    if done.returncode:
        raise SystemExit(
            f"flux_inductor: this command failed with status {done.returncode}:\n{shlex.join(command)}"
        )


def _parallelism(cuda: Cuda | None) -> int:
    if "MAX_JOBS" in os.environ:
        return max(int(os.environ["MAX_JOBS"]), 1)
    cores = len(os.sched_getaffinity(0))
    if cuda is None:
        return cores
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(min(cores, memory // NVCC_BYTES), 1)
