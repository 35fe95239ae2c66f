"""Scatters of bf16 and fp16 products that the program sums in fp32: graphs, reasons and decisions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, randn

from flux_inductor.planning.ops import MATMUL_REDUCE_SCATTER
from flux_inductor.planning.problem import Problem
from flux_inductor.planning.sm90 import limits, sm90
from flux_inductor.planning.strategy import Decision, choose
from flux_inductor.planning.topology import Topology
from tests.passes.programs import gather, scatter
from tests.passes.tracing import trace
from tests.support.installations import EVERYWHERE

Group = dist.ProcessGroup
Program = Callable[..., Tensor]


def half(*shape: int) -> Tensor:
    return randn(*shape).bfloat16()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cast_of_the_product(group: Group, dtype: torch.dtype) -> None:
    """The result is cast back behind the scatter."""
    traced = trace(
        lambda x, w: scatter((x @ w).float(), 0, group).to(dtype),
        randn(8, 5).to(dtype),
        randn(5, 6).to(dtype),
    )
    assert traced.records[0].shapes.endswith("16 as fp32")
    assert_expected_inline(
        traced.text.replace(str(dtype), "dtype"),
        """\
v0 [4,6] = matmul_reduce_scatter(in0, in1, None, None, 0, "sum", 1.0, torch.float32)
v1 [4,6] = convert_element_type(v0, dtype)
return [v1]""",
    )


def test_cast_and_views_along_an_inner_dim_of_four_ranks(group4: Group) -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return scatter((x.view(24, 5) @ w).float().view(3, 8, 6) * 0.5, 1, group4, "avg")

    assert_expected_inline(
        trace(fn, half(3, 8, 5), half(5, 6)).text,
        """\
v0 [3,2,6] = matmul_reduce_scatter(in0, in1, None, None, 1, "avg", 0.5, torch.float32)
return [v0]""",
    )


def test_residual_joins_in_fp32(group: Group) -> None:
    """As in autocast: the addition itself casts."""
    traced = trace(lambda x, w, r: scatter(r + x @ w, 0, group), half(8, 5), half(5, 6), randn(8, 6))
    assert_expected_inline(
        traced.text,
        """\
v0 [4,6] = matmul_reduce_scatter(in0, in1, None, in2, 0, "sum", 1.0, torch.float32)
return [v0]""",
    )


def test_biases_and_addends_of_both_dtypes(group: Group) -> None:
    """What is scaled or summed before the op is so in fp32, as in the program."""

    def fn(x: Tensor, w: Tensor, b: Tensor, a: Tensor, r: Tensor) -> Tensor:
        return scatter(((F.linear(x, w, b) + a).float() + r) * 0.3, 1, group)

    assert_expected_inline(
        trace(fn, half(3, 8, 5), half(6, 5), half(6), half(3, 8, 6), randn(3, 8, 6)).text,
        """\
v0 [5,6] = permute(in1, [1, 0])
v1 [6] = convert_element_type(in2, torch.float32)
v2 [6] = mul(v1, 0.3)
v3 [3,8,6] = mul(in4, 0.3)
v4 [3,8,6] = convert_element_type(in3, torch.float32)
v5 [3,8,6] = mul(v4, 0.3)
v6 [3,8,6] = add(v3, v5)
v7 [3,4,6] = matmul_reduce_scatter(in0, v0, v2, v6, 1, "sum", 0.3, torch.float32)
return [v7]""",
    )


def test_bias_stays_as_it_is_and_another_is_fp32(group: Group) -> None:
    def fn(x: Tensor, w: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        own = scatter(F.linear(x, w, b).float(), 0, group)
        return own, scatter((x @ w.t()).float() + c, 1, group)

    assert_expected_inline(
        trace(fn, half(8, 5), half(6, 5), half(6), randn(6)).text,
        """\
