"""The stress test in its short form."""

from __future__ import annotations

from benchmarks import stress
from tests.support.ranks import run_ranks


def test_stress() -> None:
    """The short form of benchmarks/stress.py: random ops, sizes, plans and delays."""
    results = run_ranks(stress.run, 4, 400, 11, timeout=150)
    header = 64 << 10
    for result in results:
        assert result.workspace_bytes <= 2 * result.largest_bytes + header
