"""New nodes with the metadata that later steps want, and the removal of those that they replace."""

from __future__ import annotations

from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from flux_inductor.passes.collectives import WAIT
from flux_inductor.passes.sizes import same

_ORIGIN = ("stack_trace", "nn_module_stack", "source_fn_stack")


def call(anchor: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
    """A call of `target` just before `anchor`, with its fake result and the origin of `anchor`."""
    with anchor.graph.inserting_before(anchor):
        node = anchor.graph.call_function(target, args, kwargs)
    node.meta.update({key: anchor.meta[key] for key in _ORIGIN if key in anchor.meta})
    with enable_python_dispatcher():
        values = map_arg((args, kwargs), lambda argument: argument.meta["val"])
        node.meta["val"] = target(*values[0], **values[1])
    return node


def with_strides_of(anchor: Node, value: Node, model: Node) -> Node:
    """`value`, or a contiguous copy of it if it has other strides than `model`, whose place it takes.

    Contiguous is what results of matmuls are; later nodes may rely on it.
    """
    if same(value.meta["val"].stride(), model.meta["val"].stride()):
        return value
    return call(anchor, torch.ops.aten.clone.default, value, memory_format=torch.contiguous_format)


def size_argument(anchor: Node, tensor: Node, dim: int) -> int | Node:
    """The size of a dim as an argument of a node: a number, or a node before `anchor` that makes it."""
    shape = tensor.meta["val"].shape
    size, dim = shape[dim], dim % len(shape)
    return size if isinstance(size, int) else call(anchor, torch.ops.aten.sym_size.int, tensor, dim)


def set_argument(op: Node, name: str, value: Any) -> None:
    """Gives a call of an op an argument, by its name in the schema; those before it get their defaults."""
    schema = op.target._schema.arguments  # type: ignore[union-attr]
    (position,) = (number for number, argument in enumerate(schema) if argument.name == name)
    missing = [argument.default_value for argument in schema[len(op.args) : position + 1]]
    op.args = (*op.args, *missing)
    op.update_arg(position, value)


def erase_unused(graph: Graph, nodes: list[Node]) -> None:
    """Removes those of `nodes` that nobody uses, then their inputs that nobody uses any more.

    Waits go too: they count as side effects, so the elimination of dead code would keep them, but the wait
    for a collective that is no longer in the graph waits for nothing.
    """
    pending = list(nodes)
    erased: set[Node] = set()
    while pending:
        node = pending.pop()
        if node in erased or node.users or node.op in ("placeholder", "output"):
            continue
        if node.is_impure() and node.target is not WAIT:
            continue
        inputs = node.all_input_nodes
        graph.erase_node(node)
        erased.add(node)
        pending.extend(inputs)
