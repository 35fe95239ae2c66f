"""Every test of the backend starts without compiled code, cached graphs or options in the environment."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from torch._inductor.utils import fresh_cache

from flux_inductor.options import ENVIRONMENT_PREFIX


@pytest.fixture(autouse=True)
def _fresh_start(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for variable in [name for name in os.environ if name.startswith(ENVIRONMENT_PREFIX)]:
        monkeypatch.delenv(variable)
    torch._dynamo.reset()
    with fresh_cache():
        yield
