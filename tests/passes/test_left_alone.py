"""Collectives that are left alone, each with its reason, and those that only look like it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor, randn
from torch._inductor import config as inductor_config
from torch.distributed import config as dist_config
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.torch_version import TorchVersion

from flux_inductor.options import Options
from flux_inductor.planning.topology import Topology
from tests.passes.programs import gather, gather_list, scatter, wait
from tests.passes.tracing import ALWAYS, fake_group, trace

Group = dist.ProcessGroup
Program = Callable[..., Any]


def check(traced_fates: str, expected: str, reason: str, words: str) -> None:
    assert traced_fates == expected
    for word in words.split(";"):
        assert word.strip() in reason, (word, reason)


def left(fn: Program, code: str, words: str, *args: Tensor, options: Options = ALWAYS) -> None:
    """The only collective is left alone, with this code and a reason with these texts, separated by `;`."""
    traced = trace(fn, *args, options=options)
    (record,) = traced.records
    check(traced.fates, code, record.reason, words)
    assert not record.fused
    assert record.plan == ""


# ---------------------------------------------------------------- order of chunks


def test_orders_that_others_took_for_the_plain_one(group: Group) -> None:
    x, w = randn(3, 4, 8), randn(8, 6)

    def swapped(x: Tensor, w: Tensor) -> Tensor:
        first, second = torch.split(gather(x, 0, group), 3)
        return torch.cat([second, first], 1) @ w

    def reversed_list(x: Tensor, w: Tensor) -> Tensor:
        return torch.cat(gather_list(x, group)[::-1], 0) @ w

    def repeated(x: Tensor, w: Tensor) -> Tensor:
        first, second = gather_list(x, group)
        return torch.cat([first, second, first], 1) @ w

    left(swapped, "chunk-order", "parts 3:6, 0:3 of dim 0 of [6,4,8]; 2 equal parts", x, w)
    left(reversed_list, "chunk-order", "parts 3:6, 0:3", x, w)
    left(repeated, "chunk-order", "parts 0:3, 3:6, 0:3", x, w)


def test_one_shard_twice(group: Group) -> None:
    """Inductor makes an expansion of it before the pass sees it."""

    def fn(x: Tensor, w: Tensor) -> Tensor:
        first, _ = gather_list(x, group)
        return torch.cat([first, first], 1) @ w

    left(fn, "partial", "gets only the part", randn(3, 4, 8), randn(8, 6))


def test_zigzag(group: Group) -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        a, b, c, d = torch.split(gather(x, 0, group), 2)
        return torch.cat([a, d, b, c]) @ w

    left(fn, "chunk-order", "parts 0:2, 6:8, 2:4, 4:6 of dim 0 of [8,8]", randn(4, 8), randn(8, 6))


def test_parts_that_leave_rows_out(group: Group) -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        whole = gather(x, 0, group)
        return torch.cat([whole[0:2], whole[4:6]]) @ w

    left(fn, "chunk-order", "parts 0:2, 4:6", randn(4, 8), randn(8, 6))


def test_parts_of_unequal_size_along_another_dim(group: Group) -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        a, b, c = torch.split(gather(x, 0, group), [2, 2, 2])
        return torch.cat([a, b, c], 1) @ w

    left(fn, "chunk-order", "parts 0:2, 2:4, 4:6", randn(3, 4, 8), randn(8, 6))


def test_one_shard_is_not_the_whole(group: Group) -> None:
    left(lambda x, w: gather(x, 0, group)[:4] @ w, "partial", "[4,8]", randn(4, 8), randn(8, 6))
    left(lambda x, w: gather(x, 0, group)[4:] @ w, "partial", "[4,8]", randn(4, 8), randn(8, 6))
    left(lambda x, w: gather_list(x, group)[1] @ w, "partial", "[4,8]", randn(4, 8), randn(8, 6))


def test_a_trim_is_no_reason(group: Group) -> None:
    assert trace(lambda x, w: gather(x, 0, group)[:7] @ w, randn(4, 8), randn(8, 6)).fates == "fused"


def test_swapped_halves_before_the_scatter(group: Group) -> None:
    def outer(x: Tensor, w: Tensor) -> Tensor:
        first, second = (x @ w).chunk(2)
        return scatter(torch.cat([second, first]), 0, group)

    def inner(x: Tensor, w: Tensor) -> Tensor:
        first, second = (x @ w).chunk(2, 1)
        return scatter(torch.cat([second, first]), 0, group)

    left(outer, "chunk-order", "parts 4:8, 0:4 of dim 0 of [8,4,6]", randn(8, 4, 8), randn(8, 6))
    left(inner, "chunk-order", "parts 2:4, 0:2 of dim 1 of [8,4,6]", randn(8, 4, 8), randn(8, 6))


def test_rows_by_rank_before_the_scatter(group: Group) -> None:
    """[ranks, rows, N] taken apart along the ranks: a view that is not followed."""

    def fn(x: Tensor, w: Tensor) -> Tensor:
        return scatter(torch.cat((x @ w).unbind(0)), 0, group)

    left(fn, "chunk-order", "parts 0:1, 1:2 of dim 0 of [2,4,6]", randn(2, 4, 8), randn(8, 6))


# ---------------------------------------------------------------- gathers without a matmul that could join


@pytest.mark.parametrize(
    ("program", "code", "words"),
    [
        (lambda g, x, w: gather(x, 0, g).relu(), "no-matmul", "no matmul takes the rows"),
        (lambda g, x, w: gather(x, 0, g).relu() @ w, "no-matmul", "no matmul takes the rows"),
        (lambda g, x, w: gather(x @ w, 1, g), "no-matmul", "no matmul takes the rows"),
        (lambda g, x, w: gather(x, 1, g) @ torch.cat([w, w]), "contracted", "last dim of the shard [4,8]"),
        (lambda g, x, w: w.t() @ gather(x, 0, g), "contracted", "right operand of mm"),
        (lambda g, x, w: gather(x, 0, g).t() @ w, "contracted", "permute; transposes"),
        (
            lambda g, x, w: gather(x, 0, g).double() @ w.double(),
            "cast",
            "fp32 gather would have more to move",
        ),
    ],
)
def test_gather(group: Group, program: Program, code: str, words: str) -> None:
    left(lambda x, w: program(group, x, w), code, words, randn(4, 8), randn(8, 8))


def test_cast_while_the_wide_tensor_is_needed(group: Group) -> None:
    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        whole = gather(x, 0, group)
        return whole.bfloat16() @ w, whole.sum(-1)

    left(fn, "cast", "fp32 gathered tensor is needed as bf16 and fp32", randn(4, 8), randn(8, 6).bfloat16())


def test_gathered_weight(group: Group) -> None:
    """As sharded-data-parallel programs have it: rows of the gathered tensor are columns of the product."""

    def fn(x: Tensor, w: Tensor) -> Tensor:
        return F.linear(x, gather(w, 0, group))

    left(fn, "as-weight", "as its weight", randn(3, 8), randn(4, 8))


def test_two_arrangements(group: Group) -> None:
    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        first, second = gather_list(x, group)
        return torch.cat([first, second], 1) @ w, first.sum(-1)

    left(fn, "layouts", "needed along dim 0", randn(3, 4, 8), randn(8, 6))


def test_shard_of_one_dim(group: Group) -> None:
    """Sharded parameters are gathered flat."""

    def fn(x: Tensor, w: Tensor) -> Tensor:
        return gather(x, 0, group).view(8, 4) @ w

    left(fn, "no-matmul", "[16] has no rows", randn(16), randn(4, 6))


def test_one_weight_for_each_batch_entry(group: Group) -> None:
    left(lambda x, w: gather(x, 0, group) @ w, "batched-weight", "6 batch", randn(3, 4, 8), randn(6, 8, 5))
    left(lambda x, w: scatter(x @ w, 1, group), "batched-weight", "3 batch", randn(3, 4, 8), randn(3, 8, 5))


def test_addmm_with_factors(group: Group) -> None:
    def fn(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return torch.addmm(b, gather(x, 0, group), w, alpha=0.5)

    left(fn, "scaled-addmm", "addmm; alpha", randn(4, 8), randn(8, 6), randn(6))


# ---------------------------------------------------------------- scatters without a matmul that could join


@pytest.mark.parametrize(
    ("program", "code", "words"),
    [
        (lambda g, x, w: scatter(x, 0, g), "no-matmul", "is an input of the graph"),
        (lambda g, x, w: scatter(F.gelu(x @ w), 0, g), "no-matmul", "no product;mul"),
        (lambda g, x, w: scatter(x @ w, 0, g, "max"), "reduce-op", "max"),
        (lambda g, x, w: scatter((x @ w).double(), 0, g), "cast", "fp32 product;float64"),
        (lambda g, x, w: scatter((x @ w) * w, 0, g), "no-matmul", "no product;mul"),
        (lambda g, x, w: scatter((x @ w) / 0, 0, g), "no-matmul", "no product;div"),
        (lambda g, x, w: scatter((x @ w).flatten(), 0, g), "no-matmul", "no product;does not keep the rows"),
    ],
)
def test_scatter(group: Group, program: Program, code: str, words: str) -> None:
    left(lambda x, w: program(group, x, w), code, words, randn(8, 8), randn(8, 8))


def test_product_that_is_needed_whole(group: Group) -> None:
    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        product = x @ w
        return product, scatter(product, 1, group)

    left(fn, "product-used", "is also needed by output", randn(3, 4, 8), randn(8, 6))


def test_matmul_between_gather_and_scatter_joins_the_gather(group: Group) -> None:
    traced = trace(lambda x, w: scatter(gather(x, 0, group) @ w, 0, group), randn(4, 8), randn(8, 6))
    assert traced.fates == "fused matmul-taken"
    assert "all_gather_matmul" in traced.records[1].reason


# ---------------------------------------------------------------- conditions


def test_a_wrapper_that_cannot_call_the_ops(group: Group) -> None:
    with inductor_config.patch(cpp_wrapper=True):
        left(lambda x, w: gather(x, 0, group) @ w, "cpp-wrapper", "set it to False", randn(4, 8), randn(8, 6))


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_dtypes(group: Group, dtype: torch.dtype) -> None:
    left(lambda x, w: gather(x, 0, group) @ w, "dtype", "", randn(4, 8).to(dtype), randn(8, 6).to(dtype))
    left(lambda x, w: scatter(x @ w, 0, group), "dtype", "", randn(4, 8).to(dtype), randn(8, 6).to(dtype))


def test_integers(group: Group) -> None:
    x, w = torch.ones(4, 8, dtype=torch.int64), torch.ones(8, 6, dtype=torch.int64)
    left(lambda x, w: gather(x, 0, group) @ w, "dtype", "int64; bf16, fp16 and fp32", x, w)


def test_no_tokens(group: Group) -> None:
    left(lambda x, w: gather(x, 0, group) @ w, "empty", "no elements", randn(0, 8), randn(8, 6))
    left(lambda x, w: scatter(x @ w, 0, group), "empty", "no elements", randn(0, 8), randn(8, 6))


def test_size_that_may_not_divide(group4: Group) -> None:
    x = randn(8, 8)
    torch._dynamo.mark_dynamic(x, 0)

    def fn(x: Tensor, w: Tensor) -> Tensor:
        started = torch.ops._c10d_functional.reduce_scatter_tensor(x @ w, "sum", 4, group4.group_name)
        return wait(started)

    left(fn, "unknown-size", "is not known to divide by the 4 ranks", x, randn(8, 6))


def test_one_rank() -> None:
    with fake_group(1) as group:
        left(lambda x, w: gather(x, 0, group) @ w, "one-rank", "", randn(4, 8), randn(8, 6))


def test_group_without_this_rank(group: Group) -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return wait(torch.ops._c10d_functional.all_gather_into_tensor(x, 2, "no such group")) @ w

    left(fn, "group", "'no such group' lacks this rank", randn(4, 8), randn(8, 6))


def test_strategies(group: Group) -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return gather(x, 0, group) @ w

    left(fn, "never", "", randn(4, 8), randn(8, 6), options=Options(strategy="never"))
    left(fn, "not-profitable", "us", randn(4, 8), randn(8, 6), options=Options(strategy="auto"))


def test_written_topology_counts_for_groups_of_its_size(group: Group) -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return gather(x, 0, group) @ w

    two_nodes = str(Topology("cpu", 2, nodes=2, link="shm"))
    left(
        fn,
        "no-schedule",
        "",
        randn(4, 8),
        randn(8, 6),
        options=Options(strategy="always", topology=two_nodes),
    )
    of_four = Options(strategy="always", topology=str(Topology("cpu", 4, nodes=2, link="shm")))
    assert trace(fn, randn(4, 8), randn(8, 6), options=of_four).fates == "fused"


# ---------------------------------------------------------------- other collectives


def test_every_collective_has_one_record(group: Group) -> None:
    def fn(x: Tensor, w: Tensor) -> tuple[Any, ...]:
        reduced = funcol.all_reduce(x @ w, "sum", group)
        exchanged = funcol.all_to_all_single(x, None, None, group)
        return reduced, exchanged, funcol.broadcast(x, 0, group), gather(x, 0, group) @ w

    traced = trace(fn, randn(4, 8), randn(8, 6))
    assert {record.op: record.code for record in traced.records} == {
        "all_reduce": "other-collective",
        "all_to_all_single": "other-collective",
        "broadcast": "other-collective",
        "all_gather": "",
    }
    assert (
        next(one for one in traced.records if one.op == "all_reduce").reason == "all_reduce is not fused yet"
    )


@pytest.mark.skipif(TorchVersion(torch.__version__) < "2.13", reason="the graph still holds group names")
def test_group_of_a_program_for_any_rank() -> None:
    """Under compile_on_one_rank the graph holds meshes. A sub-group's name differs between ranks."""
    with fake_group(4), dist_config.patch(compile_on_one_rank=True):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        flat = init_device_mesh("cpu", (4,))

        def fn(x: Tensor, w: Tensor, mesh: Any) -> Tensor:
            return DTensor.from_local(x, mesh, [Shard(0)]).redistribute(mesh, [Replicate()]).to_local() @ w

        for tp, code in ((mesh["tp"], "group"), (flat, "fused")):
            assert trace(lambda x, w, tp=tp: fn(x, w, tp), randn(4, 8), randn(8, 6)).fates == code
