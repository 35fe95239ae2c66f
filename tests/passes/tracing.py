"""Runs the passes on small programs as Inductor does, but for its code generation, which takes seconds."""

from __future__ import annotations

import contextlib
import operator
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import detect_fake_mode
from torch._inductor import config
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.control_dependencies import control_deps
from torch._inductor.fx_passes.post_grad import post_grad_passes, view_to_reshape
from torch._inductor.virtualized import V
from torch.fx import Graph, GraphModule, Node
from torch.testing._internal.distributed.fake_pg import FakeStore

import flux_inductor.ops  # noqa: F401  (registers the ops)
from flux_inductor.options import Options
from flux_inductor.passes.agreement import AGREE
from flux_inductor.passes.fusion_pass import FusionPass
from flux_inductor.passes.pass_list import PassRun
from flux_inductor.passes.record import CollectiveRecord
from flux_inductor.planning.topology import Topology
from flux_inductor.runtime.torch_private import process_group
from tests.passes.lockstep import assert_equivalent, hint
from tests.support.installations import EVERYWHERE

ALWAYS = Options(strategy="always")


@contextlib.contextmanager
def fake_group(world: int = 2) -> Iterator[dist.ProcessGroup]:
    """A default group of `world` ranks that only pretends to communicate."""
    os.environ["FLUX_INDUCTOR_ENGINE"] = "reference"  # the only one that can pretend too
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()
        del os.environ["FLUX_INDUCTOR_ENGINE"]


def cpu_topology(group: str, device: str) -> Topology:
    ranks = process_group(group).size()
    return Topology("cpu" if device == "cpu" else "cuda", ranks, link="shm" if device == "cpu" else "nvlink")


@dataclass
class Traced:
    """A program whose graphs went through the passes.

    Args:
        call: compiles it, and pretends to run it.
        before, after: each graph as the fusion pass got it, and as it left it.
        records: of all collectives, in the order of the graphs.
        runs: what each pass did in each graph.
    """

    call: Callable[..., Any]
    before: list[GraphModule] = field(default_factory=list)
    after: list[GraphModule] = field(default_factory=list)
    records: list[CollectiveRecord] = field(default_factory=list)
    runs: list[PassRun] = field(default_factory=list)

    @property
    def fates(self) -> str:
        """For each collective "fused", or why not."""
        return " ".join(record.code or "fused" for record in self.records)

    @property
    def text(self) -> str:
        """The rewritten graphs in a short form."""
        return "\n--\n".join(short(module.graph) for module in self.after)

    def keep(self, graphs: list[GraphModule], graph: Graph) -> None:
        copy = Graph()
        copy.output(copy.graph_copy(graph, {}))
        assert graph.owning_module is not None
        graphs.append(GraphModule(graph.owning_module, copy))


