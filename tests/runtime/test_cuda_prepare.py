"""How a plan becomes the fields of a CUDA problem, with stand-ins for the compiled kernels."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from flux_inductor.planning.ops.all_gather_matmul import GatherCall
from flux_inductor.planning.ops.matmul_reduce_scatter import ScatterCall
from flux_inductor.planning.plan import parse_plan
from flux_inductor.planning.sm90.fit import menu_of
from flux_inductor.runtime import cuda_prepare
from flux_inductor.runtime.cuda_prepare import Seat, WeightShape

SEAT = Seat(rank=1, device=0, sms=132)


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = SimpleNamespace(
        GatherShape=SimpleNamespace,
        ScatterShape=SimpleNamespace,
        GatherCall=lambda *call: SimpleNamespace(shapes=call[1], signals_per_shard=5),
        ScatterCall=lambda *call: SimpleNamespace(shape=call[1], chunks_per_part=7),
    )
    monkeypatch.setattr(cuda_prepare, "kernels", kernels)
    monkeypatch.setattr(cuda_prepare, "kernel_for", lambda *_: None)
    monkeypatch.setattr(cuda_prepare, "menu", menu_of)


def gather(rows: int, text: str) -> cuda_prepare.Prepared:
    weights: list[WeightShape] = [(1280, "k_major", 8192), (640, "k_major", 8192)]
    plan = parse_plan(text).at(2 * rows)
    call = GatherCall((rows, 8192), (1280, 640), "bf16", "k_major", 2, 0, return_gathered=False)
    return cuda_prepare.prepare_gather(call, SEAT, weights, plan)


def scatter(rows: int, text: str, result: str = "bf16") -> cuda_prepare.Prepared:
    plan = parse_plan(text).at(rows)
    call = ScatterCall((rows, 1024), 8192, "bf16", "k_major", 2, 0, "sum", 1.0, result, addend=False)
    return cuda_prepare.prepare_scatter(call, SEAT, 1024, (8192, "k_major", 1024), plan)


@pytest.mark.parametrize(
    ("text", "chunk", "last", "slices"),
    [
        ("mesh push chunk=2560 last=1536 slices=4 tile=128x160x64/2x1 sweep=4", 2560, 1536, 4),
        ("mesh push chunk=8192 last=8192 slices=2", 4096, 4096, 2),
        ("mesh push chunk=1000", 1000, 0, 1),
    ],
)
def test_a_gather_by_a_plan(text: str, chunk: int, last: int, slices: int) -> None:
    prepared = gather(4096, text)
    for size in prepared.call.shapes:
        assert (size.rows_per_chunk, size.last_rows, size.slices) == (chunk, last, slices)
    assert prepared.need.signals == 2 * 5


@pytest.mark.parametrize(
    ("cut", "sweep", "columns"),
    [
        ("chunk=1024 width=8192 tile=128x256x64/2x1 sweep=4", 4, 32),
        ("chunk=2048 width=4096 tile=128x256x64/2x1 sweep=4", 4, 16),  # the sweep says how many rows
        ("chunk=512 width=300 tile=128x256x64/2x1 sweep=2", 2, 2),
        ("chunk=1024 tile=128x256x64/2x1 sweep=3", 3, 16),
    ],
)
def test_a_scatter_by_a_plan(cut: str, sweep: int, columns: int) -> None:
    prepared = scatter(8192, f"mesh push {cut}")
    assert (prepared.call.shape.group, prepared.call.shape.chunk_columns) == (sweep, columns)
    assert f"chunk={256 * sweep} " in prepared.descriptor
    assert prepared.need.signals == prepared.need.counters == 2 * 7


def test_partials_in_fp32() -> None:
    """As many elements, twice the bytes; and ranks must agree on it."""
    plain, wide = (scatter(1024, "mesh push chunk=256", result) for result in ("bf16", "fp32"))
    assert wide.partials == plain.partials == 512 * 8192
    assert wide.need.slot_bytes == 2 * plain.need.slot_bytes == 4 * wide.partials
    assert "of 1 512 8192 bf16 as fp32" in wide.descriptor
    assert "of 1 512 8192 bf16," in plain.descriptor
    with pytest.raises(ValueError, match="no kernel with tile 256x128x64/2x1"):
        scatter(1024, "mesh push chunk=256 tile=256x128x64/2x1", "fp32")


def test_what_is_larger_than_the_product_counts_as_the_product() -> None:
    """A plan's numbers have no limit, those of the kernels are integers of 32 bits."""
    huge = 1 << 40
    for size in gather(4096, f"mesh push chunk={huge} last={huge} slices={huge} sweep={huge}").call.shapes:
        assert (size.rows_per_chunk, size.last_rows, size.slices) == (4096, 4096, 8192 // 64)
        assert size.group <= 4096 // 128
    for cut in (f"sweep={huge} width={huge}", f"sweep=1 width={huge}", f"sweep={huge} width=64", ""):
        size = scatter(8192, f"mesh push chunk={huge} tile=128x256x64/2x1 {cut}").call.shape
        assert size.group <= 16  # 4096 rows in clusters of 256
        assert size.chunk_columns <= 32
