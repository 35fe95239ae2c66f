"""The text of plans: round trip, tables, errors."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flux_inductor.planning.ops import ALL_GATHER_MATMUL, MATMUL_REDUCE_SCATTER, OPS
from flux_inductor.planning.ops.op import Op
from flux_inductor.planning.plan import UNFUSED, Plan, PlanTable, check_plan, parse_plan, single
from flux_inductor.planning.tile import Tile
from flux_inductor.planning.topology import Device

counts = st.integers(1, 1 << 30)
tiles = st.none() | st.builds(Tile, counts, counts, counts, counts, counts, st.booleans())
maybe = st.one_of(st.just(0), counts)
plans = st.one_of(
    st.just(UNFUSED),
    st.builds(
        Plan,
        st.just("mesh"),
        st.sampled_from(["push", "pull", "store"]),
        chunk=counts,
        tile=tiles,
        sweep=maybe,
        width=maybe,
        reserve=maybe,
        last=maybe,
        slices=st.one_of(st.just(0), st.integers(2, 1 << 30)),
    ),
)


@st.composite
def tables(draw: st.DrawFn) -> PlanTable:
    bounds = sorted(draw(st.sets(counts, max_size=5)))
    return PlanTable((*((bound, draw(plans)) for bound in bounds), (None, draw(plans))))


@given(tables())
def test_text_round_trips(table: PlanTable) -> None:
    assert parse_plan(str(table)) == table


@given(tables(), st.integers(0, 1 << 31))
def test_the_plan_of_a_size_is_the_first_whose_bound_holds_it(table: PlanTable, m: int) -> None:
    right = [plan for bound, plan in table.entries if bound is None or m <= bound]
    assert table.at(m) is right[0]


def test_texts() -> None:
    push, tile = Plan("mesh", "push", 64), Tile(256, 192, 64, 2, 1)
    assert str(single(UNFUSED)) == "unfused"
    assert str(single(push)) == "mesh push chunk=64"
    assert str(Plan("mesh", "pull", 8, tile)) == "mesh pull chunk=8 tile=256x192x64/2x1"
    store = Plan("mesh", "store", 512, tile, sweep=1, width=384, reserve=8)
    assert str(store) == "mesh store chunk=512 width=384 tile=256x192x64/2x1 sweep=1 reserve=8"
    sliced = Plan("mesh", "push", 2560, Tile(128, 160, 64, 2, 1), sweep=4, last=1536, slices=4)
    assert str(sliced) == "mesh push chunk=2560 last=1536 slices=4 tile=128x160x64/2x1 sweep=4"
    table = parse_plan("m<=512: unfused;m<=4096 : mesh push  chunk=64; mesh push chunk=256 ")
    assert str(table) == "m<=512: unfused; m<=4096: mesh push chunk=64; mesh push chunk=256"
    assert [table.at(m) for m in (1, 512, 513, 4096)] == [UNFUSED, UNFUSED, push, push]
    assert table.at(4097) == Plan("mesh", "push", 256)
    assert table.fused
    assert not single(UNFUSED).fused


@pytest.mark.parametrize(
    ("text", "token", "remedy"),
    [
        ("", "unknown route ''", "valid: unfused, mesh"),
        ("torus push chunk=4", "'torus'", "valid: unfused, mesh"),
        ("mesh", "'' after 'mesh'", "valid: push, pull, store"),
        ("mesh shove chunk=4", "'shove'", "valid: push, pull, store"),
        ("mesh push", "chunk is missing", "chunk=64"),
        ("mesh push chunk=0", "'chunk=0'", "chunk=64"),
        ("mesh push chunk=4.5", "'chunk=4.5'", "chunk=64"),
        ("mesh push chunk=\u0664", "'chunk=\u0664'", "chunk=64"),
        ("mesh push chunk=4 chunk=5", "chunk is given twice", "twice"),
        ("mesh push chunk=4 speed=9", "'speed=9'", "valid: chunk=<rows>, last=<rows>, slices="),
        ("mesh push chunk=4 speed=9", "'speed=9'", "reserve=<SMs>"),
        ("mesh store chunk=4 reserve=0", "'reserve=0'", "reserve=64"),
        ("mesh push chunk=4 last=0", "'last=0'", "last=64"),
        ("mesh push chunk=4 slices=1", "'slices=1'", "slices=4"),
        ("mesh push chunk=4 tile=256", "'tile=256'", "tile=256x192x64/2x1"),
        ("unfused chunk=4", "'chunk=4'", "remove"),
        ("m<=4: unfused", "m<=4", "for larger sizes"),
        ("m<4: unfused; unfused", "'m<4: unfused'", "'m<=512:'"),
        ("unfused; unfused", "'unfused'", "'m<=512:'"),
        ("m<=8: unfused; m<=8: mesh push chunk=4; unfused", "m<=8", "larger than"),
    ],
)
def test_an_error_names_the_token_and_the_remedy(text: str, token: str, remedy: str) -> None:
    with pytest.raises(ValueError, match="plan") as caught:
        parse_plan(text)
    assert token in str(caught.value)
    assert remedy in str(caught.value)


@pytest.mark.parametrize(
    ("text", "op", "device", "words"),
    [
        ("mesh store chunk=4", ALL_GATHER_MATMUL, "cuda", "cannot 'store'; valid: push"),
        ("mesh pull chunk=4", ALL_GATHER_MATMUL, "cuda", "cannot 'pull'; valid: push"),
        ("mesh pull chunk=4", MATMUL_REDUCE_SCATTER, "cuda", "cannot 'pull'; valid: push, store"),
        ("mesh store chunk=4", MATMUL_REDUCE_SCATTER, "cpu", "cannot 'store'; valid: push, pull"),
        ("mesh push chunk=4 reserve=8", MATMUL_REDUCE_SCATTER, "cpu", "remove 'reserve='"),
        ("mesh push chunk=4 last=4", ALL_GATHER_MATMUL, "cpu", "on cpu are all alike; remove 'last='"),
        ("mesh push chunk=4 slices=4", ALL_GATHER_MATMUL, "cpu", "remove 'slices='"),
        (
            "mesh push chunk=4 last=4",
            MATMUL_REDUCE_SCATTER,
            "cuda",
            "on cuda are all alike; remove 'last='",
        ),
        ("mesh store chunk=4 slices=4", MATMUL_REDUCE_SCATTER, "cuda", "remove 'slices='"),
    ],
)
def test_a_plan_that_an_engine_cannot_run_is_an_error(text: str, op: Op, device: Device, words: str) -> None:
    with pytest.raises(ValueError, match=f"plan '{text}': .*{words}"):
        check_plan(parse_plan(text).at(1), op, device)


def test_what_an_engine_can_run_passes() -> None:
    for op in OPS:
        for device, directions in op.directions.items():
            for direction in directions:
                check_plan(Plan("mesh", direction, 4), op, device)
            check_plan(UNFUSED, op, device)
    check_plan(Plan("mesh", "store", 4, reserve=8), MATMUL_REDUCE_SCATTER, "cuda")
    check_plan(Plan("mesh", "push", 4, last=2, slices=2), ALL_GATHER_MATMUL, "cuda")
