"""matmul + reduce_scatter kernels: numbers, progress, and waits, with all ranks played by one process."""

import random
import time
from typing import Any

import pytest
import torch

from tests.support.gpu_kernels import kernels

if kernels is None:
    pytest.skip("needs a Hopper GPU and the CUDA kernels", allow_module_level=True)

from flux_inductor._core import ScatterSchedule
from flux_inductor.planning.tile import Tile
from tests.support.emulated_ranks import (
    CLAIM_WORDS,
    AllGatherMatmulCall,
    EmulatedGroup,
    MatmulReduceScatterCall,
)
from tests.support.numerics import product, randoms, relative_error, weight

from .own_process import run_in_process

TILES = sorted({entry.tile for entry in kernels.matmul_reduce_scatter_kernels()})
GATHER_TILES = sorted({entry.tile for entry in kernels.all_gather_matmul_kernels()})
FAMILIES = sorted({(entry.element, entry.layout) for entry in kernels.matmul_reduce_scatter_kernels()})
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
both_directions = pytest.mark.parametrize("direction", ["push", "store"])


def run(
    world: int,
    shape: tuple[int, int, int, int],
    tile: str,
    element: str = "bf16",
    layout: str = "k_major",
    sweep: int = 4,
    chunk_columns: int = 2,
    delay_cycles: int = 0,
    bias: bool = False,
    addend: bool = False,
    scale: float = 1.0,
    sms: list[int] | None = None,
    direction: str = "push",
    result_dtype: torch.dtype | None = None,
) -> list[torch.Tensor]:
    """One call on every rank, checked against fp64 and the error of rounded matmuls summed over the ranks."""
    strips, rows, n, k = shape
    dtype = DTYPES[element]
    summed = result_dtype or dtype
    group = EmulatedGroup(world)
    devices = [rank.device for rank in group.ranks]
    xs = randoms(world, (strips, world * rows, k), dtype, devices)
    ws = [weight(k, n, dtype, d, layout) for d in devices]
    bs = randoms(world, (n,), summed, devices) if bias else None
    adds = randoms(world, (strips, world * rows, n), summed, devices) if addend else None
    call = MatmulReduceScatterCall(
        group,
        xs,
        ws,
        tile,
        bs,
        adds,
        scale,
        sweep,
        chunk_columns,
        sms=sms,
        direction=direction,
        result=result_dtype,
    )
    results = call.run(delay_cycles)
    home = devices[0]
    exact = torch.zeros(strips, world * rows, n, dtype=torch.float64, device=home)
    unfused = torch.zeros(strips, world * rows, n, dtype=summed, device=home)
    for i in range(world):
        whole, rounded = scale * product(xs[i], ws[i]), (scale * torch.matmul(xs[i], ws[i])).to(summed)
        for term in (bs[i] if bs else None, adds[i] if adds else None):
            if term is not None:
                whole, rounded = whole + term.double(), rounded + term
        exact += whole.to(home)
        unfused += rounded.to(home)
    for rank, result in zip(group.ranks, results, strict=True):
        assert rank.error()["state"] == 0, rank.error()
        part = slice(rank.index * rows, (rank.index + 1) * rows)
        error = relative_error(result, exact[:, part])
        assert error <= 2 * relative_error(unfused[:, part], exact[:, part]), (rank.index, error)
        # What the kernels round to fp32 alone is far nearer.
        assert summed != torch.float32 or error <= 2e-5, (rank.index, error)
    return results


@both_directions
@pytest.mark.parametrize(("element", "layout"), FAMILIES)
@pytest.mark.parametrize("tile", TILES)
def test_every_kernel_on_two_ranks(tile: str, element: str, layout: str, direction: str) -> None:
    run(2, (1, 512, 768, 512), tile, element, layout, bias=True, addend=True, scale=0.5, direction=direction)


@both_directions
@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("shape", [(1, 1, 8, 8), (1, 200, 328, 136), (3, 77, 264, 72), (2, 300, 1000, 264)])
def test_ragged_shapes(world: int, shape: tuple[int, int, int, int], direction: str) -> None:
    run(world, shape, TILES[0], chunk_columns=1, direction=direction)


@both_directions
@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_addend_bias_and_scale(world: int, direction: str) -> None:
    run(world, (2, 140, 520, 256), TILES[-1], bias=True, addend=True, scale=0.25, direction=direction)


@both_directions
@pytest.mark.parametrize("world", [2, 4, 8])
def test_delayed_chunks(world: int, direction: str) -> None:
    """Of delayed copies, or of kernels that start late."""
    for sweep, chunk_columns in [(1, 1), (2, 3), (8, 100)]:
        run(
            world,
            (1, 512, 1536, 512),
            TILES[0],
            sweep=sweep,
            chunk_columns=chunk_columns,
            delay_cycles=3_000_000,
            direction=direction,
        )


@both_directions
@pytest.mark.parametrize("tile", TILES)
def test_chunks_of_several_rounds(tile: str, direction: str) -> None:
    """With few SMs a chunk's tiles are several rounds."""
    for world, few in [(2, 6), (4, 16)]:
        run(
            world,
            (1, 900, 1000, 264),
            tile,
            sweep=1,
            chunk_columns=100,
            delay_cycles=300_000,
            addend=world == 4,
            sms=[few] * world,
            direction=direction,
        )


