"""Where the report goes by itself: stderr, the logger, torch's structured trace."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import torch
from tests.backend.programs import fake_ranks, inputs, pair
with fake_ranks(2):
    torch.compile(pair, backend="flux_inductor")(*inputs()[:2])
"""
ROW = "inference 0"


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], str]:
    """Lines of stderr and text of the trace, of one program that never imports the package itself."""
    folder = tmp_path_factory.mktemp("trace")
    environment = {
        **os.environ,
        "FLUX_INDUCTOR_REPORT": "1",
        "TORCH_LOGS": "+flux_inductor",
        "TORCH_TRACE": str(folder),
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr.splitlines(), "".join(file.read_text() for file in Path(folder).iterdir())


def test_the_option_prints_the_table_once(output: tuple[list[str], str]) -> None:
    lines, _ = output
    assert lines.count("flux_inductor: inference 0") == 1
    assert sum(line.startswith(ROW) for line in lines) == 1


def test_the_option_prints_executions_at_the_end(output: tuple[list[str], str]) -> None:
    lines, _ = output
    assert [line for line in lines if line.startswith("flux_inductor: executed:")] == lines[-1:]


def test_torch_logs_shows_the_same_table(output: tuple[list[str], str]) -> None:
    lines, _ = output
    printed = [line for line in lines if line.startswith(ROW)]
    logged = [line for line in lines if "flux_inductor/tools/log.py" in line]
    for row in printed:
        assert sum(line.endswith(row) for line in logged) == 1


def test_the_structured_trace_has_the_table(output: tuple[list[str], str]) -> None:
    lines, trace = output
    assert '"name": "flux_inductor_inference_0"' in trace
    for row in lines:
        assert not row.startswith(ROW) or row in trace
