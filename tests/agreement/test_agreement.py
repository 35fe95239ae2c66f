"""Ranks that differ as they legally may: no wait without end, right values, and fused where all can fuse."""

from __future__ import annotations

import os
import re
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

import flux_inductor
from flux_inductor.runtime import errors
from flux_inductor.runtime.agreement import Agreement
from flux_inductor.runtime.groups import state_of
from flux_inductor.runtime.torch_private import default_store
from tests.agreement import programs
from tests.support.ranks import run_ranks

# Calls of engines on rank 0 and on rank 1.
Ran = tuple[dict[str, int], dict[str, int]]
FUSED: Ran = ({"cpu": 1}, {"cpu": 1})
CASES: dict[str, tuple[Any, Ran]] = {
    "columns": (lambda rank: programs.columns(rank, (40, 39), "always"), FUSED),
    "columns by cost": (
        lambda rank: programs.columns(rank, (2048, 16), "auto", 256, 256),
        ({}, {"unfused": 1}),
    ),
    "columns of 313": (lambda rank: programs.columns(rank, (157, 156), "auto"), ({}, {})),
    "depth": (lambda rank: programs.depth(rank, (35, 34), "always"), FUSED),
    "no depth": (lambda rank: programs.depth(rank, (32, 0), "always"), ({"unfused": 1}, {})),
    "opposite gathers": (programs.two_gathers, ({"unfused": 1}, {"unfused": 1})),
    "kept by one": (programs.keeps, FUSED),
    "graph breaks of one": (programs.breaks, ({"cpu": 1, "unfused": 1}, {"cpu": 1})),
    "recompiled by one": (programs.recompiles, ({"cpu": 4}, {"cpu": 4})),
    "layers in one graph and in several": (programs.layers, ({"cpu": 6}, {"cpu": 6})),
    "empty shard": (programs.empty_shard, ({"unfused": 1}, {})),
    "chunks of another plan": (programs.other_plan, FUSED),
    "calls by name": (programs.eager, ({"cpu": 4, "unfused": 2}, {"cpu": 4, "unfused": 2})),
}


def _all_cases(rank: int, world: int) -> tuple[dict[str, Any], Any, float]:
    found = {}
    for name, (case, _) in CASES.items():
        dist.barrier()
        found[name] = case(rank)
    records = [record for record in flux_inductor.report().records if record.code == "ranks-differ"]
    return found, records, programs.cost_us()


@pytest.fixture(scope="module")
def replies() -> list[tuple[dict[str, Any], Any, float]]:
    return run_ranks(_all_cases, 2, timeout=280, group_timeout=120)


@pytest.mark.parametrize("name", CASES)
def test_case(replies: list[tuple[dict[str, Any], Any, float]], name: str) -> None:
    for (found, _, _), ran in zip(replies, CASES[name][1], strict=True):
        assert found[name] == (True, ran)


def test_report_says_what_ranks_found_out(replies: list[tuple[dict[str, Any], Any, float]]) -> None:
    for rank, (_, records, _) in enumerate(replies):
        assert records
        for record in records:
            assert not record.fused
            assert f"rank {1 - rank} cannot fuse it: " in record.reason


def test_a_known_graph_costs_little(replies: list[tuple[dict[str, Any], Any, float]]) -> None:
    """A few microseconds of the CPU, with room for a machine that is busy."""
    assert min(cost for _, _, cost in replies) < 50


def _failing(rank: int, world: int, name: str) -> tuple[str, float]:
    return getattr(programs, name)(rank)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("name", "sides"),
    [
        ("other_collectives", ("rank 0: all_gather 512 fp32", "rank 1: reduce_scatter sum 2048 fp32")),
        ("other_sizes", ("rank 0: all_gather 512 fp32", "rank 1: all_gather 1024 fp32")),
        ("fixed", (r"rank 0: .* \(fused since an earlier run", r"rank 1: all_gather 512 fp32 \(unfused")),
    ],
)
def test_what_does_not_go_together_raises_on_all(name: str, sides: tuple[str, str]) -> None:
    for error, seconds in run_ranks(_failing, 2, name, timeout=120, group_timeout=60):
        assert error.startswith("MismatchError: ")
        for side in sides:
            assert re.search(side, error)
        assert seconds < 2


