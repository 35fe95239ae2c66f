"""The collectives of a graph: which nodes they are, over which group, and what waits for them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist
from torch.fx import Graph, Node

from flux_inductor.passes.reasons import Reason

_FUNCTIONAL = torch.ops._c10d_functional
ALL_GATHER = _FUNCTIONAL.all_gather_into_tensor.default
REDUCE_SCATTER = _FUNCTIONAL.reduce_scatter_tensor.default
WAIT = _FUNCTIONAL.wait_tensor.default
_NAMES = {
    ALL_GATHER: "all_gather",
    REDUCE_SCATTER: "reduce_scatter",
    _FUNCTIONAL.all_reduce.default: "all_reduce",
}
_NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd", "c10d", "symm_mem")
_NO_COLLECTIVES = ("mesh_get_process_group",)


@dataclass(frozen=True)
class Collective:
    """One collective of the graph.

    Args:
        node: the node that starts it.
        op: "all_gather", "reduce_scatter", "all_reduce", or the op's own name.
        group: the group's name, or why the node's group has none that this rank may use.
        world: ranks of the group, 0 if unknown.
    """

    node: Node
    op: str
    group: str | Reason
    world: int

    @property
    def waits(self) -> list[Node]:
        return [user for user in self.node.users if user.target is WAIT]


def merge_waits(graph: Graph) -> None:
    """Leaves the first of several waits for one collective: the others give the same tensor."""
    first: dict[object, Node] = {}
    for node in graph.find_nodes(op="call_function", target=WAIT):
        kept = first.setdefault(node.args[0], node)
        if kept is not node:
            node.replace_all_uses_with(kept)
            graph.erase_node(node)


def find_collectives(graph: Graph) -> Iterator[Collective]:
    """Every collective, in the order of the graph. A wait counts if its collective is in another graph."""
    for node in graph.nodes:
        if node.target is WAIT:
            if node.args[0].op == "placeholder":
                yield Collective(node, "wait_tensor", "", 0)
        elif (name := _name(node)) is not None:
            group = _group(node)
            yield Collective(node, name, group, _world(node, group))


def _name(node: Node) -> str | None:
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return None
    if node.target in _NAMES:
        return _NAMES[node.target]
    packet = node.target._schema.name.split("::")
    if packet[0] not in _NAMESPACES or packet[1] in _NO_COLLECTIVES:
        return None
    return packet[1]


def _argument(node: Node, names: tuple[str, ...]) -> object:
    """The argument of the first of those names in the op's schema, or None."""
    assert isinstance(node.target, torch._ops.OpOverload)
    for position, argument in enumerate(node.target._schema.arguments):
        if argument.name in names:
            return node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
    return None


def _group(node: Node) -> str | Reason:
    group = _argument(node, ("group_name", "group", "process_group"))
    if isinstance(group, str):
        return group if _contains_this_rank(group) else Reason("group", f"group {group!r} lacks this rank")
    value = group.meta.get("val") if isinstance(group, Node) else group
    if not isinstance(value, dist.ProcessGroup):
        return Reason("group", "the graph does not say which process group it is")
    # A program that is compiled for any rank holds its group as a value. A name can stand for it only if the
    # group bears it on every rank: sub-groups are named apart.
    if value.size() != dist.get_world_size():
        return Reason(
            "group",
            f"the program is compiled for any rank (compile_on_one_rank), and its group of {value.size()} of "
            f"{dist.get_world_size()} ranks has another name on each",
        )
    return str(value.group_name)


def _contains_this_rank(name: str) -> bool:
    try:
        return _resolve(name).rank() >= 0
    except (RuntimeError, ValueError, KeyError):
        return False


def _resolve(name: str) -> dist.ProcessGroup:
    return c10d._resolve_process_group(name)  # type: ignore[arg-type, unused-ignore]


def _world(node: Node, group: str | Reason) -> int:
    size = _argument(node, ("group_size",))
    if isinstance(size, int):
        return size
    return _resolve(group).size() if isinstance(group, str) and group else 0
