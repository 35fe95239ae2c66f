"""A rank that fails before it has begun a call: its peers do not take its next call for this one."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from flux_inductor import ops  # noqa: F401  (registers the fused ops)
from flux_inductor.runtime import errors
from flux_inductor.runtime.groups import name_of
from tests.support.ranks import run_ranks

QUICK_S = 1.0  # far below the timeout of the groups here
OPS = torch.ops.flux_inductor
PLANS = ("mesh push chunk=4", "mesh pull chunk=4")


def fresh_group(**options: Any) -> dist.ProcessGroup:
    group = dist.new_group(timeout=timedelta(seconds=20), **options)
    assert isinstance(group, dist.ProcessGroup)
    return group


def gather(group: str, plan: str, batch: int) -> float:
    (whole,) = OPS.all_gather_matmul(
        torch.full((8, 4), 1.0 + batch), [torch.eye(4)], [], group, plan, 0, False
    )
    return float(whole.min() + whole.max()) / 2


def scatter(group: str, plan: str, batch: int) -> float:
    x = torch.full((12, 4), 1.0 + batch)
    part = OPS.matmul_reduce_scatter(x, torch.eye(4), None, None, group, plan, 0, "avg", 1.0)
    return float(part.min() + part.max()) / 2


def no_memory(*_: object, **__: object) -> Tensor:
    raise torch.OutOfMemoryError("no memory (simulated)")


@contextmanager
def failing_allocation() -> Iterator[None]:
    """Of the result, before the call begins."""
    with mock.patch.object(torch.Tensor, "new_empty", no_memory):
        yield


@contextmanager
def failing_scratch() -> Iterator[None]:
    """Of the memory that the engine keeps from call to call."""
    with mock.patch("flux_inductor.runtime.cpu_group.CpuGroup._reserve_scratch", no_memory):
        yield


@contextmanager
def failing_view() -> Iterator[None]:
    """Of the workspace, after the call has begun."""
    with mock.patch("flux_inductor.runtime.cpu_group.CpuGroup.buffer", no_memory):
        yield


def out_of_memory(rank: int, world: int) -> None:
    """One rank fails in batch 2 and goes on with batch 3, as a program does that skips what is too large."""
    failures = (failing_allocation, failing_scratch, failing_view)
    for plan in PLANS:
        for op in (gather, scatter):
            for warm in (0, 1, 3):
                for failure in failures if warm else failures[:2]:
                    skips(rank, world, op, plan, warm, failure)


def skips(
    rank: int, world: int, op: Callable[..., float], plan: str, warm: int, failure: Callable[[], Any]
) -> None:
    group = name_of(fresh_group())
    for batch in range(warm):
        assert op(group, plan, batch) == 1 + batch
    dist.barrier()
    start = time.monotonic()
    if rank == world - 1:
        with failure(), pytest.raises(torch.OutOfMemoryError):
            op(group, plan, warm)
        with pytest.raises(errors.DeadGroupError, match="OutOfMemoryError: no memory"):
            op(group, plan, warm + 1)
    else:
        with pytest.raises(errors.FusedOpError, match="OutOfMemoryError: no memory"):
            op(group, plan, warm)
        with pytest.raises(errors.DeadGroupError):
            op(group, plan, warm + 1)
    assert time.monotonic() - start < QUICK_S, (op, plan, warm, failure)


def refused(rank: int, world: int) -> None:
    """A mistake that all ranks make harms nobody; one that a single rank makes is told from its next call."""
    for plan in PLANS:
        for op in (gather, scatter):
            group = name_of(fresh_group())
            assert op(group, plan, 0) == 1
            with pytest.raises(ValueError, match="at least two dims"):
                OPS.all_gather_matmul(torch.ones(4), [torch.eye(4)], [], group, plan, 0, False)
            assert op(group, plan, 1) == 2
            if rank == 0:
                with pytest.raises(ValueError, match="at least two dims"):
                    OPS.all_gather_matmul(torch.ones(4), [torch.eye(4)], [], group, plan, 0, False)
            with pytest.raises(errors.MismatchError, match="calls refused before: 2"):
                op(group, plan, 2)


@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_that_fails_before_a_call_ends_the_group_on_all(world: int) -> None:
    run_ranks(out_of_memory, world, timeout=120)


def test_a_call_that_one_rank_refuses_is_never_taken_for_the_next() -> None:
    run_ranks(refused, 2)


def made_anew(rank: int, world: int) -> None:
    """After a failure that one rank alone has seen. The program still holds the old group, or does not."""
    held = []
    for turn in range(4):
        group = fresh_group(ranks=list(range(world)), use_local_synchronization=True)
        name = name_of(group)
        if rank == turn % world:  # the others do something else
            with failing_allocation(), pytest.raises(torch.OutOfMemoryError):
                gather(name, PLANS[0], 0)
        dist.barrier()
        dist.destroy_process_group(group)
        if turn < 2:
            held.append(group)
        del group
        gc.collect()
        forget_addresses(rank, world, name)
        group = fresh_group(ranks=list(range(world)), use_local_synchronization=True)
        assert name_of(group) == name
        for batch in range(3):
            for plan in PLANS:
                assert gather(name, plan, batch) == scatter(name, plan, batch) == 1 + batch
        dist.barrier()
        dist.destroy_process_group(group)
        forget_addresses(rank, world, name)


def forget_addresses(rank: int, world: int, name: str) -> None:
    """Else gloo may connect to a peer's address in the group that was destroyed."""
    store = dist.distributed_c10d._get_default_store()  # type: ignore[attr-defined]
    dist.barrier()
    if rank == 0:
        for peer in range(world):
            assert store.delete_key(f"{name}//cpu//0/{peer}")
    dist.barrier()


def test_a_group_that_one_rank_alone_has_used_can_be_made_anew() -> None:
    run_ranks(made_anew, 2)
