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

from benchmarks.block_profile import Span, by_name, idle_share, short_name, table
from benchmarks.blocks import check, errors
from benchmarks.without_collectives import WithoutCollectives

ROOT = Path(__file__).resolve().parents[2]


def test_tiny_blocks_on_cpu_ranks(tmp_path: Path) -> None:
    figures = tmp_path / "blocks.json"
    arguments = ["--device", "cpu", "--only", "tiny", "--modes", "forward", "--rounds", "2"]
    arguments += [
        "--candidates",
        "ours",
        "compute",
        "--strategy",
        "always",
        "--json",
        str(figures),
        "--profile",
    ]
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
    ours, compute = ran.stdout.split("by kernel:")[1:]
    assert "flux_inductor::all_gather_matmul" in ours
    assert "aten::mm" in compute


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


# As the profiler gives them, shortened; a second 128 of the tile is abbreviated.
AG_KERNEL = (
    "_ZN7cutlass13device_kernelINS_4gemm6kernel13GemmUniversalI13flux_inductor4cuda13GatedMainloopINS1_34Mainloop"
    "Sm90TmaGmmaWarpSpecializedILi6ENS5_IJNS4_1CILi2EEENSD_ILi1EEESF_EEENS1_32KernelTmaWarpSpecializedPingpong"
    "EEENS5_IJNSD_ILi128EEESJ_NSD_ILi64EEEEEE28MMA_64x128x16_F32BF16BF16_SSILNST_5MajorE0ELSV_0ELNST_7ScaleIn"
    "E1ELSW_1EEEE15KeepingEpilogueILi4EEE"
)
RS_KERNEL = (
    "_ZN7cutlass13device_kernelIN13flux_inductor4cuda13ScatterKernelINS2_10TileConfigILi256ELi192ELi2ELi1ELb0EEEL"
    "NS2_11ElementTypeE1ENS_4gemm10collective13CollectiveMmaINS7_34MainloopSm90TmaGmmaWarpSpecializedILi3EN4cute5"
    "tupleIJNSB_1CILi2EEENSD_ILi1EEESF_EEENS7_35KernelTmaWarpSpecializedCooperativeEEENSC_IJNSD_ILi256EEENSD_ILi1"
    "92EEENSD_ILi64EEEEEE26MMA_64x192x16_F32F16F16_SSILNST_5MajorE0ELSV_1ELNST_7ScaleInE1ELSW_1EEEEEE"
)
RS_DEMANGLED = (
    "void cutlass::device_kernel<flux_inductor::cuda::ScatterKernel<flux_inductor::cuda::TileConfig<64, 256, "
    "2, 1, false>, (flux_inductor::cuda::ElementType)0, CollectiveMma<MainloopSm90TmaGmmaWarpSpecialized<5, "
    "cute::tuple<cute::C<2>, cute::C<1>, cute::C<1> >, cutlass::gemm::KernelTmaWarpSpecialized>, "
    "tuple<cute::C<64>, cute::C<256>, cute::C<64> >, cute::SM90::GMMA::MMA_64x256x16_F32BF16BF16_SS<(cute::"
    "SM90::GMMA::Major)0, (cute::SM90::GMMA::Major)1, (cute::SM90::GMMA::ScaleIn)1> > > >"
)
THEIRS = (
    "void cutlass::device_kernel<KernelTmaWarpSpecializedCooperative, cute::C<128>, cute::C<256>, "
    "MMA_64x256x16_F32BF16BF16_SS>"
)


@pytest.mark.parametrize(
    ("name", "short"),
    [
        (AG_KERNEL, "ours AG 128x128 bf16 pingpong"),
        (RS_KERNEL, "ours RS 256x192 fp16 n_major"),
        (RS_DEMANGLED, "ours RS 64x256 bf16 n_major"),
        ("_ZN13flux_inductor4cuda12_GLOBAL__N_117enter_call_kernelENS0_9CallEntryE", "ours enter_call"),
        ("nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNN", "nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNN"),
        ("Memcpy PtoP (Device -> Device)", "Memcpy PtoP (Device -> Device)"),
        ("void at::native::(anonymous namespace)::copy_kernel<4, at::x>(int)", "copy_kernel<4, x>(int)"),
    ],
)
def test_kernels_are_told_apart_by_short_names(name: str, short: str) -> None:
    assert short_name(name) == short
    assert not short_name(THEIRS).startswith("ours")


def test_the_rest_of_a_profile_is_in_one_line_and_in_the_sum() -> None:
    times = by_name((f"kernel {index}", 10.0 * index) for index in range(1, 21) for _ in range(2))
    header, *lines = table(times, calls=2).splitlines()
    assert "us a call" in header
    assert lines[0].split() == ["200.0", "1.0", "200.0", "kernel", "20"]
    assert [line.split() for line in lines[18:]] == [
        ["30.0", "2.0", "15.0", "2", "others"],
        ["2100.0", "20.0", "105.0", "sum"],
    ]


def test_idle_is_what_the_compute_stream_leaves() -> None:
    spans = [Span("a", 7, 0, 4), Span("b", 7, 2, 5), Span("copy", 9, 4, 9), Span("c", 7, 8, 10)]
    assert idle_share(spans, stream=7) == pytest.approx(0.3)
