"""The benchmark of whole blocks, on tiny ones: it runs, fuses, and checks results before it times them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.fx

from benchmarks.blocks import check, errors
from benchmarks.without_collectives import WithoutCollectives

ROOT = Path(__file__).resolve().parents[2]


def test_tiny_blocks_on_cpu_ranks(tmp_path: Path) -> None:
    figures = tmp_path / "blocks.json"
    arguments = ["--device", "cpu", "--only", "tiny", "--modes", "forward", "--rounds", "2"]
    arguments += ["--candidates", "ours", "compute", "--strategy", "always", "--json", str(figures)]
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks.blocks", *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    rows = {row["candidate"]: row for row in json.loads(figures.read_text())["rows"]}
    assert (rows["ours"]["fused"], rows["ours"]["collectives"]) == (4, 4)
    assert 0 < rows["ours"]["error"] < 5e-3
    assert rows["compute"]["ms"] > 0
    assert "4 collectives in 1 graphs, 4 fused, 0 left" in ran.stdout


def test_a_wrong_result_is_told() -> None:
    exact = {"result": torch.randn(100), "gradient of x": torch.randn(100)}
    eager = {"result": 1e-3, "gradient of x": 1e-3}
    right = {name: (value * 1.003) for name, value in exact.items()}
    assert check("ours", errors(right, exact), eager) == pytest.approx(3e-3, rel=1e-2)
    for wrong in (exact["result"] * 1.005, exact["result"] * torch.nan):
        with pytest.raises(RuntimeError, match=r"ours: the result is off by"):
            check("ours", errors({**right, "result": wrong}, exact), eager)


def test_collectives_are_replaced_by_results_that_are_there() -> None:
    functional = torch.ops._c10d_functional
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    gathered = graph.call_function(functional.all_gather_into_tensor.default, (x, 2, "0"))
    waited = graph.call_function(functional.wait_tensor.default, (gathered,))
    scattered = graph.call_function(functional.reduce_scatter_tensor.default, (waited, "sum", 2, "0"))
    graph.output((waited, graph.call_function(functional.wait_tensor.default, (scattered,))))
    WithoutCollectives()(graph)
    graph.lint()
    assert not dist.is_initialized()
    whole, part = torch.fx.GraphModule({}, graph)(torch.randn(4, 3))
    assert (whole.shape, part.shape) == ((8, 3), (4, 3))
    assert whole.abs().min() > 0