def _alone(rank: int, world: int) -> str:
    """Rank 1 ends before it comes to the collective that rank 0 asks about."""
    agreement = state_of("0", Agreement)
    dist.barrier()
    if rank == 1:
        os._exit(0)
    agreement.begin("digest", "all_gather 8 fp32 | 1 2 4 fp32 | mesh push chunk=2")
    with pytest.raises(errors.FusedOpError) as caught:
        agreement.verdict("digest/0")
    return f"{type(caught.value).__name__}: {caught.value}"


def test_a_rank_that_has_ended() -> None:
    reply, _ = run_ranks(_alone, 2, timeout=60, group_timeout=60, dying=[1])
    assert reply.startswith("PeerLostError: rank 0 of group '0': the process of rank 1 has ended before it ")


def _late(rank: int, world: int) -> str:
    """Rank 1 comes after rank 0 has given up, and hears of it at once."""
    agreement, store, text = (
        state_of("0", Agreement),
        default_store(),
        "all_gather 8 fp32 | 1 2 4 fp32 | mesh push chunk=2",
    )
    if rank == 1:
        store.wait(["gave up"], timedelta(seconds=30))
    agreement.begin("digest", text)
    with pytest.raises(errors.PeerTimeoutError) as caught:
        agreement.verdict("digest/0")
    store.set("gave up" if rank == 0 else "heard", "")
    store.wait(["heard"], timedelta(seconds=30))
    return str(caught.value)


def test_a_rank_that_does_not_come() -> None:
    first, second = run_ranks(_late, 2, timeout=60, group_timeout=3)
    assert first.startswith("rank 0 of group '0' waited 3 s for ranks [1] to come to collective 0")
    assert second.startswith("rank 1 of group '0' gave up because rank 0 failed: PeerTimeoutError: rank 0")


def _four(rank: int, world: int) -> list[bool]:
    """Sequences of four ranks in different pieces; the third cannot fuse the second collective."""
    agreement = state_of("0", Agreement)
    fused, plain = "all_gather 8 fp32 | 1 2 4 fp32 | mesh push chunk=2", "all_gather 8 fp32"
    second = plain if rank == 2 else fused
    pieces = [[fused], [second, fused]] if rank % 2 else [[fused, second, fused]]
    found = []
    for number, piece in enumerate(pieces):
        agreement.begin(f"graph{number}", "\n".join(piece))
        found += [
            agreement.verdict(f"graph{number}/{at}").fused for at, site in enumerate(piece) if site == fused
        ]
    agreement.begin("again", "\n".join([fused, fused, fused] if rank == 0 else [fused]))
    found.append(agreement.verdict("again/0").fused)
    return found


def test_four_ranks() -> None:
    replies = run_ranks(_four, 4, timeout=60)
    assert replies[2] == [True, True, True]
    assert all(reply == [True, False, True, True] for rank, reply in enumerate(replies) if rank != 2)


def test_a_graph_that_never_ran_cannot_be_captured() -> None:
    error, _ = run_ranks(_captured, 2, timeout=60)
    assert "run the function once with the same shapes before capturing it" in error


def _captured(rank: int, world: int) -> str:
    agreement = state_of("0", Agreement)
    with pytest.raises(ValueError, match="never ran") as caught:
        agreement.begin("digest", "all_gather 8 fp32 | 1 2 4 fp32 | mesh push chunk=2", True)
    agreement.begin("plain", "all_gather 8 fp32", True)
    agreement.begin("known", "all_gather 8 fp32 | 1 2 4 fp32 | mesh push chunk=2")
    assert agreement.verdict("known/0").fused
    agreement.begin("known", "", True)  # captures are not counted, as replays are not
    assert agreement.verdict("known/0", True).fused
    dist.barrier()  # a rank that has ended tells nothing any more
    return str(caught.value)
