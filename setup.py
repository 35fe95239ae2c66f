"""Installs flux_inductor and builds its compiled core, flux_inductor._core.

    pip install --no-build-isolation -e .        for development
    pip wheel --no-build-isolation --no-deps .   a wheel

--no-build-isolation lets the build see an installed nvidia-cutlass, whose headers the CUDA engine needs;
FLUX_INDUCTOR_CUTLASS=<folder with include/ and tools/util/include/> names them otherwise. Without them, or
without nvcc, the core is built for the CPU alone. Other variables: CXX, CUDA_HOME, MAX_JOBS.
"""

import re
import sys
from pathlib import Path

from setuptools import Extension, find_packages, setup

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "csrc"))

from build_core import BuildCore  # noqa: E402  (csrc/build_core.py)

VERSION = re.findall(r'^__version__ = "(.+)"$', (ROOT / "flux_inductor/__init__.py").read_text(), re.M)[0]
PACKAGES = find_packages(include=["flux_inductor", "flux_inductor.*"], exclude=["flux_inductor.passes*"])
PASSES = ["flux_inductor.passes", *(f"flux_inductor.passes.{name}" for name in find_packages("passes"))]

setup(
    name="flux_inductor",
    version=VERSION,
    description="A torch.compile backend that overlaps tensor-parallel collectives with matmuls",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    classifiers=[
        "Operating System :: POSIX :: Linux",
        "Programming Language :: C++",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    python_requires=">=3.10",
    install_requires=["torch>=2.11", "sympy"],
    extras_require={
        "test": ["pytest", "pytest-timeout", "expecttest", "hypothesis"],
        "dev": ["pytest", "pytest-timeout", "expecttest", "hypothesis", "ruff", "mypy", "clang-format"],
        "demo": ["matplotlib", "tqdm"],
        # Headers only: `pip install --no-deps nvidia-cutlass` leaves out its large dependencies.
        "cuda": ["nvidia-cutlass>=4.2"],
    },
    packages=[*PACKAGES, *PASSES],
    package_dir={"flux_inductor.passes": "passes"},
    package_data={"flux_inductor": ["py.typed", "*.pyi"]},
    ext_modules=[Extension("flux_inductor._core", sources=[])],  # BuildCore collects csrc/
    cmdclass={"build_ext": BuildCore},
    entry_points={"torch_dynamo_backends": ["flux_inductor = flux_inductor.backend:flux_inductor"]},
    zip_safe=False,
)
