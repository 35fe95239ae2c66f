"""The functions called by name inside traced code: torch.compile and make_fx see one op for each call."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore

import flux_inductor
from tests.support.ranks import run_ranks

OPS = ["flux_inductor.all_gather_matmul.default", "flux_inductor.matmul_reduce_scatter.default"]

Group = dist.ProcessGroup | str | None
Layer = Callable[..., tuple[Tensor, Tensor]]


def _layer(x: Tensor, up: Tensor, down: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    hidden = flux_inductor.all_gather_matmul(x, up, group, gather_dim=-3)
    assert isinstance(hidden, Tensor)
    rows = flux_inductor.matmul_reduce_scatter(hidden, down, group)
    columns = flux_inductor.matmul_reduce_scatter(hidden, down, group, scatter_dim=-1, reduce_op="avg")
    return rows, columns


def _inputs(rank: int, rows: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    shapes = [(rows, 3, 16), (16, 12), (12, 8)]
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def _exact(rank: int, world: int, rows: int) -> tuple[Tensor, ...]:
    """What `_gradients` of the layer is on `rank`, by one process in float64."""
    leaves = [[value.detach().double().requires_grad_() for value in _inputs(r, rows)] for r in range(world)]
    whole = torch.cat([x for x, _, _ in leaves])
    total = torch.stack([whole @ up @ down for _, up, down in leaves]).sum(0)
    by_rows, by_columns = total.chunk(world), (total / world).chunk(world, -1)
    loss = total.square().sum() + (total / world).square().sum()
    return by_rows[rank], by_columns[rank], *torch.autograd.grad(loss, leaves[rank])


def _gradients(layer: Layer, *inputs: Tensor) -> tuple[Tensor, ...]:
    rows, columns = layer(*inputs)
    return rows, columns, *torch.autograd.grad(rows.square().sum() + columns.square().sum(), inputs)


def _compiled(layer: Layer, backend: str) -> Callable[..., tuple[Tensor, ...]]:
    return partial(_gradients, torch.compile(layer, backend=backend, fullgraph=True))


def _symbolic(layer: Layer, rank: int) -> Callable[..., tuple[Tensor, ...]]:
    graph = make_fx(partial(_gradients, layer), tracing_mode="symbolic")(*_inputs(rank, 5))
    return torch.no_grad()(graph.forward)  # the gradients are in the graph


def _first_calls(rank: int, world: int, how: str) -> None:
    """In groups that no call was made in before, since a call leaves behind what later ones need not find."""
    os.environ["FLUX_INDUCTOR_STRATEGY"] = "always"
    given: list[Group] = [None, dist.new_group().group_name, dist.new_group()]
    for group in given:
        torch._dynamo.reset()
        layer = partial(_layer, group=group)
        traced = _symbolic(layer, rank) if how == "make_fx" else _compiled(layer, how)
        for rows in (4, 6):
            results = traced(*_inputs(rank, rows))
            torch.testing.assert_close(
                results, _exact(rank, world, rows), check_dtype=False, rtol=1e-4, atol=1e-3
            )
    assert {run.engine for run in flux_inductor.report().executions} == {"cpu"}


@pytest.mark.parametrize("how", ["aot_eager", "inductor", "flux_inductor", "make_fx"])
def test_the_first_call_may_be_a_traced_one(how: str) -> None:
    run_ranks(_first_calls, 2, how, timeout=150)


@pytest.fixture
def fake_group() -> Iterator[None]:
    torch._dynamo.reset()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def _called(graph: GraphModule) -> list[str]:
    return [str(node.target) for node in graph.graph.nodes if "flux_inductor" in str(node.target)]


@pytest.mark.usefixtures("fake_group")
def test_dynamo_sees_one_op_for_each_call() -> None:
    graphs: list[GraphModule] = []

    def look(graph: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph

    with torch.no_grad():
        torch.compile(partial(_layer, group=None), backend=look, fullgraph=True)(*_inputs(0, 4))
    (graph,) = graphs
    assert _called(graph) == [OPS[0], OPS[1], OPS[1]]


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_sees_one_op_for_each_call(mode: Literal["real", "fake", "symbolic"]) -> None:
    graph = make_fx(partial(_layer, group=None), tracing_mode=mode)(*_inputs(0, 5))
    assert _called(graph) == [OPS[0], OPS[1], OPS[1]]


@pytest.mark.usefixtures("fake_group")
def test_a_bad_call_is_named_in_traced_code_too() -> None:
    x, up, _ = _inputs(0, 4)
    others = dist.new_group([1])
    bad: list[tuple[dict[str, Any], str]] = [
        ({"gather_dim": -4}, r"gather_dim is -4; .* must be in \[0, 1\] or \[-3, -2\]"),
        ({"group": "nowhere"}, "no process group 'nowhere' on this rank"),
        ({"group": others}, "this rank is not in the group that was passed"),
        ({"plan": "ring"}, "unknown route 'ring'"),
    ]
    for arguments, message in bad:
        call = partial(flux_inductor.all_gather_matmul, **arguments)
        with pytest.raises(Exception, match=message):
            torch.compile(call, backend="aot_eager", fullgraph=True)(x, up)
        with pytest.raises(ValueError, match=message):
            make_fx(call, tracing_mode="symbolic")(x, up)
