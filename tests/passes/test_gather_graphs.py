"""Gathers that are fused: the graph afterwards. `trace` checks that it computes the same."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, randn

from flux_inductor.passes import rewrite_gather
from tests.passes.programs import gather, gather_list, wait
from tests.passes.tracing import trace

Group = dist.ProcessGroup


# ---------------------------------------------------------------- layouts


def test_dim_0(group: Group) -> None:
    traced = trace(lambda x, w: gather(x, 0, group) @ w, randn(4, 8), randn(8, 6))
    assert_expected_inline(
        traced.text,
        """\
v0 = all_gather_matmul(in0, [in1], [], 0, False)
v1 [8,6] = v0[0]
return [v1]""",
    )


def test_inner_dim_is_one_op(group4: Group) -> None:
    traced = trace(lambda x, w: gather(x, 1, group4) @ w, randn(3, 4, 8), randn(8, 6))
    assert_expected_inline(
        traced.text,
        """\
v0 = all_gather_matmul(in0, [in1], [], 1, False)
v1 [3,16,6] = v0[0]
return [v1]""",
    )


def test_dim_1_of_four(group: Group) -> None:
    traced = trace(lambda x, w: gather(x, 1, group) @ w, randn(3, 4, 5, 8), randn(8, 6))
    assert_expected_inline(
        traced.text,
        """\
v0 = all_gather_matmul(in0, [in1], [], 1, False)
v1 [3,8,5,6] = v0[0]
return [v1]""",
    )


def test_batch_of_one_is_a_view(group: Group) -> None:
    traced = trace(lambda x, w: gather(x, 1, group) @ w, randn(1, 4, 8), randn(8, 6))
    assert_expected_inline(
        traced.text,
        """\
v0 = all_gather_matmul(in0, [in1], [], 0, False)
v1 [2,4,6] = v0[0]
v2 [1,8,6] = reshape(v1, [1, -1, 6])
return [v2]""",
    )


def test_list_of_shards(group: Group) -> None:
    traced = trace(lambda x, w: torch.cat(gather_list(x, group), 1) @ w, randn(3, 4, 8), randn(8, 6))
    assert_expected_inline(
        traced.text,
        """\
v0 = all_gather_matmul(in0, [in1], [], 1, False)
v1 [3,8,6] = v0[0]
return [v1]""",
    )


def test_dim_of_ranks(group: Group) -> None:
    """The raw tensor seen as [ranks, ...shard], taken apart along the ranks."""

    def unbound(x: Tensor, w: Tensor) -> Tensor:
        return torch.cat(gather(x, 0, group).view(2, 3, 4, 8).unbind(0), 1) @ w

    def selected(x: Tensor, w: Tensor) -> Tensor:
        by_rank = gather(x, 0, group).view(2, 3, 4, 8)
        return torch.cat([by_rank[0], by_rank[1]], 1) @ w

    def swapped(x: Tensor, w: Tensor) -> Tensor:
        by_rank = gather(x, 0, group).view(2, 3, 4, 8)
        return torch.cat([by_rank[1], by_rank[0]], 1) @ w

    args = randn(3, 4, 8), randn(8, 6)
    assert trace(unbound, *args).text == trace(selected, *args).text
    assert trace(swapped, *args).fates == "chunk-order"
    assert_expected_inline(
        trace(unbound, *args).text,
        """\
v0 = all_gather_matmul(in0, [in1], [], 1, False)
v1 [3,8,6] = v0[0]
return [v1]""",
    )


def test_pieces_smaller_than_shards_in_order(group: Group) -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return torch.cat(torch.split(gather(x, 0, group), 2), 0) @ w

    assert_expected_inline(
        trace(fn, randn(4, 8), randn(8, 6)).text,
        """\
v0 = all_gather_matmul(in0, [in1], [], 0, False)
v1 [8,6] = v0[0]
return [v1]""",
    )


def test_trailing_trim_moves_to_the_product(group: Group) -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return gather(x, 1, group)[:, :7] @ w

    assert_expected_inline(
        trace(fn, randn(3, 4, 8), randn(8, 6)).text,
        """\
v0 = all_gather_matmul(in0, [in1], [], 1, False)
v1 [3,8,6] = v0[0]
v2 [3,7,6] = slice(v1, 1, 0, 7)
v3 [3,7,6] = clone(v2, memory_format=torch.contiguous_format)
return [v3]""",
    )


def test_permuted_rows_are_permuted_in_the_product(group: Group) -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return gather(x, 0, group).transpose(0, 1) @ w

    assert_expected_inline(
        trace(fn, randn(4, 3, 8), randn(8, 6)).text,
        """\
