"""matmul + reduce_scatter kernels whose partials and results are fp32: numbers and progress."""

import pytest
import torch

from tests.support.gpu_kernels import kernels

if kernels is None:
    pytest.skip("needs a Hopper GPU and the CUDA kernels", allow_module_level=True)

from tests.support.emulated_ranks import EmulatedGroup, MatmulReduceScatterCall
from tests.support.numerics import randoms, weight

from .test_matmul_reduce_scatter import FAMILIES, both_directions, run

WIDE = torch.float32
TILES = sorted({one.tile for one in kernels.matmul_reduce_scatter_kernels() if one.result == "fp32"})


@both_directions
@pytest.mark.parametrize(("element", "layout"), FAMILIES)
@pytest.mark.parametrize("tile", TILES)
def test_every_kernel_on_two_ranks(tile: str, element: str, layout: str, direction: str) -> None:
    run(
        2,
        (1, 512, 768, 512),
        tile,
        element,
        layout,
        bias=True,
        addend=True,
        scale=0.5,
        direction=direction,
        result_dtype=WIDE,
    )


@both_directions
@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("shape", [(1, 1, 8, 8), (1, 200, 328, 136), (3, 77, 264, 72), (2, 300, 1000, 264)])
def test_ragged_shapes(world: int, shape: tuple[int, int, int, int], direction: str) -> None:
    for tile in TILES:
        run(world, shape, tile, chunk_columns=1, direction=direction, result_dtype=WIDE)


@both_directions
@pytest.mark.parametrize("world", [2, 4, 8])
def test_delayed_chunks_with_terms(world: int, direction: str) -> None:
    """A tile takes twice the room: a stage is lent to it for each of its sources."""
    for tile in TILES:
        run(
            world,
            (2, 140, 1032, 520),
            tile,
            sweep=2,
            chunk_columns=3,
            delay_cycles=1_000_000,
            bias=True,
            addend=True,
            scale=0.25,
            direction=direction,
            result_dtype=WIDE,
        )


@both_directions
@pytest.mark.parametrize("tile", TILES)
def test_few_sms_on_some_ranks(tile: str, direction: str) -> None:
    """Rule R1: a rank with one resident cluster and a rank with many finish."""
    for few in ([2, 16], [16, 2]):
        run(
            2,
            (1, 1024, 1024, 256),
            tile,
            sweep=1,
            chunk_columns=1,
            addend=True,
            sms=few,
            direction=direction,
            result_dtype=WIDE,
        )


@pytest.mark.parametrize("tile", TILES)
def test_results_do_not_change_from_run_to_run_or_with_the_transport(tile: str) -> None:
    group = EmulatedGroup(4)
    devices = [rank.device for rank in group.ranks]
    xs = randoms(4, (1, 4 * 192, 256), torch.bfloat16, devices)
    ws = [weight(256, 520, torch.bfloat16, d, "k_major") for d in devices]
    calls = [
        MatmulReduceScatterCall(group, xs, ws, tile, direction=d, result=WIDE) for d in ("push", "store")
    ]
    first = [result.clone() for result in calls[0].run()]
    for i in range(20):
        again = calls[i % 2].run(delay_cycles=100_000 * (i % 3))
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True)), i
