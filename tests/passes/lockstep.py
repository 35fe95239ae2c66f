"""Executes one graph for all ranks at once, node by node, with collectives and fused ops by their definition.

The same graph runs on every rank, so each node holds a list of values, one a rank. It needs no processes
and no engine. All floating point numbers are fp64, whatever the graph says: it shows whether a rewritten
graph is still the same formula, without the noise of roundings.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._inductor.fx_passes.control_dependencies import control_deps
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate, map_arg
from torch.utils._pytree import tree_leaves

_FUNCTIONAL = torch.ops._c10d_functional
_FUSED = torch.ops.flux_inductor

Values = list[Any]  # one a rank


def run(module: GraphModule, inputs: list[Values], world: int | None = None) -> Any:
    """The graph's output, each tensor in it as a list of one a rank."""
    world = world or len(inputs[0])
    values: dict[Node, Values] = {}
    arguments = iter(inputs)
    for node in module.graph.nodes:
        if node.op == "placeholder":
            values[node] = next(arguments)
        elif node.op == "get_attr":
            values[node] = [getattr(module, node.target)] * world
        elif node.op == "output":
            return map_arg(node.args[0], lambda one: values[one])
        elif node.target is control_deps:
            subgraph = values[node.args[1]][0]
            values[node] = run(subgraph, [values[one] for one in node.args[2:]], world)
        else:
            calls = [_arguments(node, values, rank) for rank in range(world)]
            values[node] = _call(node.target, [args for args, _ in calls], [kwargs for _, kwargs in calls])
    raise AssertionError("a graph without output")


def _arguments(node: Node, values: dict[Node, Values], rank: int) -> tuple[Any, Any]:
    return map_arg(node.args, lambda one: values[one][rank]), map_arg(
        node.kwargs, lambda one: values[one][rank]
    )


def _call(target: Any, args: list[Any], kwargs: list[Any]) -> Values:
    if target in _DEFINITIONS:
        return _DEFINITIONS[target](*map(list, zip(*args, strict=True)))
    if target is _FUNCTIONAL.wait_tensor.default:
        return [one[0] for one in args]
    results = [target(*one, **some) for one, some in zip(args, kwargs, strict=True)]
    return map_aggregate(results, _widen)


def _widen(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def _all_gather(x: list[Tensor], *_: Any, dim: int = 0) -> Values:
    return [torch.cat(x, dim)] * len(x)


def _reduce(x: list[Tensor], op: str) -> Tensor:
    reductions: dict[str, Callable[[Tensor, int], Tensor]] = {
        "sum": torch.sum,
        "avg": torch.mean,
        "max": torch.amax,
    }
    return reductions[op](torch.stack(x), 0)


def _reduce_scatter(x: list[Tensor], ops: list[str], *_: Any, dim: int = 0) -> Values:
    return [part.contiguous() for part in _reduce(x, ops[0]).chunk(len(x), dim)]


def _all_reduce(x: list[Tensor], ops: list[str], *_: Any) -> Values:
    return [_reduce(x, ops[0])] * len(x)


def _broadcast(x: list[Tensor], sources: list[int], *_: Any) -> Values:
    return [x[sources[0]]] * len(x)


def _all_to_all_single(x: list[Tensor], *_: Any) -> Values:
    """Equal parts, as the tests use it."""
    parts = [one.chunk(len(x)) for one in x]
    return [torch.cat(received) for received in zip(*parts, strict=True)]


def _all_gather_matmul(
    x: list[Tensor],
    weights: list[list[Tensor]],
    biases: list[list[Tensor | None]],
    groups: list[str],
    plans: list[str],
    dims: list[int],
    returns: list[bool],
    *_: list[str],
) -> Values:
    whole = torch.cat(x, dims[0])
    results = []
    for mine, some in zip(weights, biases, strict=True):
        padded = some or [None] * len(mine)
        products = [
            whole @ w if b is None else torch.add(whole @ w, b) for w, b in zip(mine, padded, strict=True)
        ]
        results.append([*products, whole] if returns[0] else products)
    return results


def _matmul_reduce_scatter(
    x: list[Tensor],
    weights: list[Tensor],
    biases: list[Tensor | None],
    addends: list[Tensor | None],
    groups: list[str],
    plans: list[str],
    dims: list[int],
    ops: list[str],
    scales: list[float],
    dtypes: list[torch.dtype] | None = None,
    places: list[str] | None = None,
) -> Values:
    whole = []
    for rank, (mine, weight) in enumerate(zip(x, weights, strict=True)):
        product = (mine @ weight) * scales[rank]
        for other in (biases[rank], addends[rank]):
            product = product if other is None else product + other
        whole.append(product)
    return _reduce_scatter(whole, ops, dim=dims[0])


def _convert(x: list[Tensor], dtypes: list[torch.dtype]) -> Values:
    kept = x[0].is_floating_point() and dtypes[0].is_floating_point
    return x if kept else [_widen(one.to(dtypes[0])) for one in x]


def _agree(groups: list[str], *_: Any) -> Values:
    """Nothing: all ranks run the same graph."""
    return [torch.empty(0)] * len(groups)


_DEFINITIONS: dict[Any, Callable[..., Values]] = {
    torch.ops.prims.convert_element_type.default: _convert,
    _FUSED.agree.default: _agree,
    _FUNCTIONAL.all_gather_into_tensor.default: _all_gather,
    _FUNCTIONAL.reduce_scatter_tensor.default: _reduce_scatter,
    _FUNCTIONAL.all_reduce.default: _all_reduce,
    _FUNCTIONAL.broadcast.default: _broadcast,
    _FUNCTIONAL.all_to_all_single.default: _all_to_all_single,
    _FUSED.all_gather_matmul.default: _all_gather_matmul,
    _FUSED.matmul_reduce_scatter.default: _matmul_reduce_scatter,
}


# ---------------------------------------------------------------- comparing two graphs


def assert_equivalent(before: GraphModule, after: GraphModule, world: int) -> None:
    """Both graphs make the same of random inputs."""
    rng = torch.Generator().manual_seed(0)
    placeholders = before.graph.find_nodes(op="placeholder")
    inputs = [[_random(node.meta.get("val"), rng) for _ in range(world)] for node in placeholders]
    assert _kinds(before) == _kinds(after)
    for one, other in zip(tree_leaves(run(before, inputs)), tree_leaves(run(after, inputs)), strict=True):
        if isinstance(one, Tensor):
            torch.testing.assert_close(other, one, rtol=1e-9, atol=1e-9)


def _kinds(module: GraphModule) -> list[object]:
    """Shape and dtype of all outputs."""
    values = [node.meta.get("val") for node in module.graph.output_node().all_input_nodes]
    return [
        (list(map(hint, one.shape)), one.dtype) if isinstance(one, Tensor) else type(one) for one in values
    ]


def hint(size: int | torch.SymInt) -> int:
    return size if isinstance(size, int) else int(size.node.hint)


def _random(value: Any, rng: torch.Generator) -> Any:
    if isinstance(value, Tensor):
        shape = [hint(size) for size in value.shape]
        if value.is_floating_point():
            return torch.randn(shape, generator=rng, dtype=torch.float64)
        return torch.randint(0, 2, shape, generator=rng).to(value.dtype)
    return hint(value) if isinstance(value, torch.SymInt) else value