v0 = all_gather_matmul(in0, [in1], [], 0, False)
v1 [8,3,6] = v0[0]
v2 [3,8,6] = permute(v1, [1, 0, 2])
v3 [3,8,6] = clone(v2, memory_format=torch.contiguous_format)
return [v3]""",
    )


def test_reassembly_by_views(group: Group) -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return gather(x, 0, group).view(2, 3, 4, 8).transpose(0, 1).reshape(3, 8, 8) @ w

    assert_expected_inline(
        trace(fn, randn(3, 4, 8), randn(8, 6)).text,
        """\
v0 = all_gather_matmul(in0, [in1], [], 0, False)
v1 [6,4,6] = v0[0]
v2 [2,3,4,6] = reshape(v1, [2, 3, 4, 6])
v3 [3,2,4,6] = permute(v2, [1, 0, 2, 3])
v4 [3,8,6] = reshape(v3, [3, 8, 6])
return [v4]""",
    )


def test_symbolic_rows(group: Group) -> None:
    x = randn(3, 4, 8)
    torch._dynamo.mark_dynamic(x, 0)
    traced = trace(lambda x, w: gather(x, 1, group) @ w, x, randn(8, 6))
    assert_expected_inline(
        traced.text,
        """\
v0 = all_gather_matmul(in1, [in2], [], 1, False)
v1 [s77,8,6] = v0[0]
return [v1]""",
    )


def test_sizes_of_the_gathered_tensor_are_the_products(group: Group) -> None:
    """To ask for a size is no reason to gather for others than the matmul."""
    x, w = randn(1, 4, 8), randn(8, 6)
    torch._dynamo.mark_dynamic(x, 1)
    torch._dynamo.mark_dynamic(w, 1)
    traced = trace(lambda x, w: gather(x, 1, group) @ w, x, w)
    assert_expected_inline(
        traced.text,
        """\
v0 = all_gather_matmul(in1, [in3], [], 0, False)
v1 [2,s27,s21] = v0[0]
v2 = sym_size(in3, 1)
v3 [1,2*s27,s21] = reshape(v1, [1, -1, v2])
return [v3]""",
    )


# ---------------------------------------------------------------- consumers


def test_several_matmuls_share_the_gather(group: Group) -> None:
    def fn(x: Tensor, q: Tensor, k: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        whole = gather(x, 0, group)
        return whole @ q, F.linear(whole, k, b)

    assert_expected_inline(
        trace(fn, randn(4, 8), randn(8, 6), randn(5, 8), randn(5)).text,
        """\
v0 [8,5] = permute(in2, [1, 0])
v1 = all_gather_matmul(in0, [in1, v0], [None, in3], 0, False)
v2 [8,6] = v1[0]
v3 [8,5] = v1[1]
return [v2, v3]""",
    )


def test_matrix_added_to_the_product(group: Group) -> None:
    def fn(x: Tensor, w: Tensor, residual: Tensor) -> Tensor:
        return gather(x, 0, group) @ w + residual

    assert_expected_inline(
        trace(fn, randn(4, 8), randn(8, 6), randn(8, 6)).text,
        """\
v0 = all_gather_matmul(in0, [in1], [], 0, False)
v1 [8,6] = v0[0]
v2 [8,6] = add(v1, in2)
return [v2]""",
    )


def test_gathered_tensor_is_returned_too(group: Group) -> None:
    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        whole = gather(x, 1, group)
        return whole.sum(-1), whole @ w

    assert_expected_inline(
        trace(fn, randn(3, 4, 8), randn(8, 6)).text,
        """\
v0 = all_gather_matmul(in0, [in1], [], 1, True)
v1 [3,8,6] = v0[0]
v2 [3,8,8] = v0[1]
v3 [3,8] = sum(v2, [-1])
return [v3, v1]""",
    )


def test_gather_is_also_kept_before_its_wait(group: Group) -> None:
    """As selective checkpointing keeps it for the backward, which waits for it once more."""

    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        started = torch.ops._c10d_functional.all_gather_into_tensor(x, 2, group.group_name)
        return wait(started) @ w, started

    assert_expected_inline(
        trace(fn, randn(4, 8), randn(8, 6)).text,
        """\
