"""Each fused op shows as a named range in profilers that read NVTX."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from tests.gpu.engine_calls import Gather, Scatter, make
from tests.support.gpu_ranks import nccl_group, needs_two_gpus, run_gpu_ranks

pytestmark = needs_two_gpus
CALLS = 3


def _call_both(rank: int, world: int) -> None:
    group = nccl_group(world)
    for case in (Gather((512, 1024), (768,)), Scatter((1024, 512), 768)):
        call = make(case, group)
        for _ in range(CALLS):
            call()
    torch.cuda.synchronize()


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler for the recorder")
def test_a_profiler_sees_a_range_for_each_op(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, seen = tmp_path / "recorder.so", tmp_path / "ranges"
    source = Path(__file__).with_name("nvtx_recorder.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", recorder, source], check=True)
    monkeypatch.setenv("NVTX_INJECTION64_PATH", str(recorder))
    monkeypatch.setenv("NVTX_RECORDER_FILE", str(seen))
    run_gpu_ranks(_call_both)
    lines = seen.read_text().splitlines()
    for op in ("all_gather_matmul", "matmul_reduce_scatter"):
        assert lines.count(f"push flux_inductor.{op}") == 2 * CALLS, lines
    assert lines.count("pop") >= 4 * CALLS