@both_directions
@pytest.mark.parametrize("addend", [False, True])
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("world", [2, 4])
def test_few_sms_on_some_ranks(world: int, tile: str, addend: bool, direction: str) -> None:
    """Rule R1: a rank with one resident cluster and ranks with many finish.

    With an addend, every tile has a source that the load warp need not wait for. Chunks are small, so that
    own tiles take turns with a peer's where the kernel stores, and later on ranks with more clusters.
    """
    for few in ([2] + [16] * (world - 1), [16] * (world - 1) + [2]):
        run(
            world,
            (1, 1024, 1024, 256),
            tile,
            sweep=1,
            chunk_columns=1,
            addend=addend,
            sms=few,
            direction=direction,
        )


@pytest.mark.parametrize("addend", [False, True])
@pytest.mark.parametrize("sms", [2, 8, 64])
@pytest.mark.parametrize("tile", TILES)
def test_each_tile_is_counted_once(tile: str, sms: int, addend: bool) -> None:
    """The last one of its block or not, or in a cluster's padding.

    One count too many and a chunk would leave before its last tile is stored; but only sometimes, so that the
    results need not show it. By the kernel alone, without copies; rank 1's partials seem to be there.
    """
    world, strips, rows, n, k = 2, 2, 300, 1000, 128
    group = EmulatedGroup(world)
    devices = [rank.device for rank in group.ranks]
    xs = randoms(world, (strips, world * rows, k), torch.bfloat16, devices)
    ws = [weight(k, n, torch.bfloat16, d, "k_major") for d in devices]
    adds = randoms(world, (strips, world * rows, n), torch.bfloat16, devices) if addend else None
    use = [sms] * world
    call = MatmulReduceScatterCall(group, xs, ws, tile, addends=adds, sweep=2, sms=use)
    rank, p = group.ranks[0], call.problems[0]
    per_part = kernels.testing.chunks_per_part(call.entry, p)
    expected = torch.zeros(world, per_part, dtype=torch.int32)
    shape = Tile.parse(tile).shape
    schedule = ScatterSchedule(world, 0, strips, rows, n, shape, p.group, p.chunk_columns)
    for part, index, *_, tiles in schedule.chunks():
        expected[part, index] = tiles
    rank.signals.fill_(int(rank.epoch) + 1)
    group.synchronize()
    for _ in range(3):
        rank.zeroed.zero_()
        group.synchronize()
        with torch.cuda.device(rank.device):
            kernels.testing.launch(call.entry, p, rank.compute.cuda_stream)
        group.synchronize()
        counters = rank.zeroed[CLAIM_WORDS : CLAIM_WORDS + world * per_part].view(world, per_part)
        assert torch.equal(counters.cpu(), expected)


@both_directions
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_other_kernels_hold_most_sms_of_both_ranks(direction: str) -> None:
    """Rule R1: both ranks finish while most of their blocks are not even resident.

    With a fixed share of the tiles for every block this would last as long as the other kernels do: each rank
    would wait for tiles of the other's absent blocks. The other kernels are gathers whose chunks come only
    after that.
    """
    others, group = EmulatedGroup(2), EmulatedGroup(2)
    devices = [rank.device for rank in group.ranks]
    for rank in others.ranks:
        rank.sms -= 12
    shards = randoms(2, (1, 8192, 128), torch.bfloat16, devices)
    w = [[weight(128, 256, torch.bfloat16, d, "k_major")] for d in devices]
    holding = AllGatherMatmulCall(others, shards, w, GATHER_TILES[0], 8192, wait_limit_ns=10_000_000_000)
    xs = randoms(2, (1, 4096, 256), torch.bfloat16, devices)
    ws = [weight(256, 8192, torch.bfloat16, d, "k_major") for d in devices]
    call = MatmulReduceScatterCall(group, xs, ws, TILES[0], direction=direction)
    group.synchronize()
    holding.enqueue(push=False)
    call.enqueue()
    for rank in group.ranks:
        rank.compute.synchronize()
    assert not any(rank.compute.query() for rank in others.ranks)
    push_shards(others, holding)
    others.synchronize()
    assert all(rank.error()["state"] == 0 for rank in group.ranks + others.ranks)
    exact = product(xs[0], ws[0]) + product(xs[1], ws[1]).to(devices[0])
    for i in range(2):
        assert relative_error(call.parts[i][i], exact[:, 2048 * i : 2048 * (i + 1)]) < 5e-3


def push_shards(group: EmulatedGroup, call: AllGatherMatmulCall) -> None:
    """What enqueue(push=False) left out."""
    for rank in group.ranks:
        with torch.cuda.device(rank.device):
            kernels.testing.push_shard(
                call.problems[rank.index][0],
                [buffer.data_ptr() for buffer in call.gathered],
                [other.signals.data_ptr() for other in group.ranks],
                rank.transfer.cuda_stream,
            )


