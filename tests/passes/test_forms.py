"""Forms that real programs have between a collective and a matmul, each beside one that must be left alone.

`trace` checks that every rewritten graph computes what it did.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, randn

from tests.passes.programs import gather, scatter
from tests.passes.tracing import trace

Group = dist.ProcessGroup
Program = Callable[..., Tensor | tuple[Tensor, ...]]


def trimmed(x: Tensor, *parts: tuple[int, int]) -> Tensor:
    return torch.cat([x[start:stop] for start, stop in parts])


def padded(y: Tensor, rows: int, value: float = 0.0) -> Tensor:
    return F.pad(y, (0, 0, 0, rows), value=value)


GATHERS: dict[str, tuple[str, Program, tuple[int, ...], tuple[int, ...]]] = {
    # form: fate, program of the group, a shard and another operand; their shapes
    "einsum tk,kn": ("fused", lambda g, x, w: torch.einsum("tk,kn->tn", gather(x, 0, g), w), (4, 8), (8, 6)),
    "einsum tk,nk": ("fused", lambda g, x, w: torch.einsum("tk,nk->tn", gather(x, 0, g), w), (4, 8), (6, 8)),
    "einsum heads": (
        "fused",
        lambda g, x, w: torch.einsum("btk,khd->bhtd", gather(x, 1, g), w),
        (3, 4, 8),
        (8, 2, 3),
    ),
    "einsum over rows": (
        "contracted",
        lambda g, x, w: torch.einsum("tk,tn->kn", gather(x, 0, g), w),
        (4, 8),
        (8, 6),
    ),
    "heads merged": ("fused", lambda g, x, w: gather(x, 1, g).flatten(2) @ w, (3, 4, 2, 4), (8, 6)),
    "heads moved and merged": (
        "fused",
        lambda g, x, w: gather(x, 2, g).transpose(1, 2).flatten(2) @ w,
        (3, 2, 4, 4),
        (8, 6),
    ),
    "heads gathered": ("contracted", lambda g, x, w: gather(x, 2, g).flatten(2) @ w, (3, 4, 1, 4), (8, 6)),
    "heads in another order": (
        "no-matmul",
        lambda g, x, w: gather(x, 0, g).transpose(1, 2).flatten(1) @ w,
        (4, 2, 4),
        (8, 6),
    ),
    "features first": ("fused", lambda g, x, w: gather(x, 1, g).t() @ w, (8, 4), (8, 6)),
    "features first, left": ("as-weight", lambda g, x, w: w @ gather(x, 1, g), (8, 4), (6, 8)),
    "features first, left, batched": ("as-weight", lambda g, x, w: w @ gather(x, 2, g), (3, 8, 4), (6, 8)),
    "squeeze()": ("fused", lambda g, x, w: gather(x, 1, g).squeeze() @ w, (1, 4, 8), (8, 6)),
    "squeeze((0,))": ("fused", lambda g, x, w: torch.squeeze(gather(x, 1, g), (0,)) @ w, (1, 4, 8), (8, 6)),
    "trim by cat": ("fused", lambda g, x, w: trimmed(gather(x, 0, g), (0, 4), (4, 7)) @ w, (4, 8), (8, 6)),
    "trims inside": ("fused", lambda g, x, w: trimmed(gather(x, 0, g), (0, 3), (4, 8)) @ w, (4, 8), (8, 6)),
    "parts swapped": (
        "chunk-order",
        lambda g, x, w: trimmed(gather(x, 0, g), (4, 7), (0, 4)) @ w,
        (4, 8),
        (8, 6),
    ),
    "padded": ("fused", lambda g, x, w: padded(gather(x, 0, g), 1) @ w, (4, 8), (8, 6)),
    "padded with ones": ("no-matmul", lambda g, x, w: padded(gather(x, 0, g), 1, 1.0) @ w, (4, 8), (8, 6)),
    "* 0.5": ("fused", lambda g, x, w: (gather(x, 0, g) * 0.5) @ w, (4, 8), (8, 6)),
    "negated": ("fused", lambda g, x, w: -gather(x, 0, g) @ w, (4, 8), (8, 6)),
    "* scalar": ("fused", lambda g, x, w: (gather(x, 0, g) * w[0, 0]) @ w, (4, 8), (8, 6)),
    "* row": ("fused", lambda g, x, w: (gather(x, 0, g) * w[:, :1]) @ w, (4, 8), (8, 6)),
    "* column": ("fused", lambda g, x, w: (gather(x, 0, g) * w[:, 0]) @ w, (4, 8), (8, 6)),
    "* column of a large weight": (
        "factor",
        lambda g, x, w: (gather(x, 0, g) * w[:, 0]) @ w,
        (4, 8),
        (8, 20),
    ),
    "* matrix": ("no-matmul", lambda g, x, w: (gather(x, 0, g) * w) @ w, (4, 8), (8, 8)),
    "+ 1": ("no-matmul", lambda g, x, w: (gather(x, 0, g) + 1) @ w, (4, 8), (8, 6)),
    "/ 0": ("no-matmul", lambda g, x, w: (gather(x, 0, g) / 0) @ w, (4, 8), (8, 6)),
    "* 0.5, with a matrix added": (
        "fused",
        lambda g, x, w: torch.addmm(x.relu().repeat(2, 1), gather(x, 0, g) * 0.5, w),
        (4, 8),
        (8, 8),
    ),
    "weight of batch 1": ("fused", lambda g, x, w: torch.bmm(gather(x, 1, g), w), (1, 4, 8), (1, 8, 6)),
    "weight of batch 1, repeated": ("fused", lambda g, x, w: gather(x, 1, g) @ w, (3, 4, 8), (1, 8, 6)),
    "weight of batch 3": ("batched-weight", lambda g, x, w: gather(x, 1, g) @ w, (3, 4, 8), (3, 8, 6)),
}


@pytest.mark.parametrize("form", GATHERS)
def test_gather(group: Group, form: str) -> None:
    fate, program, x, w = GATHERS[form]
    assert trace(lambda x, w: program(group, x, w), randn(x), randn(w)).fates == fate


SCATTERS: dict[str, tuple[str, Program, tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = {
    # form: fate, program of the group, x, a weight and a third tensor; their shapes
    "einsum": (
        "fused",
        lambda g, x, w, r: scatter(torch.einsum("bthd,hdk->btk", x, w), 1, g),
        (3, 4, 2, 3),
        (2, 3, 6),
        (1,),
    ),
    "einsum, transposed": (
        "fused",
        lambda g, x, w, r: scatter(torch.einsum("bk,kn->nb", x, w), 0, g),
        (4, 8),
        (8, 6),
        (1,),
    ),
    "rows of split heads": (
        "fused",
        lambda g, x, w, r: scatter((x @ w).unflatten(2, (2, 3)), 1, g),
        (3, 4, 8),
        (8, 6),
        (1,),
    ),
    "heads": (
        "fused",
        lambda g, x, w, r: scatter((x @ w).unflatten(2, (2, 3)), 2, g),
        (3, 4, 8),
        (8, 6),
        (1,),
    ),
    "inside heads": (
        "chunk-order",
        lambda g, x, w, r: scatter((x @ w).unflatten(2, (3, 2)), 3, g),
        (3, 4, 8),
        (8, 6),
        (1,),
    ),
    "transposed": ("fused", lambda g, x, w, r: scatter((x @ w).t(), 0, g), (4, 8), (8, 6), (1,)),
    "transposed, rows": ("fused", lambda g, x, w, r: scatter((x @ w).t(), 1, g), (4, 8), (8, 6), (1,)),
    "channels first": ("fused", lambda g, x, w, r: scatter((x @ w).mT, 2, g), (3, 4, 8), (8, 6), (1,)),
    "channels": ("fused", lambda g, x, w, r: scatter((x @ w).mT, 1, g), (3, 4, 8), (8, 6), (1,)),
    "flat": ("no-matmul", lambda g, x, w, r: scatter((x @ w).flatten(), 0, g), (4, 8), (8, 6), (1,)),
    "squeeze()": ("fused", lambda g, x, w, r: scatter((x @ w).squeeze(), 0, g), (1, 4, 8), (8, 6), (1,)),
    "padded": ("fused", lambda g, x, w, r: scatter(padded(x @ w, 1), 0, g), (7, 8), (8, 6), (1,)),
    "padded, with bias": (
        "fused",
        lambda g, x, w, r: scatter(padded(x @ w + r, 1), 0, g),
        (7, 8),
        (8, 6),
        (6,),
    ),
    "padded with ones": (
        "no-matmul",
        lambda g, x, w, r: scatter(padded(x @ w, 1, 1.0), 0, g),
        (7, 8),
        (8, 6),
        (1,),
    ),
    "columns padded": (
        "no-matmul",
        lambda g, x, w, r: scatter(F.pad(x @ w, (0, 1)), 0, g),
        (4, 8),
        (8, 6),
        (1,),
    ),
    "negated": ("fused", lambda g, x, w, r: scatter(-(x @ w), 0, g), (4, 8), (8, 6), (1,)),
    "- r": ("fused", lambda g, x, w, r: scatter(x @ w - r, 0, g), (4, 8), (8, 6), (4, 6)),
    "r -": ("fused", lambda g, x, w, r: scatter(r - x @ w, 0, g), (4, 8), (8, 6), (4, 6)),
    "- bias": ("fused", lambda g, x, w, r: scatter(x @ w - r, 0, g), (4, 8), (8, 6), (6,)),
    "+ 1": ("fused", lambda g, x, w, r: scatter(x @ w + 1.0, 0, g), (4, 8), (8, 6), (1,)),
    "1 -": ("fused", lambda g, x, w, r: scatter(1 - x @ w, 0, g), (4, 8), (8, 6), (1,)),
    "* scalar": ("fused", lambda g, x, w, r: scatter((x @ w) * r[0], 0, g), (4, 8), (8, 6), (1,)),
    "/ scalar": ("fused", lambda g, x, w, r: scatter((x @ w) / r[0], 0, g), (4, 8), (8, 6), (1,)),
    "scalar /": ("no-matmul", lambda g, x, w, r: scatter(r[0] / (x @ w), 0, g), (4, 8), (8, 6), (1,)),
    "* row": ("fused", lambda g, x, w, r: scatter((x @ w) * r, 0, g), (4, 8), (8, 6), (4, 1)),
    "* column": ("fused", lambda g, x, w, r: scatter((x @ w) * r, 0, g), (8, 8), (8, 6), (6,)),
    "* column of a large weight": (
        "factor",
        lambda g, x, w, r: scatter((x @ w) * r, 0, g),
        (4, 8),
        (8, 6),
        (6,),
    ),
    "* matrix": ("no-matmul", lambda g, x, w, r: scatter((x @ w) * r, 0, g), (4, 8), (8, 6), (4, 6)),
    "* what is used": (
        "product-used",
        lambda g, x, w, r: scatter((y := x @ w) * y.sum(1, keepdim=True), 0, g),
        (4, 8),
        (8, 6),
        (1,),
    ),
    "weight of batch 1": (
        "fused",
        lambda g, x, w, r: scatter(torch.bmm(x, w), 1, g),
        (1, 4, 8),
        (1, 8, 6),
        (1,),
    ),
}


@pytest.mark.parametrize("form", SCATTERS)
def test_scatter(group: Group, form: str) -> None:
    fate, program, *shapes = SCATTERS[form]
    assert trace(lambda *args: program(group, *args), *(randn(shape) for shape in shapes)).fates == fate


def test_fp16_leaves_factors_where_they_are(group: Group) -> None:
    """What a program scales may be near the end of the range."""

    def before(x: Tensor, w: Tensor) -> Tensor:
        return (gather(x, 0, group) * 0.001) @ w

    def after(x: Tensor, w: Tensor) -> Tensor:
        return scatter((x @ w) * w[0, 0], 0, group)

    def negated(x: Tensor, w: Tensor) -> Tensor:
        return -gather(x, 0, group) @ w

    half = randn(4, 8).half(), randn(8, 6).half()
    assert [trace(fn, *half).fates for fn in (before, after, negated)] == ["factor", "factor", "fused"]


# ---------------------------------------------------------------- graphs


def test_heads_are_merged_in_the_shard(group: Group) -> None:
    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        whole = gather(x, 2, group)
        return whole.transpose(1, 2).flatten(2) @ w, whole.relu()

    assert_expected_inline(
        trace(fn, randn(3, 2, 4, 4), randn(8, 6)).text,
        """\
