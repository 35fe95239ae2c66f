"""Process groups that leave nothing to fuse: compiled all the same, with the reason in the report."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import flux_inductor
from flux_inductor.backend import flux_inductor as backend
from tests.backend.programs import fake_ranks, inputs, pair


def test_one_rank_has_nothing_to_overlap(tmp_path: Path) -> None:
    before = len(flux_inductor.report().records)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with flux_inductor.options(strategy="always", strict=True):
            x, up, _ = inputs()
            torch.testing.assert_close(torch.compile(pair, backend=backend)(x, up), x @ up)
    finally:
        dist.destroy_process_group()
    (record,) = flux_inductor.report().records[before:]
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


def test_without_any_process_group_plain_code_compiles() -> None:
    assert not dist.is_initialized()
    x, up, _ = inputs()
    torch.testing.assert_close(torch.compile(torch.mm, backend=backend)(x, up), x @ up)