def end_of_a_call_without_rank_1(
    tile: str, direction: str, limit_ns: int, record: list[int]
) -> tuple[bool, float, dict[str, int]]:
    """Whether the context of rank 0 was lost, the seconds until then, and what its record, preset, says."""
    group = EmulatedGroup(2)
    devices = [rank.device for rank in group.ranks]
    xs = randoms(2, (1, 512, 128), torch.bfloat16, devices)
    ws = [weight(128, 256, torch.bfloat16, d, "k_major") for d in devices]
    call = MatmulReduceScatterCall(group, xs, ws, tile, wait_limit_ns=limit_ns, direction=direction)
    first = group.ranks[0]
    first.errors[:2].view(torch.int32).copy_(torch.tensor(record[:4]))
    first.errors[2:].copy_(torch.tensor(record[4:]))
    group.synchronize()
    start = time.monotonic()
    try:
        call.enqueue(absent=(1,))
        first.compute.synchronize()
    except RuntimeError:
        return True, time.monotonic() - start, first.error()
    return False, time.monotonic() - start, first.error()


@both_directions
@pytest.mark.parametrize("tile", [TILES[0], TILES[-1]])
def test_missing_partials_end_the_context(tile: str, direction: str) -> None:
    """Rule R4: nothing queued behind the kernel reads a result without a partial, and the record is whole."""
    lost, _, error = run_in_process(end_of_a_call_without_rank_1, tile, direction, 50_000_000, [0] * 6)
    assert lost
    assert (error["state"], error["op"], error["source"]) == (2, 2, 1), error
    assert (error["expected"], error["seen"]) == (8, 0), error


def test_a_wait_that_finds_another_one_failed_ends_the_context_at_once() -> None:
    record = [2, 1, 5, 6, 7, 4]
    lost, seconds, error = run_in_process(
        end_of_a_call_without_rank_1, TILES[0], "push", 60_000_000_000, record
    )
    assert lost
    assert seconds < 30
    assert list(error.values()) == record


@pytest.mark.parametrize("tile", TILES)
def test_results_do_not_change_from_run_to_run_or_with_the_transport(tile: str) -> None:
    group = EmulatedGroup(4)
    devices = [rank.device for rank in group.ranks]
    xs = randoms(4, (1, 4 * 192, 256), torch.bfloat16, devices)
    ws = [weight(256, 520, torch.bfloat16, d, "k_major") for d in devices]
    calls = [MatmulReduceScatterCall(group, xs, ws, tile, direction=d) for d in ("push", "store")]
    first = [result.clone() for result in calls[0].run()]
    for i in range(20):
        again = calls[i % 2].run(delay_cycles=100_000 * (i % 3))
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True)), i


STRESS_RUNS = 200


def random_call(
    rng: random.Random, group: EmulatedGroup, tile: str, **options: Any
) -> tuple[MatmulReduceScatterCall, list[torch.Tensor]]:
    """A call on a problem of random size, and what each rank must get: in fp64, on its device."""
    strips, rows, n, k = (
        rng.randint(1, 2),
        rng.randint(1, 500),
        8 * rng.randint(1, 120),
        8 * rng.randint(1, 40),
    )
    devices = [rank.device for rank in group.ranks]
    xs = randoms(group.world, (strips, group.world * rows, k), torch.bfloat16, devices)
    ws = [weight(k, n, torch.bfloat16, d, "k_major") for d in devices]
    with_addend = rng.random() < 0.5
    shape = (strips, group.world * rows, n)
    addends = randoms(group.world, shape, torch.bfloat16, devices) if with_addend else None
    exact = torch.zeros(shape, dtype=torch.float64, device=devices[0])
    for i in range(group.world):
        exact += product(xs[i], ws[i]).to(devices[0])
        if addends is not None:
            exact += addends[i].to(devices[0], torch.float64)
    sweep, columns = rng.randint(1, 4), rng.randint(1, 4)
    call = MatmulReduceScatterCall(
        group, xs, ws, tile, addends=addends, sweep=sweep, chunk_columns=columns, **options
    )
    return call, [part.to(d) for part, d in zip(exact.split(rows, dim=1), devices, strict=True)]


def stress(tile: str, world: int) -> None:
    rng = random.Random(f"{tile} {world}")
    group = EmulatedGroup(world)
    for sms in (4, 10, group.ranks[0].sms):
        for direction in ("push", "store"):
            for i in range(STRESS_RUNS):
                call, exact = random_call(rng, group, tile, sms=[sms] * world, direction=direction)
                results = call.run(delay_cycles=rng.choice((0, 0, 100_000, 1_000_000)))
                for rank, result, expected in zip(group.ranks, results, exact, strict=True):
                    where = (sms, direction, i, rank.index, rank.error())
                    assert rank.error()["state"] == 0, where
                    assert relative_error(result, expected) < 1e-2, where


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("tile", TILES)
def test_many_random_problems(tile: str, world: int) -> None:
    """Tiles with no, one and several sources in any order, whose steps share the stages of one pipeline."""
    run_in_process(stress, tile, world, seconds=300)
