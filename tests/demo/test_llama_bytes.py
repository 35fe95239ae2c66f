"""The demo itself, with a smaller model and few steps."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessRaisedException

import flux_inductor
from examples.llama_bytes.__main__ import show
from examples.llama_bytes.comparison import Comparison, compare
from examples.llama_bytes.curves import terminal_plot
from examples.llama_bytes.launch import run_on_ranks
from examples.llama_bytes.model import Shape
from examples.llama_bytes.text import batches, corpus
from examples.llama_bytes.training import Run, Setting, setting_for
from flux_inductor.planning.ops import ALL_GATHER_MATMUL, MATMUL_REDUCE_SCATTER
from flux_inductor.planning.problem import Problem
from flux_inductor.planning.strategy import choose
from flux_inductor.planning.topology import Topology
from tests.support.installations import EVERYWHERE

pytest.importorskip("matplotlib")

SMALL = Setting(shape=Shape(layers=1, hidden=64, heads=4, inner=128), batch=2, sequence=64, steps=16)


def test_eager_and_compiled_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = run_on_ranks(compare, 2, "cpu", SMALL, "always", seconds=170)
    assert show(results, SMALL, tmp_path)
    shown = capsys.readouterr().out
    assert "within the tolerance" in shown
    # Of one layer: 2 gathers and 2 scatters forward, as many backward, the head's gather and its gradient.
    assert "10 fused, 3 left (no-matmul 3)" in shown
    assert re.search(r"all_gather_matmul on cpu \d+x, matmul_reduce_scatter on cpu \d+x$", shown, re.M)
    assert {path.name for path in tmp_path.iterdir()} == {"losses.png", "timeline.png"}
    losses = results[0].compiled.losses
    assert losses == results[1].compiled.losses
    assert losses[-1] < losses[0] - 0.5


def test_on_gpus_the_blocks_are_large_enough_to_fuse() -> None:
    setting = setting_for("cuda", 50)
    hidden, inner = setting.shape.hidden, setting.shape.inner
    pairs = [
        Problem(ALL_GATHER_MATMUL, 2, 8, 512, (hidden // 2,) * 3, hidden, "bf16", return_gathered=True),
        Problem(ALL_GATHER_MATMUL, 2, 8, 512, (inner // 2,) * 2, hidden, "bf16", return_gathered=True),
        Problem(MATMUL_REDUCE_SCATTER, 2, 8, 512, (hidden,), hidden // 2, "bf16"),
        Problem(MATMUL_REDUCE_SCATTER, 2, 8, 512, (hidden,), inner // 2, "bf16"),
    ]
    assert (setting.batch, setting.sequence) == (8, 2 * 512)
    for pair in pairs:
        assert choose(pair, Topology("cuda", 2, link="nvlink"), installed=EVERYWHERE).fused, pair
    assert setting_for("cpu", 50) == Setting()


def test_disagreement_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(losses=(2.0, 1.5), first_step=1.0)
    other = replace(run, losses=(2.0, 1.6))
    seconds = {"eager": 0.1, "compiled": 0.1, "reference": 0.1}
    result = Comparison(run, other, seconds, flux_inductor.Report(()), (), "")
    assert not show([result], replace(SMALL, steps=2), tmp_path)
    assert "ABOVE the tolerance" in capsys.readouterr().out


def test_terminal_plot_tells_the_curves_apart() -> None:
    eager = Run((4.0, 3.0, 2.0, 1.0), 0)
    compiled = Run((4.0, 3.0, 2.0, 2.0), 0)
    rows = terminal_plot(eager, compiled, height=4).splitlines()
    assert [row.partition("|")[2].rstrip() for row in rows[:4]] == ["*", " *", "  *c", "   e"]


def test_batches_are_cuts_of_the_text() -> None:
    text = corpus()
    assert b"flux_inductor" in bytes(text.tolist())
    (cut,) = batches(text, batch=3, sequence=16, steps=1, seed=5)
    (same,) = batches(text, batch=3, sequence=16, steps=1, seed=5)
    assert torch.equal(cut, same)
    for row in cut.tolist():
        assert bytes(row) in bytes(text.tolist())
    with pytest.raises(ValueError, match="a sequence of 300 needs more"):
        next(batches(text[:301], batch=1, sequence=300, steps=1, seed=0))


def test_a_failing_rank_is_told() -> None:
    with pytest.raises(ProcessRaisedException, match="rank 1 has had enough"):
        run_on_ranks(_fail_on_rank_1, 2, "cpu", seconds=60)


def test_ranks_have_a_time_limit() -> None:
    began = time.monotonic()
    with pytest.raises(TimeoutError, match="within 3 seconds"):
        run_on_ranks(time.sleep, 2, "cpu", 100, seconds=3)
    assert time.monotonic() - began < 30


def _fail_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise RuntimeError("rank 1 has had enough")
    dist.barrier()
