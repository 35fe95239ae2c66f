"""Process groups that leave nothing to fuse: compiled all the same, with the reason in the report."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import flux_inductor
from flux_inductor.backend import flux_inductor as backend
from flux_inductor.passes.record import CollectiveRecord
from tests.backend.programs import fake_ranks, inputs, pair
from tests.ranks import run_ranks


def _compile(fn: Callable[..., Tensor], *args: Tensor) -> CollectiveRecord:
    before = len(flux_inductor.report().records)
    with flux_inductor.options(strategy="always"):
        torch.compile(fn, backend=backend, dynamic=False)(*args)
    (record,) = flux_inductor.report().records[before:]
    return record


def test_one_rank_has_nothing_to_overlap() -> None:
    with fake_ranks(1):
        record = _compile(pair, *inputs()[:2])
    assert (record.fused, record.code) == (False, "one-rank")


def _gather_in(group: str, world: int) -> Callable[..., Tensor]:
    def fn(x: Tensor, weight: Tensor) -> Tensor:
        shards = torch.ops._c10d_functional.all_gather_into_tensor(x, world, group)
        whole: Tensor = torch.ops._c10d_functional.wait_tensor(shards)
        return whole @ weight

    return fn


@pytest.mark.parametrize("group", ["of others", "nowhere"])
def test_a_group_that_this_rank_is_not_in_fails_as_it_does_without_us(group: str) -> None:
    errors = []
    with fake_ranks(4):
        dist.new_group([1, 2], group_desc="of others")
        for compiler in ("inductor", backend):
            with pytest.raises(Exception, match=group) as error:
                torch.compile(_gather_in(group, 2), backend=compiler)(*inputs()[:2])
            errors.append((type(error.value), str(error.value)))
    assert errors[0] == errors[1]


def _in_own_group(rank: int, world: int) -> tuple[bool, str]:
    groups = [dist.new_group([one]) for one in range(world)]
    x, up, _ = inputs(rank)
    fn = _gather_in(groups[rank].group_name, 1)
    record = _compile(fn, x, up)
    torch.testing.assert_close(torch.compile(fn, backend=backend)(x, up), x @ up)
    return record.fused, record.code


def test_each_rank_alone_in_its_group_computes_its_own_product() -> None:
    assert run_ranks(_in_own_group, 2, timeout=120) == [(False, "one-rank")] * 2


def test_without_any_process_group_plain_code_compiles() -> None:
    assert not dist.is_initialized()
    x = torch.arange(4.0)
    torch.testing.assert_close(torch.compile(torch.square, backend=backend)(x), x.square())