v0 [5,6] = permute(in1, [1, 0])
v1 [4,6] = matmul_reduce_scatter(in0, v0, in2, None, 0, "sum", 1.0, torch.float32)
v2 [5,6] = permute(in1, [1, 0])
v3 [8,3] = after [v1]: matmul_reduce_scatter(in0, v2, in3, None, 1, "sum", 1.0, torch.float32)
return [v1, v3]""",
    )


def test_symbolic_rows(group: Group) -> None:
    x = half(8, 5)
    torch._dynamo.mark_dynamic(x, 0)

    def fn(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
        rows = x.shape[0] // 2 * 2
        return scatter((x[:rows] @ w).float() + r, 0, group)

    traced = trace(fn, x, half(5, 6), randn(6))
    assert traced.fates == "fused"
    assert traced.records[0].shapes.endswith("bf16 as fp32")


@pytest.mark.parametrize("residual_grad", [False, True])
def test_training_under_autocast(group: Group, residual_grad: bool) -> None:
    """fp32 parameters and residual stream, bf16 products. Their gradient is gathered in bf16, unless the
    residual needs it in fp32."""

    def fn(x: Tensor, up: Tensor, down: Tensor, r: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            hidden = F.silu(F.linear(gather(x, 0, group), up))
            return scatter(F.linear(hidden, down).float() + r, 0, group)

    args = [randn(4, 16), randn(8, 16), randn(16, 8), randn(8, 16)]
    grads = True, True, True, residual_grad
    traced = trace(fn, *(arg.requires_grad_(needed) for arg, needed in zip(args, grads, strict=True)))
    assert traced.fates == f"fused fused {'cast' if residual_grad else 'fused'} fused"
    assert "as fp32" in traced.records[1].shapes


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (lambda g, x, w: scatter((x @ w).double(), 0, g), "bf16 product float64"),
        (lambda g, x, w: scatter((x.float() @ w.float()).bfloat16(), 0, g), "fp32 product bf16"),
        (lambda g, x, w: scatter(((x @ w).float() + 1).sin().bfloat16(), 0, g), ""),
        (lambda g, x, w: scatter(((x @ w).float() + w.float().sum(0)).bfloat16(), 0, g), "fp32 product bf16"),
        (lambda g, x, w: scatter((x @ w).half().float(), 0, g), "bf16 product fp16"),
    ],
)
def test_other_casts(group: Group, program: Program, words: str) -> None:
    traced = trace(lambda x, w: program(group, x, w), half(8, 8), half(8, 8))
    assert traced.fates == ("cast" if words else "no-matmul")
    assert words in traced.records[0].reason


def test_terms_of_a_third_dtype(group: Group) -> None:
    traced = trace(
        lambda x, w, a: scatter((x @ w).float() + a, 0, group), half(8, 5), half(5, 6), randn(8, 6).half()
    )
    assert traced.fates == "mixed-dtypes"


# ---------------------------------------------------------------- decisions


def decision(device: str, rows: int, depth: int, result: str, mode: str = "auto") -> Decision:
    problem = Problem(
        op=MATMUL_REDUCE_SCATTER,
        world=4,
        strips=1,
        rows=rows,
        columns=(4096,),
        depth=depth,
        dtype="bf16",
        result=result,
    )
    topology = Topology(device, 4, link="shm" if device == "cpu" else "nvlink")  # type: ignore[arg-type]
    return choose(problem, topology, mode, installed=EVERYWHERE)  # type: ignore[arg-type]


def test_bytes_of_the_sum_are_counted() -> None:
    """Twice as many travel, fused or not: where products hide them, fusing gains more."""
    narrow, wide = (decision("cpu", 64, 4096, result) for result in ("", "fp32"))
    assert (narrow.code, wide.fused) == ("not-profitable", True)
    assert narrow.fused_us is not None
    assert wide.fused_us is not None
    assert wide.fused_us > narrow.fused_us
    assert wide.unfused_us - narrow.unfused_us > wide.fused_us - narrow.fused_us  # type: ignore[operator]


def test_kernels_that_were_not_proven_yet_are_left_alone() -> None:
    one = decision("cuda", 2048, 1024, "fp32")
    assert (one.fused, one.code, one.reason) == (False, "kernel", limits.UNPROVEN)


def test_on_gpus_a_small_product_pays_in_bf16_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels have tiles of 64 rows for results of two bytes only; larger products pay in both."""
    monkeypatch.setattr(sm90, "UNPROVEN", "")
    small, large = ([decision("cuda", rows, 1024, result) for result in ("", "fp32")] for rows in (64, 1024))
    assert [one.fused for one in small] == [True, False]
    assert small[1].code == "not-profitable"
    assert [one.fused for one in large] == [True, True]
    assert "tile=128x128x64/2x1" in str(large[1].plan)
