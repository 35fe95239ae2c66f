"""Reduce_scatters that are fused: the graph afterwards. `trace` checks that it computes the same."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, randn

from tests.passes.programs import gather, scatter, wait
from tests.passes.tracing import trace

Group = dist.ProcessGroup


# ---------------------------------------------------------------- layouts


def test_dim_0(group: Group) -> None:
    traced = trace(lambda x, w: scatter(x @ w, 0, group), randn(8, 5), randn(5, 6))
    assert_expected_inline(
        traced.text,
        """\
v0 [4,6] = matmul_reduce_scatter(in0, in1, None, None, 0, "sum", 1.0)
return [v0]""",
    )


def test_inner_dim_of_four_ranks(group4: Group) -> None:
    traced = trace(lambda x, w: scatter(x @ w, 1, group4), randn(3, 8, 5), randn(5, 6))
    assert_expected_inline(
        traced.text,
        """\
v0 [3,2,6] = matmul_reduce_scatter(in0, in1, None, None, 1, "sum", 1.0)
return [v0]""",
    )


def test_columns(group: Group) -> None:
    traced = trace(lambda x, w: scatter(x @ w, 2, group), randn(3, 8, 5), randn(5, 6))
    assert_expected_inline(
        traced.text,
        """\
v0 [3,8,3] = matmul_reduce_scatter(in0, in1, None, None, 2, "sum", 1.0)
return [v0]""",
    )


def test_cut_by_slices(group: Group) -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        y = x @ w
        return scatter(torch.cat([y[:, :4], y[:, 4:]]), 0, group)

    assert_expected_inline(
        trace(fn, randn(3, 8, 5), randn(5, 6)).text,
        """\
v0 [3,4,6] = matmul_reduce_scatter(in0, in1, None, None, 1, "sum", 1.0)
return [v0]""",
    )


def test_permuted_product_is_a_product_of_permuted_rows(group: Group) -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return scatter((x @ w).transpose(0, 1).contiguous(), 0, group)

    assert_expected_inline(
        trace(fn, randn(3, 8, 5), randn(5, 6)).text,
        """\
v0 [24,5] = reshape(in0, [24, 5])
v1 [3,8,5] = reshape(v0, [3, 8, 5])
v2 [8,3,5] = permute(v1, [1, 0, 2])
v3 [4,3,6] = matmul_reduce_scatter(v2, in1, None, None, 0, "sum", 1.0)
return [v3]""",
    )


def test_trimmed_product(group: Group) -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return scatter((x @ w)[:8], 0, group)

    assert_expected_inline(
        trace(fn, randn(9, 5), randn(5, 6)).text,
        """\
v0 [8,5] = slice(in0, 0, 0, 8)
v1 [4,6] = matmul_reduce_scatter(v0, in1, None, None, 0, "sum", 1.0)
return [v1]""",
    )


def test_average(group: Group) -> None:
    traced = trace(lambda x, w: scatter(x @ w, 0, group, "avg"), randn(8, 5), randn(5, 6))
    assert_expected_inline(
        traced.text,
        """\
v0 [4,6] = matmul_reduce_scatter(in0, in1, None, None, 0, "avg", 1.0)
return [v0]""",
    )


def test_symbolic_rows(group: Group) -> None:
    x = randn(3, 8, 5)
    torch._dynamo.mark_dynamic(x, 0)
    traced = trace(lambda x, w: scatter(x @ w, 1, group), x, randn(5, 6))
    assert_expected_inline(
        traced.text,
        """\
v0 [s77,4,6] = matmul_reduce_scatter(in1, in2, None, None, 1, "sum", 1.0)
return [v0]""",
    )


# ---------------------------------------------------------------- what is added, and factors


def test_bias(group: Group) -> None:
    """Row-parallel layers add a share of the bias on every rank."""

    def fn(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return scatter(F.linear(x, w, b / 2), 1, group)

    assert_expected_inline(
        trace(fn, randn(3, 8, 5), randn(6, 5), randn(6)).text,
        """\
