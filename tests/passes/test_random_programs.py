"""Random programs: the rewritten graph computes the same, and what is reported fused is gone from it.

FLUX_INDUCTOR_RANDOM_PROGRAMS says how many for each number of ranks (100 by default),
FLUX_INDUCTOR_RANDOM_SEED which is the first.
"""

from __future__ import annotations

import collections
import copy
import os
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch._inductor import config
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.post_grad import post_grad_passes, view_to_reshape
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from flux_inductor.passes.collectives import find_collectives
from flux_inductor.passes.decide import Setting
from flux_inductor.passes.pass_list import run_passes
from flux_inductor.passes.record import CollectiveRecord
from tests.passes import lockstep
from tests.passes.random_programs import make_program
from tests.passes.tracing import ALWAYS, cpu_topology, fake_group, short

PROGRAMS = int(os.environ.get("FLUX_INDUCTOR_RANDOM_PROGRAMS", "100"))
FIRST = int(os.environ.get("FLUX_INDUCTOR_RANDOM_SEED", "0"))
WORLDS = (2, 4)
SETTING = Setting(ALWAYS, cpu_topology)


@dataclass
class Rewritten:
    """One program: as it was traced, as Inductor left it, as the passes left it."""

    traced: GraphModule
    plain: GraphModule
    fused: GraphModule
    records: list[CollectiveRecord]


def rewrite(seed: int, world: int) -> Rewritten:
    run, program = make_program(seed, world)
    with FakeTensorMode() as mode:
        inputs = [mode.from_tensor(one) for one in program.inputs]
        traced = make_fx(run, decomposition_table=select_decomp_table())(*inputs)
        traced.graph.eliminate_dead_code()  # as AOTAutograd does
        view_to_reshape(traced)  # type: ignore[no-untyped-call, unused-ignore]
    work = copy.deepcopy(traced)
    plain: list[GraphModule] = []
    records: list[CollectiveRecord] = []

    def observed(graph: Graph) -> None:
        before = Graph()
        before.output(before.graph_copy(graph, {}))
        plain.append(GraphModule(work, before))
        records.extend(run_passes(graph, "inference 0", SETTING)[0])
        graph.lint()

    with V.set_fake_mode(mode), config.patch(post_grad_custom_post_pass=observed):
        post_grad_passes(work, is_inference=True)
    return Rewritten(traced, plain[0], GraphModule(work, work.graph), records)


def check(seed: int, world: int) -> list[CollectiveRecord]:
    result = rewrite(seed, world)
    rng = torch.Generator().manual_seed(seed)
    _, program = make_program(seed, world)
    inputs = [
        [torch.randn(one.shape, generator=rng, dtype=torch.float64) for _ in range(world)]
        for one in program.inputs
    ]
    eager, plain, fused = (
        lockstep.run(module, inputs) for module in (result.traced, result.plain, result.fused)
    )
    _assert_equal(plain, eager)
    _assert_equal(fused, eager)
    left = collections.Counter(record.op for record in result.records if not record.fused)
    still_there = collections.Counter(
        one.op for graph in _graphs(result.fused) for one in find_collectives(graph)
    )
    assert still_there == left, "reported as fused, but still in the graph:\n" + short(result.fused.graph)
    return result.records


def _graphs(module: GraphModule) -> list[Graph]:
    """With those of its submodules: one that is held back by a control dependency stands in one."""
    return [one.graph for one in module.modules() if isinstance(one, GraphModule)]


def _assert_equal(some: tuple[list[Tensor], ...], others: tuple[list[Tensor], ...]) -> None:
    for one, other in zip(some, others, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("world", WORLDS)
def test_programs(world: int) -> None:
    records: list[CollectiveRecord] = []
    for number in range(PROGRAMS // len(WORLDS)):
        seed = FIRST + number
        try:
            with fake_group(world):
                records += check(seed, world)
        except Exception as error:
            _, program = make_program(seed, world)
            shapes = [list(one.shape) for one in program.inputs]
            raise AssertionError(f"program {seed} on {world} ranks: {program.forms}, {shapes}") from error
    fused = sum(record.fused for record in records)
    reasons = collections.Counter(record.code for record in records if not record.fused)
    print(f"{world} ranks: {fused} of {len(records)} collectives fused; left: {dict(reasons)}")
    assert fused > 0.8 * len(records)