v0 = all_gather_matmul(in0, [in1], [], 0, True)
v1 [8,6] = v0[0]
v2 [8,8] = v0[1]
return [v1, v2]""",
    )


def test_two_waits_for_one_gather(group: Group) -> None:
    """Inductor of torch 2.14 merges equal gathers, but not their waits."""

    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        started = torch.ops._c10d_functional.all_gather_into_tensor(x, 2, group.group_name)
        return wait(started) @ w, wait(started).relu()

    assert_expected_inline(
        trace(fn, randn(4, 8), randn(8, 6)).text,
        """\
v0 = all_gather_matmul(in0, [in1], [], 0, True)
v1 [8,6] = v0[0]
v2 [8,8] = v0[1]
v3 [8,8] = relu(v2)
return [v1, v3]""",
    )


def test_right_operand_elsewhere(group: Group) -> None:
    """A weight gradient beside the product: the op gives both."""

    def fn(x: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        whole = gather(x, 0, group)
        return whole @ w, y.t() @ whole

    assert_expected_inline(
        trace(fn, randn(4, 8), randn(8, 6), randn(8, 5)).text,
        """\
v0 = all_gather_matmul(in0, [in1], [], 0, True)
v1 [8,6] = v0[0]
v2 [8,8] = v0[1]
v3 [5,8] = permute(in2, [1, 0])
v4 [5,8] = mm(v3, v2)
return [v1, v4]""",
    )


def test_forward_and_backward(group: Group) -> None:
    x, w, b = (
        randn(3, 4, 8, requires_grad=True),
        randn(6, 8, requires_grad=True),
        randn(6, requires_grad=True),
    )
    traced = trace(lambda x, w, b: F.linear(gather(x, 1, group), w, b), x, w, b)
    assert_expected_inline(
        traced.text,
        """\
v0 [8,6] = permute(in1, [1, 0])
v1 = all_gather_matmul(in0, [v0], [in2], 1, True)
v2 [3,8,6] = v1[0]
v3 [3,8,8] = v1[1]
v4 [24,8] = reshape(v3, [24, 8])
v5 [6,8] = permute(v0, [1, 0])
return [v2, v4, v5]
--
v0 [24,6] = reshape(in2, [24, 6])
v1 [6,24] = permute(v0, [1, 0])
v2 [6,8] = mm(v1, in0)
v3 [8,6] = permute(v2, [1, 0])
v4 [1,6] = sum(v0, [0], True)
v5 [6] = reshape(v4, [6])
v6 [6,8] = permute(v3, [1, 0])
v7 [3,4,8] = matmul_reduce_scatter(in2, in1, None, None, 1, "sum", 1.0)
return [v7, v6, v5]""",
    )


def test_narrowing_cast_moves_before_the_gather(group: Group) -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return gather(x, 1, group).bfloat16() @ w

    assert_expected_inline(
        trace(fn, randn(3, 4, 8), randn(8, 6).bfloat16()).text,
        """\
v0 [3,4,8] = convert_element_type(in0, torch.bfloat16)
v1 = all_gather_matmul(v0, [in1], [], 1, False)
v2 [3,8,6] = v1[0]
return [v2]""",
    )


def test_narrowed_tensor_is_returned_too(group: Group) -> None:
    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        narrow = gather(x, 0, group).view(8, 1, 8).bfloat16()
        return narrow @ w, narrow

    assert_expected_inline(
        trace(fn, randn(4, 8), randn(8, 6).bfloat16()).text,
        """\
v0 [4,8] = convert_element_type(in0, torch.bfloat16)
v1 = all_gather_matmul(v0, [in1], [], 0, True)
v2 [8,6] = v1[0]
v3 [8,1,6] = reshape(v2, [8, 1, 6])
v4 [8,8] = v1[1]
v5 [8,1,8] = reshape(v4, [8, 1, 8])
return [v3, v5]""",
    )


def test_weight_made_between_the_matmuls(group: Group) -> None:
    """The second weight is made after the first product, from inputs alone: it moves before the op."""

    def fn(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        whole = gather(x, 0, group)
        return whole @ w, whole @ (a @ b)

    assert_expected_inline(
        trace(fn, randn(4, 8), randn(8, 6), randn(8, 3), randn(3, 6)).text,
        """\
