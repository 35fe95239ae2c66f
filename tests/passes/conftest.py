from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from tests.passes.tracing import fake_group


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    """The default group: two ranks that pretend to communicate."""
    with fake_group(2) as pretended:
        yield pretended


@pytest.fixture
def group4() -> Iterator[dist.ProcessGroup]:
    """The same with four ranks."""
    with fake_group(4) as pretended:
        yield pretended
