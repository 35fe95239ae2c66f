"""all_gather + matmul kernels: numbers, bits, and waits, with all ranks played by one process."""

import random

import pytest
import torch

from tests.support.gpu_kernels import kernels

if kernels is None:
    pytest.skip("needs a Hopper GPU and the CUDA kernels", allow_module_level=True)

from tests.support.emulated_ranks import AllGatherMatmulCall, EmulatedGroup
from tests.support.numerics import product, randoms, relative_error, weight

from .own_process import run_in_process

TILES = sorted({entry.tile for entry in kernels.all_gather_matmul_kernels()})
FAMILIES = sorted({(entry.element, entry.layout) for entry in kernels.all_gather_matmul_kernels()})
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def assert_kept(call: AllGatherMatmulCall) -> None:
    """Every rank has stored the gathered tensor, to the bit: NaNs, too, are compared by their bits."""
    gathered = torch.stack([shard.cpu() for shard in call.shards], dim=1)
    assert len(call.kept) == call.group.world
    for rank, kept in zip(call.group.ranks, call.kept, strict=True):
        wrong = (kept.cpu().view(torch.int16) != gathered.view(torch.int16)).nonzero()
        assert len(wrong) == 0, (rank.index, len(wrong), wrong[0].tolist(), wrong[-1].tolist())


def run(
    world: int,
    shape: tuple[int, int, int, int],
    tile: str,
    element: str = "bf16",
    layout: str = "k_major",
    chunk: int = 10**6,
    sweep: int = 4,
    delay_cycles: int = 0,
    bias: bool = False,
    weights: int = 1,
    keep: bool = False,
    last: int = 0,
    slices: int = 1,
) -> None:
    """One call on every rank, checked against fp64 and, bit by bit, the kernel on the gathered input."""
    strips, rows, n, k = shape
    dtype = DTYPES[element]
    group = EmulatedGroup(world)
    devices = [rank.device for rank in group.ranks]
    shards = randoms(world, (strips, rows, k), dtype, devices)
    w = [[weight(k, n + 64 * i, dtype, d, layout) for i in range(weights)] for d in devices]
    b = [[torch.randn(x.shape[1], device=x.device).to(dtype) if bias else None for x in ws] for ws in w]
    call = AllGatherMatmulCall(
        group, shards, w, tile, min(chunk, rows), b, sweep, keep=keep, last_rows=last, slices=slices
    )
    results = call.run(delay_cycles)
    if keep:
        assert_kept(call)
    for rank in group.ranks:
        assert rank.error()["state"] == 0, rank.error()
        whole = torch.cat([s.to(rank.device) for s in shards], dim=1)
        alone = EmulatedGroup(1)
        for mine, x, y in zip(results[rank.index], w[rank.index], b[rank.index], strict=True):
            reference = product(whole, x, y)
            unfused = torch.matmul(whole, x) if y is None else torch.matmul(whole, x) + y
            error = relative_error(mine, reference)
            assert error <= 2 * relative_error(unfused, reference), (rank.index, error)
            if rank.device.index == 0:
                same = AllGatherMatmulCall(alone, [whole], [[x]], tile, whole.shape[1], [[y]], sweep).run()
                assert torch.equal(mine, same[0][0])


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("tile", TILES)
def test_every_tile_on_two_ranks(tile: str, keep: bool) -> None:
    run(2, (1, 512, 768, 512), tile, bias=True, keep=keep)


@pytest.mark.parametrize(("element", "layout"), FAMILIES)
def test_every_family(element: str, layout: str) -> None:
    run(2, (1, 384, 512, 512), TILES[0], element, layout, bias=True)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("shape", [(1, 1, 8, 8), (1, 200, 328, 136), (3, 77, 264, 72), (2, 300, 1000, 264)])
def test_ragged_shapes(world: int, shape: tuple[int, int, int, int], keep: bool) -> None:
    run(world, shape, TILES[0], chunk=64, keep=keep)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("world", [2, 4, 8])
