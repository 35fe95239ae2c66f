"""A topology needs every rank's host: one that never tells it is named."""

from __future__ import annotations

import time

import torch.distributed as dist

from flux_inductor.runtime.detect import topology_of
from flux_inductor.runtime.errors import PeerTimeoutError
from tests.ranks import run_ranks

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
