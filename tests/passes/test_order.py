"""Everything that communicates in a group keeps the graph's order in the generated code."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from expecttest import assert_expected_inline
from torch import Tensor, randn
from torch._inductor.utils import fresh_cache, run_and_get_code
from torch.fx import Graph

from flux_inductor.passes import pass_list
from flux_inductor.passes.fusion_pass import FusionPass
from tests.passes.programs import gather, scatter
from tests.passes.tracing import ALWAYS, cpu_topology, fake_group, prepared, short, trace

Group = dist.ProcessGroup

# (m, K, N): shapes with which Inductor, to save memory, runs the third gather first.
SHAPES = ((256, 16, 1024), (256, 1024, 128), (64, 16, 1024))


def independent_gathers(group: Group) -> Callable[..., list[Tensor]]:
    def fn(xs: list[Tensor], cs: list[Tensor], ws: list[Tensor]) -> list[Tensor]:
        shards = [x @ c for x, c in zip(xs, cs, strict=True)]
        return [gather(shard, 0, group) @ w for shard, w in zip(shards, ws, strict=True)]

    return fn


def inputs() -> list[list[Tensor]]:
    return [
        [randn(m, 16) for m, _, _ in SHAPES],
        [randn(16, k) for _, k, _ in SHAPES],
        [randn(k, n) for _, k, n in SHAPES],
    ]


@pytest.fixture
def no_pinning() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pass_list, "pin_order", lambda graph, chain, *_: list(chain))
        yield


# A fused op, by the number of the input that is its weight, or a plain collective, by its name: in the short
# form of the graph, and in the generated code.
IN_GRAPH = re.compile(r"(?:_matmul|_scatter)\((?:in|v)\d+, \[?in(\d+)|(all_gather_into_tensor)\(")
IN_CODE = re.compile(r"(?:_matmul|_scatter)\.default\(\w+, \[?arg(\d+)_1|(all_gather_into_tensor)\.default\(")


def orders(fn: Callable[..., Any], *args: Any, chained: object = None) -> tuple[list[str], list[str]]:
    """What communicates, in the order of the rewritten graph and in that of the generated code."""
    texts: list[str] = []
    fusion = FusionPass(ALWAYS, chained, lambda records: None, cpu_topology)

    def hook(graph: Graph) -> None:
        fusion(graph)
        texts.append(short(graph))

    torch._dynamo.reset()
    compiled = torch.compile(fn, options={"post_grad_custom_post_pass": hook}, fullgraph=True)
    with torch.no_grad(), fresh_cache():
        _, (code,) = run_and_get_code(compiled, *args)

    def found(pattern: re.Pattern[str], text: str) -> list[str]:
        return [number or name for number, name in pattern.findall(text)]

    return found(IN_GRAPH, texts[0]), found(IN_CODE, code)


def test_independent_ops_keep_their_order(group: Group) -> None:
    graph, code = orders(independent_gathers(group), *inputs())
    assert graph == code == ["6", "7", "8"]


@pytest.mark.usefixtures("no_pinning")
def test_inductor_would_change_it(group: Group) -> None:
    """Or the test above could not fail."""
    graph, code = orders(independent_gathers(group), *inputs())
    assert graph != code


def between(group: Group) -> Callable[..., tuple[Tensor, ...]]:
    """A plain gather between two independent fused ones, and a scatter that depends on the second."""

    def fn(x: Tensor, y: Tensor, z: Tensor, u: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        first, plain = gather(x, 0, group) @ u, gather(y, 0, group)
        second = gather(z, 0, group) @ v
        return first, plain, scatter(second @ w, 0, group)

    return fn


def shards_and_weights() -> list[Tensor]:
    return [*(randn(4, 8) for _ in range(3)), *(randn(8, 8) for _ in range(3))]


def test_plain_collective_stands_in_the_chain(group: Group) -> None:
    """What depends on its predecessor already gets no edge."""
    traced = trace(between(group), *shards_and_weights())
    assert traced.fates == "fused no-matmul fused fused"
    assert_expected_inline(
        traced.text,
        """\
v0 = all_gather_matmul(in0, [in1], [], 0, False)
v1 [8,8] = v0[0]
v2 [8,8] = after [v1]: all_gather_into_tensor(in2, 2)
v3 [8,8] = wait_tensor(v2)
v4 = after [v2]: all_gather_matmul(in3, [in4], [], 0, False)
v5 [8,8] = v4[0]
v6 [4,8] = matmul_reduce_scatter(v5, in5, None, None, 0, "sum", 1.0)
return [v1, v3, v6]""",
    )


def test_inductor_takes_such_a_chain(group: Group) -> None:
    graph, code = orders(between(group), *shards_and_weights())
    assert graph == code
    assert len(set(code)) == 4


def test_other_groups_are_in_the_chain() -> None:
    """Inductor keeps all plain collectives in one order, and so do ranks that fuse nothing."""
    with fake_group(4) as world:
        pair = dist.new_group([0, 1])

        def fn(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, ...]:
            first = gather(x, 0, pair) @ w
            return first, funcol.all_reduce(y, "sum", world), gather(y, 0, pair) @ w

        assert_expected_inline(
            trace(fn, randn(4, 8), randn(4, 8), randn(8, 8)).text,
            """\
