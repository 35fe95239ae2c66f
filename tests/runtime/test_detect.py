"""A topology needs every rank's place: who never tells it is named. Ranks without common memory are apart."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import flux_inductor
from flux_inductor import ops  # noqa: F401  (registers the fused ops)
from flux_inductor.runtime import detect
from flux_inductor.runtime.detect import topology_of
from flux_inductor.runtime.engine import executions
from flux_inductor.runtime.errors import PeerTimeoutError
from flux_inductor.runtime.groups import name_of
from tests.support.ranks import run_ranks

SECONDS = 2


def _alone(rank: int, world: int) -> str:
    if rank == 1:
        time.sleep(2 * SECONDS)
        return ""
    group = dist.group.WORLD
    assert group is not None
    try:
        topology_of(group.group_name, "cpu")
    except PeerTimeoutError as error:
        return str(error)
    return "no error"


def test_a_rank_that_compiles_nothing_is_named() -> None:
    told, _ = run_ranks(_alone, 2, group_timeout=SECONDS)
    assert told.startswith("rank 1 compiled or called nothing fused within 2 s")
    assert "explain()" in told


def _apart(rank: int, world: int, what: str) -> None:
    if what == "hosts":
        detect.host_identity = lambda: f"host{rank}"  # type: ignore[assignment]
    else:
        detect.os.readlink = lambda path: f"pid:[{rank}]"  # type: ignore[attr-defined]
    group = name_of(None)
    assert topology_of(group, "cpu").nodes == 2
    nodes_of_gpus = len({place.partition("/")[0] for place in _places(world)})
    assert nodes_of_gpus == (2 if what == "hosts" else 1)

    x, weight = torch.full((4, 4), 1.0 + rank), torch.eye(4)
    expected = torch.cat([torch.full((4, 4), 1.0 + peer) for peer in range(world)])
    with flux_inductor.options(strategy="always"):
        chosen = flux_inductor.all_gather_matmul(x, weight)
    assert isinstance(chosen, torch.Tensor)
    assert torch.equal(chosen, expected)
    assert executions() == {("all_gather_matmul", "unfused"): 1}

    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("flux_inductor.runtime").addHandler(handler)
    for plan in ("mesh push chunk=4", "mesh pull chunk=2"):  # made for other ranks
        for _ in range(2):
            (whole,) = torch.ops.flux_inductor.all_gather_matmul(x, [weight], [], group, plan, 0, False)
            assert torch.equal(whole, expected)
            part = torch.ops.flux_inductor.matmul_reduce_scatter(
                expected, weight, None, None, group, plan, 0, "sum", 1.0
            )
            assert torch.equal(part, world * x)
    assert executions() == {("all_gather_matmul", "unfused"): 5, ("matmul_reduce_scatter", "unfused"): 4}
    (warning,) = warnings
    assert ("2 hosts" if what == "hosts" else "docker: --pid") in warning
    assert "TORCHINDUCTOR_CACHE_DIR" in warning


def _places(world: int) -> list[Any]:
    store = dist.distributed_c10d._get_default_store()  # type: ignore[attr-defined]
    return [store.get(f"flux_inductor/host/{peer}").decode() for peer in range(world)]


@pytest.mark.parametrize("what", ["hosts", "process namespaces"])
def test_ranks_that_cannot_share_memory_run_unfused(what: str) -> None:
    run_ranks(_apart, 2, what)
