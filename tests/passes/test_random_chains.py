"""Random chains of views, cuts and concatenations between collective and matmul.

Whatever the chain, the rewritten graph must compute the same; and a chain that only moves whole rows in the
ranks' order must be fused.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._inductor.fx_passes.post_grad import view_to_reshape
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from flux_inductor.passes import pass_list
from flux_inductor.passes.chain import chain_of
from flux_inductor.passes.decide import Setting
from flux_inductor.passes.pass_list import run_passes
from tests.passes.lockstep import assert_equivalent
from tests.passes.programs import wait
from tests.passes.tracing import ALWAYS, cpu_topology, fake_group

WORLD, DEPTH, COLUMNS = 3, 4, 5
OTHER_GROUP = "1"
SETTING = Setting(ALWAYS, cpu_topology)

Step = Callable[[Tensor], Tensor]


@pytest.fixture(autouse=True, scope="module")
def _group() -> Iterator[None]:
    with fake_group(WORLD):
        assert dist.new_group(list(range(WORLD))).group_name == OTHER_GROUP
        yield


@dataclass(frozen=True)
class Chain:
    """Steps on a tensor [..., last].

    Args:
        text: what they do.
        plain: whether they only move whole rows, and put parts together as they were.
        dims: leading dims of the result.
    """

    steps: tuple[Step, ...]
    text: tuple[str, ...]
    plain: bool
    dims: int

    def __call__(self, value: Tensor) -> Tensor:
        for step in self.steps:
            value = step(value)
        return value

    def __repr__(self) -> str:
        return " -> ".join(self.text)


@st.composite
def chains(draw: st.DrawFn, shape: list[int], may_trim: bool) -> Chain:
    """Up to four steps that fit a tensor of leading dims `shape`."""
    steps: list[Step] = []
    text: list[str] = [str(shape)]
    plain = True
    for _ in range(draw(st.integers(0, 4))):
        kinds = ["permute", "reshape", "copy", "unsqueeze", "parts"] + (["trim"] if may_trim else [])
        kind = draw(st.sampled_from(kinds))
        dim = draw(st.integers(0, len(shape) - 1))
        size = shape[dim]
        if kind == "permute":
            order = draw(st.permutations(range(len(shape))))
            steps.append(partial(torch.permute, dims=(*order, len(order))))
            shape = [shape[one] for one in order]
        elif kind == "reshape":
            shape = draw(st.sampled_from(_shapes_of(math.prod(shape))))
            steps.append(partial(_reshaped, leading=tuple(shape)))
        elif kind == "unsqueeze":
            steps.append(partial(torch.unsqueeze, dim=dim))
            shape = [*shape[:dim], 1, *shape[dim:]]
        elif kind == "trim" and size > WORLD:
            steps.append(partial(torch.narrow, dim=dim, start=0, length=size - 1))
            shape = [*shape[:dim], size - 1, *shape[dim + 1 :]]
        elif kind == "parts" and size > 1:
            part = draw(st.integers(1, size))
            count = -(-size // part)
            order = draw(st.one_of(st.just(list(range(count))), st.permutations(range(count))))
            plain = plain and order == sorted(order)
            steps.append(partial(_rejoined, part=part, dim=dim, order=tuple(order)))
        else:
            steps.append(torch.clone)
        text.append(f"{kind} {shape}")
    return Chain(tuple(steps), tuple(text), plain, len(shape))


def _reshaped(value: Tensor, leading: tuple[int, ...]) -> Tensor:
    return value.reshape(*leading, value.shape[-1])


def _rejoined(value: Tensor, part: int, dim: int, order: tuple[int, ...]) -> Tensor:
    parts = torch.split(value, part, dim)
    return torch.cat([parts[one] for one in order], dim)


def _shapes_of(count: int) -> list[list[int]]:
    """Some leading dims of that many rows."""
    factors = [one for one in range(2, count) if count % one == 0]
    return [[count], [1, count], *([one, count // one] for one in factors)]


shapes = st.lists(st.integers(1, 3), min_size=1, max_size=2)


def _product(x: Tensor, w: Tensor, b: Tensor, added: str) -> Tensor:
    if added == "none":
        return x @ w
    return torch.addmm(b if added == "bias" else b.expand(x.shape[0], -1) * 2, x, w)


def check(program: Callable[..., Tensor | tuple[Tensor, ...]], *args: Tensor) -> bool:
    """Whether the program's collective was fused. Fails if the rewritten graph computes something else."""
    module = make_fx(program, tracing_mode="fake")(*args)
    view_to_reshape(module)  # type: ignore[no-untyped-call, unused-ignore]
    before = copy.deepcopy(module)
    ((record,), _) = run_passes(module.graph, "inference 0", SETTING)
    module.graph.lint()
    after = GraphModule(module, module.graph)
    assert_equivalent(before, after, WORLD)
    return record.fused


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.data(), shapes, st.booleans(), st.sampled_from(["none", "bias", "matrix"]))
def test_gather(data: st.DataObject, shape: list[int], returned: bool, added: str) -> None:
    dim = data.draw(st.integers(0, len(shape) - 1), "gathered dim")
    world_order = list(range(WORLD))
    order = data.draw(st.one_of(st.just(world_order), st.permutations(world_order)), "order of shards")
    whole = [*shape]
    whole[dim] *= WORLD
    chain = data.draw(chains(whole, may_trim=True), "chain")

    def program(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        raw = wait(torch.ops._c10d_functional.all_gather_into_tensor(x, WORLD, "0"))
        parts = torch.split(raw, x.shape[0])
        value = chain(raw if dim == 0 and order == world_order else torch.cat([parts[r] for r in order], dim))
        product = _product(value.reshape(-1, DEPTH), w, b, added)
        return (product, value.relu()) if returned else (product,)

    fused = check(program, torch.randn(*shape, DEPTH), torch.randn(DEPTH, COLUMNS), torch.randn(COLUMNS))
    assert fused or not (chain.plain and order == world_order)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    st.data(),
    shapes,
    st.sampled_from(["none", "bias", "matrix"]),
    st.booleans(),
    st.sampled_from(["sum", "avg"]),
)
def test_scatter(data: st.DataObject, shape: list[int], added: str, summed: bool, op: str) -> None:
    shape = [size * WORLD for size in shape]
    chain = data.draw(chains(shape, may_trim=False), "chain")
    dim = data.draw(st.integers(0, chain.dims), "scattered dim")
    world_order = list(range(WORLD))
    order = data.draw(st.one_of(st.just(world_order), st.permutations(world_order)), "order of parts")

    def program(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        product = _product(x.reshape(-1, DEPTH), w, b, added)
        value = chain(product.reshape(*shape, COLUMNS * WORLD))
        if summed:
            value = value * 0.5 + chain(x.sum(-1, keepdim=True).expand(*shape, COLUMNS * WORLD)).relu()
        cut = dim if value.shape[dim] % WORLD == 0 else value.dim() - 1
        parts = torch.split(value, value.shape[cut] // WORLD, cut)
        value = torch.cat([parts[r] for r in order])
        return wait(torch.ops._c10d_functional.reduce_scatter_tensor(value, op, WORLD, "0"))

    columns = COLUMNS * WORLD
    fused = check(program, torch.randn(*shape, DEPTH), torch.randn(DEPTH, columns), torch.randn(columns))
    assert fused or not (chain.plain and order == world_order)


# ---------------------------------------------------------------- one order of all that communicates


@dataclass(frozen=True)
class Mix:
    """A program of collectives of two groups, in random order, some with matmuls far from them.

    Args:
        steps: each "gather", "multiply" (one that was gathered earlier), "scatter" or "all_reduce", and which
            of the values so far it takes, for its operand and its weight.
    """

    steps: tuple[tuple[str, int, int], ...]

    def __call__(self, x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        """All values are [WORLD * DEPTH, DEPTH]; weights [DEPTH, DEPTH] are inputs, or made of values."""
        collective, values, gathered = torch.ops._c10d_functional, [x], [x]
        for number, (kind, operand, weight) in enumerate(self.steps):
            value = values[operand % len(values)]
            group = "0" if number % 3 else OTHER_GROUP
            if kind == "gather":
                gathered.append(wait(collective.all_gather_into_tensor(value[:DEPTH].relu(), WORLD, group)))
            elif kind == "multiply":
                made = values[weight % len(values)][:DEPTH].sin() if weight % 3 == 0 else w.cos()
                values.append(gathered[operand % len(gathered)] @ made)
            elif kind == "scatter":
                part = wait(collective.reduce_scatter_tensor(value @ w.cos(), "sum", WORLD, group))
                values.append(part.repeat(WORLD, 1))
            else:
                values.append(wait(collective.all_reduce(value, "sum", group)))
        return (*values, *gathered)


mixes = st.lists(
    st.tuples(
        st.sampled_from(["gather", "gather", "multiply", "multiply", "scatter", "all_reduce"]),
        st.integers(0, 9),
        st.integers(0, 9),
    ),
    min_size=4,
    max_size=14,
).map(lambda steps: Mix(tuple(steps)))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(mixes)
def test_order_of_collectives(mix: Mix) -> None:
    """That of the unfused program, but for fused gathers whose weights need a later collective."""
    module = make_fx(mix, tracing_mode="fake")(torch.randn(WORLD * DEPTH, DEPTH), torch.randn(DEPTH, DEPTH))
    view_to_reshape(module)  # type: ignore[no-untyped-call, unused-ignore]
    module.graph.eliminate_dead_code()
    before = copy.deepcopy(module)
    orders: list[tuple[list[Node], list[Node]]] = []

    def seen(graph: Graph, sequence: list[Node], fused: set[Node]) -> list[Node]:
        chain = chain_of(graph, sequence, fused)
        late = {
            node
            for number, node in enumerate(sequence)
            if node in fused and ancestors(node) & set(sequence[number + 1 :])
        }
        orders.append(
            ([one for one in sequence if one not in late], [one for one in chain if one not in late])
        )
        return chain

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pass_list, "chain_of", seen)
        records, _ = run_passes(module.graph, "inference 0", SETTING)
    module.graph.lint()
    assert_equivalent(before, GraphModule(module, module.graph), WORLD)
    assert len(orders) == bool(records)
    assert all(unfused == fused for unfused, fused in orders)


def ancestors(node: Node) -> set[Node]:
    found: set[Node] = set()
    pending = [node]
    while pending:
        sources = set(pending.pop().all_input_nodes) - found
        found |= sources
        pending.extend(sources)
    return found
