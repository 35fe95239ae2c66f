"""Every test of the backend starts without compiled graphs or options in the environment."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from torch._inductor import config

from flux_inductor.options import ENVIRONMENT_PREFIX


@pytest.fixture(autouse=True, scope="package")
def _kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One folder for the kernels of all tests: compiling them takes most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("kernels")))
        yield


@pytest.fixture(autouse=True)
def _fresh_start(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for variable in [name for name in os.environ if name.startswith(ENVIRONMENT_PREFIX)]:
        monkeypatch.delenv(variable)
    torch._dynamo.reset()
    with config.patch(fx_graph_cache=False):
        yield