def prepared(fn: Callable[..., Any], options: Options = ALWAYS, *, pretend: bool = True) -> Traced:
    """`fn`, to be compiled when it is called. It pretends to run, or runs its graphs node by node."""
    result = Traced(fn)
    fusion = FusionPass(options, None, result.records.extend, cpu_topology, EVERYWHERE)

    def observed(graph: Graph) -> None:
        result.keep(result.before, graph)
        fusion(graph)
        result.runs = fusion.runs
        graph.lint()
        result.keep(result.after, graph)

    def compiler(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        fake_mode = detect_fake_mode(example_inputs)
        with V.set_fake_mode(fake_mode), config.patch(post_grad_custom_post_pass=observed):
            view_to_reshape(gm)  # type: ignore[no-untyped-call, unused-ignore]
            post_grad_passes(gm, is_inference=False)
        runnable = _pretended(result.after[-1].graph) if pretend else gm.forward
        return make_boxed_func(runnable)  # type: ignore[no-any-return, no-untyped-call, unused-ignore]

    backend = aot_autograd(
        fw_compiler=compiler,
        bw_compiler=compiler,
        decompositions=select_decomp_table(),
        partition_fn=min_cut_rematerialization_partition,
    )
    torch._dynamo.reset()
    result.call = torch.compile(fn, backend=backend, fullgraph=True)
    return result


def _pretended(graph: Graph) -> Callable[..., Any]:
    """Instead of running the graph: outputs of the right kind, so that a backward is compiled too."""
    placeholders = graph.find_nodes(op="placeholder")
    (outputs,) = graph.output_node().args
    assert isinstance(outputs, (list, tuple))

    def run(*inputs: Any) -> list[Any]:
        given = dict(zip(placeholders, inputs, strict=True))
        return [given[one] if one in given else _blank(one) for one in outputs]

    return run


def _blank(output: Any) -> Any:
    value = output.meta["val"] if isinstance(output, Node) else output
    if isinstance(value, torch.Tensor):
        return torch.zeros([hint(size) for size in value.shape], dtype=value.dtype)
    return hint(value) if isinstance(value, torch.SymInt) else value


def trace(fn: Callable[..., Any], *args: Any, options: Options = ALWAYS) -> Traced:
    """`fn` compiled for these arguments, and its backward if a result needs gradients.

    Every rewritten graph is checked to compute what it did before.
    """
    result = prepared(fn, options)
    outputs = result.call(*args)
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else outputs
    wanted = [output for output in outputs if output.requires_grad]
    if wanted:
        torch.autograd.backward(wanted, [torch.ones_like(output) for output in wanted])
    for before, after in zip(result.before, result.after, strict=True):
        if short(before.graph) != short(after.graph):
            assert_equivalent(before, after, dist.get_world_size())
    return result


# ---------------------------------------------------------------- short printed form


def short(graph: Graph) -> str:
    """The graph's calls, a line each, as `name [shape] = op(arguments)`; names are counted per graph."""
    names: dict[Node, str] = {}
    lines: list[str] = []
    for node in graph.nodes:
        if node.op == "placeholder":
            names[node] = f"in{sum(name.startswith('in') for name in names.values())}"
        elif node.op == "call_function" and node.users and node.target is not AGREE:
            names[node] = f"v{len(lines)}"
            lines.append(f"{names[node]}{_shape(node)} = {_call(node, names)}")
        elif node.op == "output":
            lines.append(f"return {_text(node.args[0], names)}")
    return "\n".join(lines)


def _shape(node: Node) -> str:
    value = node.meta.get("val")
    return f" [{','.join(map(str, value.shape))}]" if isinstance(value, torch.Tensor) else ""


def _call(node: Node, names: dict[Node, str]) -> str:
    if node.target is operator.getitem:
        return f"{_text(node.args[0], names)}[{node.args[1]}]"
    if node.target is control_deps:
        before, subgraph = node.args[:2]
        assert isinstance(subgraph, Node)
        module = getattr(node.graph.owning_module, str(subgraph.target))
        inner = next(one for one in module.graph.nodes if one.op == "call_function")
        placeholders = module.graph.find_nodes(op="placeholder")
        arguments = [names[one] for one in node.args[2:] if isinstance(one, Node)]
        inside = dict(zip(placeholders, arguments, strict=True))
        assert isinstance(before, (list, tuple))
        named = [one for one in before if one in names]  # what tells other ranks of the graph has no name
        order = f"after {_text(named, names)}: " if named else ""
        return order + _call(inner, inside)
    name = getattr(node.target, "_opname", None) or getattr(node.target, "__name__", str(node.target))
    parts = [_text(argument, names) for argument in node.args]
    if isinstance(node.target, torch._ops.OpOverload):
        hidden = {"group", "group_name", "plan", "place"}  # not what these tests are about
        schema = node.target._schema.arguments
        parts = [
            part
            for part, one in zip(parts, schema, strict=False)
            if one.name not in hidden and (one.name, part) != ("out_dtype", "None")
        ]
    parts += [f"{key}={_text(value, names)}" for key, value in node.kwargs.items()]
    return f"{name}({', '.join(parts)})"


def _text(value: object, names: dict[Node, str]) -> str:
    if isinstance(value, Node):
        return names.get(value, str(value.target))
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_text(one, names) for one in value)}]"
    if isinstance(value, str):
        return f'"{value}"'
    return str(value)
