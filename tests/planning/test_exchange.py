"""What ranks have in common at a collective, and what they all do where they differ."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flux_inductor.planning.exchange import (
    Conflict,
    Site,
    Stand,
    Verdict,
    adopted,
    alike,
    exchange_of,
    geometry,
    judge,
    moves_text,
)
from flux_inductor.planning.installed import CPU_ONLY
from flux_inductor.planning.ops import ALL_GATHER_MATMUL, MATMUL_REDUCE_SCATTER
from flux_inductor.planning.ops.op import Op
from flux_inductor.planning.plan import parse_plan
from flux_inductor.planning.problem import Problem
from flux_inductor.planning.strategy import choose
from flux_inductor.planning.topology import Topology

MOVES = "all_gather 64 bf16"
PLAIN = Site(MOVES)
FUSED = Site(MOVES, "1 8 8 bf16", "mesh push chunk=8")


def stand(rank: int, site: Site, decided: Verdict | None = None) -> Stand:
    return Stand(rank, f"graph{rank}/0", site, decided)


def stands(*sites: Site) -> list[Stand]:
    return [stand(rank, site) for rank, site in enumerate(sites)]


def fused(answer: Verdict | Conflict) -> bool | None:
    """None for a conflict."""
    return answer.fused if isinstance(answer, Verdict) else None


@pytest.mark.parametrize(
    "site",
    [PLAIN, FUSED, Site("reduce_scatter sum * fp32", "1 * 8 fp32", "m<=8: unfused; mesh push chunk=8")],
)
def test_text_of_a_site(site: Site) -> None:
    assert Site.parse(str(site)) == site


def test_all_fuse_by_the_plan_of_the_first() -> None:
    other = replace(FUSED, plan="mesh push chunk=4")
    assert judge(stands(FUSED, other, other)) == Verdict(FUSED.plan)


def test_one_that_cannot_fuse() -> None:
    answer = judge(stands(FUSED, PLAIN, FUSED))
    assert fused(answer) is False
    assert isinstance(answer, Verdict)
    assert "rank 1" in answer.because


def test_who_has_fused_before_is_followed() -> None:
    before = Verdict("mesh pull chunk=2")
    assert judge([stand(0, FUSED), stand(1, FUSED, before)]) == before


@pytest.mark.parametrize(
    "other",
    [PLAIN, replace(FUSED, geometry="1 4 16 bf16"), replace(FUSED, moves="all_gather 32 bf16")],
)
def test_who_has_fused_before_cannot_take_it_back(other: Site) -> None:
    assert fused(judge([stand(0, FUSED, Verdict(FUSED.plan)), stand(1, other)])) is None


def test_other_strips_of_as_many_elements_stay_unfused() -> None:
    assert fused(judge(stands(FUSED, replace(FUSED, geometry="2 4 8 bf16")))) is False


@pytest.mark.parametrize("moves", ["reduce_scatter sum 64 bf16", "all_gather 32 bf16", "all_gather 64 fp32"])
def test_other_collectives_are_a_conflict(moves: str) -> None:
    assert fused(judge(stands(FUSED, Site(moves)))) is None


def test_unknown_sizes_agree_with_any() -> None:
    assert alike("all_gather * bf16", MOVES)
    assert not alike("all_gather * fp32", MOVES)
    assert fused(judge(stands(FUSED, Site("all_gather * bf16", "1 * 8 bf16", "mesh push chunk=4")))) is True


SITES = st.sampled_from(
    [PLAIN, FUSED, replace(FUSED, plan="mesh push chunk=4"), replace(FUSED, geometry="2 4 8 bf16")]
)


@given(st.lists(SITES, min_size=2, max_size=6), st.data())
def test_ranks_that_have_decided_change_nothing(sites: list[Site], data: st.DataObject) -> None:
    """Ranks come to the verdict one after another, and see what the earlier ones have made of it."""
    everyone = stands(*sites)
    answer = judge(everyone)
    assert isinstance(answer, Verdict), "nobody has fused before, and all move the same"
    early = data.draw(st.sets(st.integers(0, len(sites) - 1)))
    seen = [replace(one, decided=answer) if one.rank in early else one for one in everyone]
    again = judge(seen)
    assert isinstance(again, Verdict)
    assert again.plan == answer.plan


def problem(columns: int = 32, depth: int = 64, op: Op = ALL_GATHER_MATMUL, rows: int = 128) -> Problem:
    return Problem(op=op, world=2, strips=1, rows=rows, columns=(columns,), depth=depth, dtype="bf16")


def test_what_the_exchange_does_not_depend_on() -> None:
    one, other = problem(columns=32), replace(problem(columns=313), return_gathered=True)
    assert geometry(one) == geometry(other) == "1 128 64 bf16"
    one, other = (problem(depth=depth, op=MATMUL_REDUCE_SCATTER) for depth in (64, 63))
    assert geometry(one) == geometry(other) == "1 128 32 bf16"
    assert moves_text("all_gather", 1 * 128 * 64, "bf16") == "all_gather 8192 bf16"


PLANNED = "mesh push chunk=2560 last=1536 slices=4 tile=128x160x64/2x1 sweep=4 reserve=8"


def test_a_gather_keeps_its_tile_to_itself() -> None:
    table = parse_plan(f"m<=512: unfused; {PLANNED}")
    exchange = exchange_of(table, ALL_GATHER_MATMUL, "cuda")
    assert exchange == "m<=512: unfused; mesh push chunk=2560 last=1536 slices=4"
    assert adopted(table, ALL_GATHER_MATMUL, "cuda", exchange) == table
    another = adopted(table, ALL_GATHER_MATMUL, "cuda", "mesh push chunk=64")
    assert str(another) == "mesh push chunk=64 reserve=8"


def test_the_chunks_of_a_cuda_scatter_follow_its_tiles() -> None:
    text = "mesh store chunk=1024 width=1536 tile=256x192x64/2x1 sweep=4"
    exchange = exchange_of(parse_plan(f"{text} reserve=8"), MATMUL_REDUCE_SCATTER, "cuda")
    assert exchange == text
    own = parse_plan("mesh push chunk=64 reserve=8")
    assert str(adopted(own, MATMUL_REDUCE_SCATTER, "cuda", exchange)) == f"{text} reserve=8"
    assert exchange_of(parse_plan("unfused"), MATMUL_REDUCE_SCATTER, "cuda") == ""


@pytest.mark.parametrize("columns", [156, 157, 25128, 25121])
def test_shards_that_differ_by_a_column_decide_alike(columns: int) -> None:
    """Of a gather's N, and likewise of a scatter's K."""
    topology = Topology.parse("cpu ranks=2 nodes=1 link=shm")
    for low in (columns // 16 * 16 + 1, columns):
        ours, theirs = (
            choose(problem(columns=size, rows=64), topology, installed=CPU_ONLY)
            for size in (low, -(-low // 16) * 16)
        )
        assert ours == theirs
        ours, theirs = (
            choose(problem(depth=size, op=MATMUL_REDUCE_SCATTER), topology, installed=CPU_ONLY)
            for size in (low, -(-low // 16) * 16)
        )
        assert ours == theirs
