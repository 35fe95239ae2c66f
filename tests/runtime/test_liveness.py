"""A rank that ends before the group's first fused call is missed soon, not when the timeout has passed."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress

import torch
import torch.distributed as dist

from flux_inductor.planning.plan import Plan
from flux_inductor.runtime import errors, groups, liveness
from flux_inductor.runtime.cpu import CpuEngine
from flux_inductor.runtime.cpu_group import CpuGroup
from tests.support.engines import all_gather_matmul
from tests.support.ranks import run_ranks

QUICK_S = 5.0  # far below the timeout of the groups here


def _gather() -> None:
    plan = Plan("mesh", "push", 4)
    all_gather_matmul(CpuEngine(), torch.ones(4, 4), [torch.ones(4, 4)], [], "0", plan, 0, False)


def _survive(rank: int, world: int) -> tuple[str, float]:
    liveness.publish_process()
    dist.barrier()
    if rank == 1:
        os._exit(1)
    start = time.monotonic()
    try:
        _gather()
    except errors.PeerLostError as error:
        return str(error), time.monotonic() - start
    raise AssertionError("no error")


def test_a_rank_that_ended_before_the_first_call() -> None:
    message, seconds = run_ranks(_survive, 2, dying=[1])[0]
    assert "all_gather_matmul on rank 0 of group '0': the process of rank 1 has ended" in message
    assert seconds < QUICK_S


def _close_beside_a_call(rank: int, world: int) -> float:
    """Rank 0 waits in a thread for a call that rank 1 never makes, and gives the group up meanwhile."""
    if rank == 1:
        dist.barrier()
        return 0.0

    def call() -> None:
        with suppress(errors.FusedOpError):
            _gather()

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    while not groups.state_of("0", CpuGroup).lock.locked():
        time.sleep(0.01)
    start = time.monotonic()
    groups.close_all()
    seconds = time.monotonic() - start
    dist.barrier()
    return seconds


def test_closing_does_not_wait_for_a_call_in_another_thread() -> None:
    assert run_ranks(_close_beside_a_call, 2)[0] < QUICK_S