def test_delayed_chunks(world: int, keep: bool) -> None:
    for chunk, sweep in [(64, 1), (100, 2), (256, 8)]:
        shape = (1, 256, 1536, 512)
        run(world, shape, TILES[-1], chunk=chunk, sweep=sweep, delay_cycles=3_000_000, keep=keep)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_last_chunk_in_slices(world: int, tile: str, keep: bool) -> None:
    """Rows of the sliced chunk alone, of both chunks in one tile, and slices of one step of the mainloop."""
    for rows, chunk, last, slices, k in [
        (512, 300, 200, 4, 1096),
        (200, 100, 500, 3, 264),
        (300, 64, 40, 9, 520),
    ]:
        shape = (1, rows, 520, k)
        run(world, shape, tile, chunk=chunk, delay_cycles=300_000, keep=keep, last=last, slices=slices)


def test_slices_of_strips_and_of_several_weights() -> None:
    for slices in (1, 2, 5):
        shape = (3, 200, 264, 712)
        run(4, shape, TILES[0], chunk=70, delay_cycles=500_000, weights=2, keep=True, last=90, slices=slices)


@pytest.mark.parametrize("seed", range(4))
def test_random_cuts(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(25):
        rows, k = rng.randint(1, 700), 8 * rng.randint(1, 200)
        run(
            rng.choice((2, 2, 3, 4)),
            (rng.randint(1, 2), rows, 8 * rng.randint(1, 80), k),
            rng.choice(TILES),
            chunk=rng.randint(rows // 8 + 1, rows),
            sweep=rng.randint(1, 4),
            delay_cycles=rng.choice((0, 200_000)),
            keep=rng.random() < 0.5,
            last=rng.choice((0, rng.randint(1, rows))),
            slices=rng.randint(1, 6),
        )


@pytest.mark.parametrize("keep", [False, True])
def test_several_weights_share_a_gather(keep: bool) -> None:
    shape = (2, 130, 512, 256)
    run(4, shape, TILES[0], chunk=50, delay_cycles=2_000_000, bias=True, weights=3, keep=keep)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(("element", "layout"), FAMILIES)
def test_every_kernel_keeps_the_gathered_tensor(element: str, layout: str, tile: str) -> None:
    run(2, (2, 300, 600, 136), tile, element, layout, chunk=100, keep=True)


# One column of tiles copies everything, in many pieces; hundreds of tiles share a few cache lines; the
# last piece of a share is short; several tiles an SM, with odd and even numbers of pieces.
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(
    "shape", [(1, 300, 72, 4096), (1, 3, 20000, 8), (1, 257, 520, 1368), (3, 1500, 1544, 200)]
)
def test_shares_of_what_is_kept(shape: tuple[int, int, int, int], tile: str) -> None:
    run(2, shape, tile, chunk=200, keep=True)


@pytest.mark.parametrize("tile", TILES)
def test_kept_of_a_long_gather(tile: str) -> None:
    """Every SM copies for many tiles, in thousands of pieces where its buffers are small."""
    run(2, (1, 2048, 3072, 4096), tile, chunk=256, delay_cycles=200_000, keep=True)


def test_kept_of_strips_with_gaps() -> None:
    group = EmulatedGroup(2)
    devices = [rank.device for rank in group.ranks]
    shards = [x[:, 5:105] for x in randoms(2, (3, 128, 264), torch.bfloat16, devices)]
    w = [[weight(264, 520, torch.bfloat16, d, "k_major")] for d in devices]
    call = AllGatherMatmulCall(group, shards, w, TILES[0], 30, keep=True)
    call.run(delay_cycles=1_000_000)
    assert_kept(call)


def test_strips_of_more_than_two_gigabytes() -> None:
    """CUDA copies no matrix whose rows lie so far apart; nor may any offset be counted in 32 bits."""
    group = EmulatedGroup(2)
    devices = [rank.device for rank in group.ranks]
    shards = [torch.empty(2, 70_000, 8192, device=device, dtype=torch.bfloat16) for device in devices]
    for rank, shard in enumerate(shards):
        shard[:] = torch.arange(70_000, device=shard.device)[:, None] % 200 + rank
    w = [[weight(8192, 8, torch.bfloat16, d, "k_major")] for d in devices]
    call = AllGatherMatmulCall(group, shards, w, TILES[0], 40_000, keep=True)
    call.run()
    for kept in call.kept:
        for source, shard in enumerate(shards):
            assert torch.equal(kept[:, source], shard.to(kept.device))


def test_kept_wants_contiguous_rows() -> None:
    group = EmulatedGroup(1)
    shard = torch.randn(1, 100, 512, device=group.ranks[0].device).bfloat16()[:, :, :256]
    w = weight(256, 264, torch.bfloat16, shard.device, "k_major")
    with pytest.raises(ValueError, match="stride is 512 at k = 256; pass a contiguous copy"):
        AllGatherMatmulCall(group, [shard], [[w]], TILES[0], 100, keep=True).run()


def test_strided_shard() -> None:
    group = EmulatedGroup(1)
    storage = torch.randn(2, 100, 512, device=group.ranks[0].device).bfloat16()
    shard = storage[:, :, 128:384]
    w = weight(256, 264, torch.bfloat16, shard.device, "k_major")
    (result,) = AllGatherMatmulCall(group, [shard], [[w]], TILES[0], 100).run()
    assert relative_error(result[0], product(shard, w)) < 4e-3


def end_of_a_call_without_chunks() -> tuple[bool, dict[str, int]]:
    """Whether the context of rank 0 was lost, and what its error record says."""
    group = EmulatedGroup(2)
    devices = [rank.device for rank in group.ranks]
    shards = randoms(2, (1, 256, 128), torch.bfloat16, devices)
    w = [[weight(128, 256, torch.bfloat16, d, "k_major")] for d in devices]
    call = AllGatherMatmulCall(group, shards, w, TILES[0], 128, wait_limit_ns=50_000_000)
    call.problems[1][0].wait_limit_ns = 5_000_000_000  # on one GPU, the context of rank 0 is also rank 1's
    group.synchronize()
    first = group.ranks[0]
    try:
        call.enqueue(push=False)
        first.compute.synchronize()
    except RuntimeError:
        return True, first.error()
    return False, first.error()


def test_a_missing_chunk_ends_the_context() -> None:
    """Rule R4: nothing queued behind the kernel reads a product without a chunk, and the record is whole."""
    lost, error = run_in_process(end_of_a_call_without_chunks)
    assert lost
    assert (error["state"], error["op"], error["source"]) == (2, 1, 1), error
    assert error["chunk"] in (0, 1)
    assert (error["expected"], error["seen"]) == (8, 0), error


def test_results_do_not_change_from_run_to_run() -> None:
    group = EmulatedGroup(4)
    devices = [rank.device for rank in group.ranks]
    shards = randoms(4, (1, 192, 256), torch.bfloat16, devices)
    w = [[weight(256, 520, torch.bfloat16, d, "k_major")] for d in devices]
    call = AllGatherMatmulCall(group, shards, w, TILES[0], 64, keep=True)
    first = [[product.clone() for product in products] for products in call.run()]
    for i in range(20):
        again = call.run(delay_cycles=100_000 * (i % 3))
        assert all(torch.equal(x[0], y[0]) for x, y in zip(first, again, strict=True))
        assert_kept(call)


def test_not_a_number_stays_in_its_row() -> None:
    group = EmulatedGroup(2)
    devices = [rank.device for rank in group.ranks]
    shards = randoms(2, (1, 128, 256), torch.bfloat16, devices)
    shards[1][0, 5, 7] = torch.nan
    w = [[weight(256, 256, torch.bfloat16, d, "k_major")] for d in devices]
    call = AllGatherMatmulCall(group, shards, w, TILES[0], 128, keep=True)
    for result in call.run():
        bad = result[0].isnan().all(-1).nonzero()[:, 1].tolist()
        assert bad == [128 + 5]
    assert_kept(call)