v0 [6] = div(in0, 2)
v1 [5,6] = permute(in2, [1, 0])
v2 [3,4,6] = matmul_reduce_scatter(in1, v1, v0, None, 1, "sum", 1.0)
return [v2]""",
    )


def test_sum_of_two_products(group: Group) -> None:
    """In 2-D it reaches the pass as addmm(product, ...)."""

    def fn(a: Tensor, w: Tensor, c: Tensor, v: Tensor) -> Tensor:
        return scatter(a @ w + c @ v, 0, group)

    traced = trace(fn, randn(8, 5), randn(5, 6), randn(8, 5), randn(5, 6))
    assert_expected_inline(
        traced.text,
        """\
v0 [8,6] = mm(in0, in1)
v1 [4,6] = matmul_reduce_scatter(in2, in3, None, v0, 0, "sum", 1.0)
return [v1]""",
    )


def test_sum_of_three_products(group: Group) -> None:
    """The backward of q, k, v. The last one is added at the top: nothing more has to be computed."""

    def fn(a: Tensor, c: Tensor, e: Tensor, w: Tensor) -> Tensor:
        return scatter(a @ w + c @ w + e @ w, 1, group)

    traced = trace(fn, randn(3, 8, 5), randn(3, 8, 5), randn(3, 8, 5), randn(5, 6))
    assert_expected_inline(
        traced.text,
        """\
v0 [24,5] = reshape(in0, [24, 5])
v1 [24,6] = mm(v0, in1)
v2 [3,8,6] = reshape(v1, [3, 8, 6])
v3 [24,5] = reshape(in2, [24, 5])
v4 [24,6] = mm(v3, in1)
v5 [3,8,6] = reshape(v4, [3, 8, 6])
v6 [3,8,6] = add(v2, v5)
v7 [3,4,6] = matmul_reduce_scatter(in3, in1, None, v6, 1, "sum", 1.0)
return [v7]""",
    )


def test_the_largest_of_equally_near_products_is_taken(group: Group) -> None:
    def fn(a: Tensor, w: Tensor, c: Tensor, v: Tensor) -> Tensor:
        return scatter(a @ w + c @ v, 1, group)

    traced = trace(fn, randn(3, 8, 50), randn(50, 6), randn(3, 8, 5), randn(5, 6))
    assert_expected_inline(
        traced.text,
        """\
v0 [24,5] = reshape(in2, [24, 5])
v1 [24,6] = mm(v0, in3)
v2 [3,8,6] = reshape(v1, [3, 8, 6])
v3 [3,4,6] = matmul_reduce_scatter(in0, in1, None, v2, 1, "sum", 1.0)
return [v3]""",
    )


def test_product_and_another_tensor(group: Group) -> None:
    def fn(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
        return scatter((x @ w).view(4, 6, 6) + y.relu(), 1, group)

    assert_expected_inline(
        trace(fn, randn(3, 8, 5), randn(5, 6), randn(4, 6, 6)).text,
        """\
v0 [24,5] = reshape(in0, [24, 5])
v1 [4,6,6] = relu(in2)
v2 [3,8,5] = reshape(v0, [3, 8, 5])
v3 [4,6,5] = reshape(v2, [4, 6, 5])
v4 [4,3,6] = matmul_reduce_scatter(v3, in1, None, v1, 1, "sum", 1.0)
return [v4]""",
    )


def test_steps_after_the_sum_are_taken_on_all_summands(group: Group) -> None:
    def fn(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
        return scatter(((x @ w) + y.relu()).transpose(0, 1) * 0.5, 0, group)

    assert_expected_inline(
        trace(fn, randn(3, 8, 5), randn(5, 6), randn(3, 8, 6)).text,
        """\
v0 [24,5] = reshape(in0, [24, 5])
v1 [3,8,6] = relu(in2)
v2 [8,3,6] = permute(v1, [1, 0, 2])
v3 [8,3,6] = mul(v2, 0.5)
v4 [3,8,5] = reshape(v0, [3, 8, 5])
v5 [8,3,5] = permute(v4, [1, 0, 2])
v6 [4,3,6] = matmul_reduce_scatter(v5, in1, None, v3, 0, "sum", 0.5)
return [v6]""",
    )


def test_broadcast_summand_is_expanded(group: Group) -> None:
    def fn(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
        return scatter((x @ w) + y.relu(), 1, group)

    assert_expected_inline(
        trace(fn, randn(3, 8, 5), randn(5, 6), randn(3, 1, 6)).text,
        """\