v0 [3,4,2,4] = permute(in0, [0, 2, 1, 3])
v1 [3,4,8] = reshape(v0, [3, 4, -1])
v2 = all_gather_matmul(v1, [in1], [], 1, True)
v3 [3,8,6] = v2[0]
v4 [3,8,8] = v2[1]
v5 [3,8,2,4] = reshape(v4, [3, 8, 2, 4])
v6 [3,2,8,4] = permute(v5, [0, 2, 1, 3])
v7 [3,2,8,4] = clone(v6, memory_format=torch.contiguous_format)
v8 [3,2,8,4] = relu(v7)
return [v3, v8]""",
    )


def test_scales_of_a_gathered_tensor(group: Group) -> None:
    """Rows are scaled in the product, before the bias; columns are rows of the weight."""

    def fn(x: Tensor, w: Tensor, b: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return torch.addmm(b, gather(x, 0, group) * 0.5 * row * column, w)

    args = randn(4, 8), randn(8, 6), randn(6), randn(8, 1), randn(8)
    assert_expected_inline(
        trace(fn, *args).text,
        """\
v0 [8,1] = reshape(in2, [-1, 1])
v1 [8,6] = mul(in4, v0)
v2 = all_gather_matmul(in0, [v1], [], 0, False)
v3 [8,6] = v2[0]
v4 [8,6] = mul(v3, 0.5)
v5 [8,6] = mul(v4, in1)
v6 [8,6] = add(v5, in3)
return [v6]""",
    )


def test_heads_of_the_result(group: Group) -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return scatter((x @ w).unflatten(2, (2, 3)).transpose(1, 2), 1, group)

    assert_expected_inline(
        trace(fn, randn(3, 4, 8), randn(8, 6)).text,
        """\
