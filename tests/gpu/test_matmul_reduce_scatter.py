"""matmul + reduce_scatter kernels: numbers, progress, and waits, with all ranks played by one process."""

import pytest
import torch

from .kernels import kernels

if kernels is None:
    pytest.skip("needs a Hopper GPU and the CUDA kernels", allow_module_level=True)

from .numerics import product, randoms, relative_error, weight
from .virtual_ranks import AllGatherMatmulCall, MatmulReduceScatterCall, VirtualGroup

TILES = sorted({entry.tile for entry in kernels.matmul_reduce_scatter_kernels()})
GATHER_TILES = sorted({entry.tile for entry in kernels.all_gather_matmul_kernels()})
FAMILIES = sorted({(entry.element, entry.layout) for entry in kernels.matmul_reduce_scatter_kernels()})
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


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
    multiprocessors: list[int] | None = None,
) -> list[torch.Tensor]:
    """One call on every rank, checked against fp64 and the error of rounded matmuls summed over the ranks."""
    strips, rows, n, k = shape
    dtype = DTYPES[element]
    group = VirtualGroup(world)
    devices = [rank.device for rank in group.ranks]
    xs = randoms(world, (strips, world * rows, k), dtype, devices)
    ws = [weight(k, n, dtype, d, layout) for d in devices]
    bs = randoms(world, (n,), dtype, devices) if bias else None
    adds = randoms(world, (strips, world * rows, n), dtype, devices) if addend else None
    call = MatmulReduceScatterCall(
        group, xs, ws, tile, bs, adds, scale, sweep, chunk_columns, multiprocessors=multiprocessors
    )
    results = call.run(delay_cycles)
    home = devices[0]
    exact = torch.zeros(strips, world * rows, n, dtype=torch.float64, device=home)
    unfused = torch.zeros(strips, world * rows, n, dtype=dtype, device=home)
    for i in range(world):
        whole, rounded = scale * product(xs[i], ws[i]), (scale * torch.matmul(xs[i], ws[i])).to(dtype)
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
    return results


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(("sweep", "chunk_columns"), [(1, 1), (2, 3), (16, 100)])
def test_chunks_cover_the_peers_parts_once(tile: str, sweep: int, chunk_columns: int) -> None:
    world, rank, strips, rows, n = 3, 1, 2, 300, 1000
    p = kernels.MatmulReduceScatter()
    p.world, p.rank, p.strips, p.rows, p.n, p.k = world, rank, strips, rows, n, 64
    p.group, p.chunk_columns = sweep, chunk_columns
    entry = next(e for e in kernels.matmul_reduce_scatter_kernels() if e.tile == tile)
    covered = torch.zeros(world, strips * rows, n, dtype=torch.int32)
    tile_m, tile_n = (int(size) for size in tile.split("x")[:2])
    chunks = kernels.scatter_chunks(entry, p)
    for chunk in chunks:
        covered[chunk.part, chunk.first_row : chunk.last_row, chunk.first_column : chunk.last_column] += 1
    assert covered[[0, 2]].eq(1).all()
    assert not covered[rank].any()
    assert [chunk.part for chunk in chunks] == sorted((c.part for c in chunks), reverse=True)  # 2, then 0
    tiles = strips * -(-rows // tile_m) * -(-n // tile_n)
    assert sum(chunk.tiles for chunk in chunks) == (world - 1) * tiles


@pytest.mark.parametrize("tile", TILES)
def test_every_tile_on_two_ranks(tile: str) -> None:
    run(2, (1, 512, 768, 512), tile, bias=True, addend=True, scale=0.5)


@pytest.mark.parametrize(("element", "layout"), FAMILIES)
def test_every_family(element: str, layout: str) -> None:
    run(2, (1, 384, 512, 512), TILES[0], element, layout)


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("shape", [(1, 1, 8, 8), (1, 200, 328, 136), (3, 77, 264, 72), (2, 300, 1000, 264)])
def test_ragged_shapes(world: int, shape: tuple[int, int, int, int]) -> None:
    run(world, shape, TILES[0], chunk_columns=1)


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_addend_bias_and_scale(world: int) -> None:
    run(world, (2, 140, 520, 256), TILES[-1], bias=True, addend=True, scale=0.25)


@pytest.mark.parametrize("world", [2, 4, 8])
def test_delayed_chunks(world: int) -> None:
    for sweep, chunk_columns in [(1, 1), (2, 3), (8, 100)]:
        run(
            world,
            (1, 512, 1536, 512),
            TILES[0],
            sweep=sweep,
            chunk_columns=chunk_columns,
            delay_cycles=3_000_000,
        )


@pytest.mark.parametrize("world", [2, 4])
def test_few_multiprocessors_on_some_ranks(world: int) -> None:
    """Rule R1: a rank with one resident cluster and ranks with many finish."""
    run(world, (1, 512, 1024, 256), TILES[0], multiprocessors=[2] + [16] * (world - 1))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_other_kernels_hold_most_multiprocessors_of_both_ranks() -> None:
    """Rule R1: both ranks finish while most of their blocks are not even resident.

    With a fixed share of the tiles for every block this would last as long as the other kernels do: each rank
    would wait for tiles of the other's absent blocks. The other kernels are gathers whose chunks never come.
    """
    others, group = VirtualGroup(2), VirtualGroup(2)
    devices = [rank.device for rank in group.ranks]
    for rank in others.ranks:
        rank.multiprocessors -= 12
    shards = randoms(2, (1, 8192, 128), torch.bfloat16, devices)
    w = [[weight(128, 256, torch.bfloat16, d, "k_major")] for d in devices]
    holding = AllGatherMatmulCall(others, shards, w, GATHER_TILES[0], 8192, wait_limit_ns=500_000_000)
    xs = randoms(2, (1, 4096, 256), torch.bfloat16, devices)
    ws = [weight(256, 2048, torch.bfloat16, d, "k_major") for d in devices]
    call = MatmulReduceScatterCall(group, xs, ws, TILES[0])
    group.synchronize()
    holding.enqueue(push=False)
    call.enqueue()
    for rank in group.ranks:
        rank.compute.synchronize()
    assert not any(rank.compute.query() for rank in others.ranks)
    assert all(rank.error()["state"] == 0 for rank in group.ranks)
    others.synchronize()
    exact = product(xs[0], ws[0]) + product(xs[1], ws[1]).to(devices[0])
    for i in range(2):
        assert relative_error(call.parts[i][i], exact[:, 2048 * i : 2048 * (i + 1)]) < 5e-3


def test_missing_partials_end_the_wait() -> None:
    group = VirtualGroup(2)
    devices = [rank.device for rank in group.ranks]
    xs = randoms(2, (1, 512, 128), torch.bfloat16, devices)
    ws = [weight(128, 256, torch.bfloat16, d, "k_major") for d in devices]
    MatmulReduceScatterCall(group, xs, ws, TILES[0], wait_limit_ns=50_000_000).run(push=False)
    for rank in group.ranks:
        error = rank.error()
        assert (error["state"], error["op"], error["source"]) == (2, 2, 1 - rank.index), error
        assert (error["expected"], error["seen"]) == (8, 0), error


def test_results_do_not_change_from_run_to_run() -> None:
    group = VirtualGroup(4)
    devices = [rank.device for rank in group.ranks]
    xs = randoms(4, (1, 4 * 192, 256), torch.bfloat16, devices)
    ws = [weight(256, 520, torch.bfloat16, d, "k_major") for d in devices]
    call = MatmulReduceScatterCall(group, xs, ws, TILES[0])
    first = [result.clone() for result in call.run()]
    for i in range(20):
        again = call.run(delay_cycles=100_000 * (i % 3))
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