v0 [8,6] = mm(in2, in3)
v1 = all_gather_matmul(in0, [in1, v0], [], 0, False)
v2 [8,6] = v1[0]
v3 [8,6] = v1[1]
return [v2, v3]""",
    )


def test_weight_made_from_the_product_stays_out(group: Group) -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        whole = gather(x, 0, group)
        return whole @ (whole @ w)

    assert_expected_inline(
        trace(fn, randn(4, 8), randn(8, 8)).text,
        """\
v0 = all_gather_matmul(in0, [in1], [], 0, True)
v1 [8,8] = v0[0]
v2 [8,8] = v0[1]
v3 [8,8] = mm(v2, v1)
return [v3]""",
    )


def test_gathers_that_would_wait_for_each_other(group: Group) -> None:
    """Each gather's second weight is the other's first product: either op would need the other."""

    def fn(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        a, b = gather(x, 0, group), gather(y, 0, group)
        first, second = a @ w, b @ w
        return a @ second, b @ first

    assert_expected_inline(
        trace(fn, randn(4, 8), randn(4, 8), randn(8, 8)).text,
        """\
v0 = all_gather_matmul(in0, [in2], [], 0, True)
v1 [8,8] = v0[0]
v2 [8,8] = v0[1]
v3 = all_gather_matmul(in1, [in2, v1], [], 0, False)
v4 [8,8] = v3[0]
v5 [8,8] = v3[1]
v6 [8,8] = mm(v2, v4)
return [v6, v5]""",
    )


# ---------------------------------------------------------------- the gathered tensor or a product is added


def test_gathered_tensor_is_added_to_its_product(group: Group) -> None:
    """Inductor makes addmm(whole, whole, w) of it."""

    def fn(x: Tensor, w: Tensor) -> Tensor:
        whole = gather(x, 0, group)
        return torch.addmm(whole, whole, w)

    assert_expected_inline(
        trace(fn, randn(4, 8), randn(8, 8)).text,
        """\
v0 = all_gather_matmul(in0, [in1], [], 0, True)
v1 [8,8] = v0[0]
v2 [8,8] = v0[1]
v3 [8,8] = add(v1, v2)
return [v3]""",
    )


def test_gathered_batch_is_added_to_its_product(group: Group) -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        whole = gather(x, 1, group)
        return torch.baddbmm(whole, whole, w.expand(3, 8, 8))

    assert_expected_inline(
        trace(fn, randn(3, 4, 8), randn(8, 8)).text,
        """\
v0 = all_gather_matmul(in0, [in1], [], 1, True)
v1 [3,8,8] = v0[0]
v2 [3,8,8] = v0[1]
v3 [3,8,8] = add(v1, v2)
return [v3]""",
    )


def test_products_of_one_gather_are_added(group: Group) -> None:
    """Inductor makes addmm(first, whole, v) of the sum: the first product is not computed again."""

    def fn(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        whole = gather(x, 0, group)
        return torch.addmm(whole @ w, whole, v)

    assert_expected_inline(
        trace(fn, randn(4, 8), randn(8, 6), randn(8, 6)).text,
        """\
v0 = all_gather_matmul(in0, [in1, in2], [], 0, False)
v1 [8,6] = v0[0]
v2 [8,6] = v0[1]
v3 [8,6] = add(v2, v1)
return [v3]""",
    )


@pytest.mark.parametrize("mark", ["+", "cast"])
def test_sums_as_programs_write_them(group: Group, mark: str) -> None:
    """Fused, with no collective left in the graph."""

    def fn(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        whole = gather(x, 0, group)
        whole = whole.bfloat16() if mark == "cast" else whole
        return whole + whole @ w + whole @ v

    kind = torch.bfloat16 if mark == "cast" else torch.float32
    traced = trace(fn, randn(4, 8), randn(8, 8, dtype=kind), randn(8, 8, dtype=kind))
    assert traced.fates == "fused"
    assert "all_gather_into_tensor" not in traced.text
    assert " mm(" not in traced.text
    assert "addmm(" not in traced.text


def test_fused_collective_that_stays_is_an_error(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: the rewrite leaves the all_gather in the graph."""
    monkeypatch.setattr(rewrite_gather, "erase_unused", lambda graph, nodes: None)
    with pytest.raises(Exception, match="reported as fused, and still in the graph"):
        trace(lambda x, w: gather(x, 0, group) @ w, randn(4, 8), randn(8, 8))