v0 [3,4,3] = matmul_reduce_scatter(in0, in1, None, None, 2, "sum", 1.0)
v1 [3,4,1,3] = reshape(v0, [3, 4, -1, 3])
v2 [3,1,4,3] = permute(v1, [0, 2, 1, 3])
v3 [3,1,4,3] = clone(v2, memory_format=torch.contiguous_format)
return [v3]""",
    )


def test_sums_and_scales_of_a_product(group: Group) -> None:
    def fn(x: Tensor, w: Tensor, b: Tensor, r: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return scatter((b - x @ w) * column - 2 * (r * row), 0, group)

    args = randn(8, 8), randn(8, 6), randn(6), randn(8, 6), randn(8, 1), randn(6)
    assert_expected_inline(
        trace(fn, *args).text,
        """\
v0 [8,6] = mul(in4, in5)
v1 [8,6] = mul(v0, 2)
v2 [8,6] = mul(v1, -1.0)
v3 [6] = reshape(in3, [-1])
v4 [6] = mul(in2, v3)
v5 [6] = reshape(in3, [-1])
v6 [8,6] = mul(in1, v5)
v7 [4,6] = matmul_reduce_scatter(in0, v6, v4, v2, 0, "sum", -1.0)
return [v7]""",
    )


def test_padding_makes_a_bias_an_addend(group: Group) -> None:
    def fn(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return scatter(padded(F.linear(x, w, b), 1), 0, group)

    assert_expected_inline(
        trace(fn, randn(7, 8), randn(6, 8), randn(6)).text,
        """\
v0 [8,6] = permute(in1, [1, 0])
v1 [7,6] = expand(in2, [7, 6])
v2 [8,6] = constant_pad_nd(v1, [0, 0, 0, 1])
v3 [8,8] = constant_pad_nd(in0, [0, 0, 0, 1])
v4 [4,6] = matmul_reduce_scatter(v3, v0, None, v2, 0, "sum", 1.0)
return [v4]""",
    )


def test_trim_by_a_symbol(group: Group) -> None:
    """As a program for any number of tokens has it, which pads them to a multiple of the ranks."""

    def fn(x: Tensor, w: Tensor, positions: Tensor) -> Tensor:
        return gather(x, 0, group)[: positions.shape[0]] @ w

    x, few, most = randn(4, 8), torch.arange(3), torch.arange(7)
    for one in (x, few, most):
        torch._dynamo.mark_dynamic(one, 0)
    assert trace(fn, x, randn(8, 6), few).fates == "partial"
    assert_expected_inline(
        trace(fn, x, randn(8, 6), most).text,
        """\
v0 = all_gather_matmul(in1, [in3], [], 0, False)
v1 [2*s77,6] = v0[0]
v2 [s80,6] = slice(v1, 0, 0, in2)
return [v2]""",
    )