v0 [3,1,6] = relu(in2)
v1 [3,8,6] = expand(v0, [3, 8, 6])
v2 [3,4,6] = matmul_reduce_scatter(in0, in1, None, v1, 1, "sum", 1.0)
return [v2]""",
    )


def test_factor(group: Group) -> None:
    """It also holds for the bias inside, and a quotient is a factor too."""

    def fn(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return scatter(F.linear(x, w, b) * 0.5 / 4, 0, group)

    assert_expected_inline(
        trace(fn, randn(8, 5), randn(6, 5), randn(6)).text,
        """\
v0 [5,6] = permute(in1, [1, 0])
v1 [6] = mul(in2, 0.125)
v2 [4,6] = matmul_reduce_scatter(in0, v0, v1, None, 0, "sum", 0.125)
return [v2]""",
    )


def test_one_weight_for_the_batch(group: Group) -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return scatter(torch.bmm(x, w.expand(3, 5, 6)), 1, group)

    assert_expected_inline(
        trace(fn, randn(3, 8, 5), randn(5, 6)).text,
        """\
v0 [3,4,6] = matmul_reduce_scatter(in1, in0, None, None, 1, "sum", 1.0)
return [v0]""",
    )


def test_scatter_is_kept_before_its_wait(group: Group) -> None:
    """As selective checkpointing keeps it for the backward, which waits for it once more."""

    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        started = torch.ops._c10d_functional.reduce_scatter_tensor(x @ w, "sum", 2, group.group_name)
        return wait(started).relu(), started

    assert_expected_inline(
        trace(fn, randn(8, 5), randn(5, 6)).text,
        """\
v0 [4,6] = matmul_reduce_scatter(in0, in1, None, None, 0, "sum", 1.0)
v1 [4,6] = relu(v0)
return [v1, v0]""",
    )


def test_gather_and_scatter_of_one_layer(group: Group) -> None:
    """Column-parallel then row-parallel, forward and backward: four fused ops."""

    def fn(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return scatter(torch.relu(gather(x, 1, group) @ up.t()) @ down.t(), 1, group)

    weights = randn(6, 8, requires_grad=True), randn(8, 6, requires_grad=True)
    traced = trace(fn, randn(3, 4, 8, requires_grad=True), *weights)
    assert traced.fates == "fused fused fused fused"
    assert_expected_inline(
        traced.text,
        """\
v0 [8,6] = permute(in1, [1, 0])
v1 = all_gather_matmul(in0, [v0], [], 1, True)
v2 [3,8,6] = v1[0]
v3 [3,8,8] = v1[1]
v4 [24,8] = reshape(v3, [24, 8])
v5 [3,8,6] = relu(v2)
v6 [6,8] = permute(in2, [1, 0])
v7 [24,6] = reshape(v5, [24, 6])
v8 [3,4,8] = matmul_reduce_scatter(v5, v6, None, None, 1, "sum", 1.0)
v9 [8,6] = permute(v6, [1, 0])
v10 [3,8,6] = le(v5, 0)
v11 [6,8] = permute(v0, [1, 0])
return [v8, v4, v7, v9, v10, v11]
--
v0 = all_gather_matmul(in5, [in2], [], 1, True)
v1 [3,8,6] = v0[0]
v2 [3,8,8] = v0[1]
v3 [24,8] = reshape(v2, [24, 8])
v4 [8,24] = permute(v3, [1, 0])
v5 [8,6] = mm(v4, in1)
v6 [6,8] = permute(v5, [1, 0])
v7 [8,6] = permute(v6, [1, 0])
v8 [] = scalar_tensor(0, dtype=torch.float32, layout=torch.strided, device=cpu)
v9 [3,8,6] = where(in3, v8, v1)
v10 [24,6] = reshape(v9, [24, 6])
v11 [6,24] = permute(v10, [1, 0])
v12 [6,8] = mm(v11, in0)
v13 [8,6] = permute(v12, [1, 0])
v14 [6,8] = permute(v13, [1, 0])
v15 [3,4,8] = matmul_reduce_scatter(v9, in4, None, None, 1, "sum", 1.0)
return [v15, v14, v7]""",
    )