v0 = all_gather_matmul(in0, [in1], [], 0, False)
v1 [8,8] = v0[0]
v2 [4,8] = after [v1]: all_reduce(in2, "sum")
v3 [4,8] = wait_tensor(v2)
v4 = after [v2]: all_gather_matmul(in2, [in1], [], 0, False)
v5 [8,8] = v4[0]
return [v1, v3, v5]""",
        )


def test_op_stands_where_the_gather_was(group: Group) -> None:
    """Before a collective that stood between gather and matmul; what makes its weight moves with it."""

    def fn(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        whole = gather(x, 0, group)
        total = funcol.all_reduce(y, "sum", group)
        return whole @ w.relu().t(), total, whole.sum()

    assert_expected_inline(
        trace(fn, randn(4, 8), randn(4, 8), randn(8, 8)).text,
        """\
v0 [8,8] = relu(in2)
v1 [8,8] = permute(v0, [1, 0])
v2 = all_gather_matmul(in0, [v1], [], 0, True)
v3 [8,8] = v2[0]
v4 [4,8] = after [v3]: all_reduce(in1, "sum")
v5 [4,8] = wait_tensor(v4)
v6 [8,8] = v2[1]
v7 [] = sum(v6)
return [v3, v5, v7]""",
    )


def test_op_stands_right_behind_what_its_weight_needs(group: Group) -> None:
    """A sharded weight is gathered after the activation, as sharded data parallelism does it."""

    def fn(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        whole = gather(x, 0, group)
        weight = gather(w, 0, group).relu()
        total = funcol.all_reduce(y, "sum", group)
        return whole @ weight, total, whole.sum()

    assert_expected_inline(
        trace(fn, randn(4, 8), randn(4, 8), randn(4, 8)).text,
        """\
v0 [8,8] = all_gather_into_tensor(in1, 2)
v1 [8,8] = wait_tensor(v0)
v2 [8,8] = relu(v1)
v3 = all_gather_matmul(in0, [v2], [], 0, True)
v4 [8,8] = v3[0]
v5 [4,8] = after [v4]: all_reduce(in2, "sum")
v6 [4,8] = wait_tensor(v5)
v7 [8,8] = v3[1]
v8 [] = sum(v7)
return [v4, v6, v8]""",
    )


def test_plain_collectives_never_change_places(group: Group) -> None:
    """The op cannot stand behind the second all_reduce, as the first one needs what it gathers."""

    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        whole = gather(x, 0, group)
        early = funcol.all_reduce(whole.relu(), "sum", group)
        return early, whole @ funcol.all_reduce(w, "sum", group)

    assert trace(fn, randn(4, 8), randn(8, 8)).fates == "operand-order other-collective other-collective"


def test_reordered_users_keep_collectives_in_order(group: Group) -> None:
    """The op stands where its matmul was; what else needs the gathered tensor follows, a collective too."""

    def fn(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        whole = gather(x, 0, group)
        first = funcol.all_reduce(whole.relu(), "sum", group)
        second = funcol.all_reduce(y, "sum", group)
        return first, second, whole @ w

    lines = trace(fn, randn(4, 8), randn(4, 8), randn(8, 8)).text.splitlines()
    order = [re.search(r"(all_reduce|all_gather_matmul)\(v?(in\d)?", line) for line in lines]
    assert [one.groups() for one in order if one] == [
        ("all_gather_matmul", "in0"),
        ("all_reduce", None),
        ("all_reduce", "in1"),
    ]


def test_shape_is_no_dependency(group: Group) -> None:
    """A tensor of the first product's shape does not wait for it: Inductor reads no data for that."""

    def fn(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        first = gather(x, 0, group) @ w
        return first, gather(y + torch.empty_like(first)[:4], 0, group) @ w

    traced = prepared(fn)  # what an uninitialised tensor holds cannot be compared
    traced.call(randn(4, 8), randn(4, 8), randn(8, 8))
    assert len([line for line in traced.text.splitlines() if "after" in line]) == 1


def test_unsorted_graph_of_a_users_pass(group: Group) -> None:
    """It puts a node behind its users, as a pass may that leaves the sorting to Inductor."""

    def fn(x: Tensor, w: Tensor) -> Tensor:
        return gather(x.relu(), 0, group) @ w

    def unsort(graph: Graph) -> None:
        (relu,) = graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default)
        graph.output_node().prepend(relu)

    graph, code = orders(fn, randn(4, 8), randn(8, 8), chained=unsort)
    assert graph == code == ["1"]
