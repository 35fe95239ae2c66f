"""When eager calls take it that plain collectives may be in flight beside them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import flux_inductor
from flux_inductor import auto_plan
from flux_inductor.planning.architectures import KINDS
from flux_inductor.planning.plan import parse_plan
from flux_inductor.planning.topology import Topology
from flux_inductor.runtime import torch_private
from flux_inductor.runtime.groups import name_of
from flux_inductor.runtime.plain_collectives import communicators_seen
from tests.support.ranks import run_ranks


def _gloo_counts(patch: pytest.MonkeyPatch) -> None:
    """gloo in the place of NCCL, whose counter has the same name."""

    def counter(group: dist.ProcessGroup) -> Callable[[], int]:
        backend = group._get_backend(torch.device("cpu"))
        start = backend._get_sequence_number_for_group()  # type: ignore[attr-defined]
        return lambda: backend._get_sequence_number_for_group() - start  # type: ignore[attr-defined]

    known: dict[dist.ProcessGroup, Callable[[], int]] = {}
    patch.setattr(torch_private, "collective_counter", lambda group: known.setdefault(group, counter(group)))


def _seen(rank: int, world: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        _gloo_counts(patch)
        pair, all_ranks = dist.new_group([0, 1]), dist.new_group()
        rest = dist.new_group([0, 2])
        name, value = name_of(pair) if rank < 2 else "", torch.ones(4)
        if rank < 2:
            assert communicators_seen(name) == 0
        if rank != 1:
            dist.all_reduce(value, group=rest)  # of other ranks: the topology tells
        if rank < 2:
            assert communicators_seen(name) == 0
        dist.all_reduce(value, group=all_ranks)
        if rank < 2:
            assert communicators_seen(name) == 1
            dist.all_reduce(value, group=pair)
            assert communicators_seen(name) == 2
        dist.all_reduce(value)
        if rank < 2:
            assert communicators_seen(name) == 2


def test_collectives_of_all_ranks_of_a_group_are_seen() -> None:
    run_ranks(_seen, 3)


def _later_group(rank: int, world: int) -> None:
    """One that is made after the op was called first."""
    with pytest.MonkeyPatch.context() as patch:
        _gloo_counts(patch)
        name = name_of(None)
        assert communicators_seen(name) == 0
        later = dist.new_group()
        assert communicators_seen(name) == 0
        dist.all_reduce(torch.ones(4), group=later)
        assert communicators_seen(name) == 1


def test_collectives_of_a_group_made_later_are_seen() -> None:
    run_ranks(_later_group, 2)


def _plans(rank: int, world: int) -> None:
    """What was planned without a reserve is planned anew; an explicit option wins."""
    x, weight = torch.ones(8, 16), torch.ones(16, 8)
    planned: list[int | None] = []

    def choose(
        problem: object, topology: Topology, strategy: str, *, installed: object, reserve: int | None
    ) -> SimpleNamespace:
        planned.append(reserve)
        return SimpleNamespace(plan=parse_plan("unfused"))  # which runs a collective of its own

    def product() -> Tensor:
        result = flux_inductor.all_gather_matmul(x, weight)
        assert isinstance(result, Tensor)
        return result

    with pytest.MonkeyPatch.context() as patch:
        _gloo_counts(patch)
        patch.setattr(auto_plan, "choose", choose)
        patch.setattr(auto_plan, "_architecture", lambda device: KINDS["cuda"])
        product()
        product()
        assert planned == [None]
        dist.all_reduce(torch.ones(4))
        product()
        product()
        assert planned == [None, 8]
        with flux_inductor.options(reserve_sms=2):
            product()
        assert planned == [None, 8, 2]


def test_a_plan_is_made_anew_once_there_are_plain_collectives() -> None:
    run_ranks(_plans, 2)
