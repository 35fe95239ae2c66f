"""Both ops on tiny shapes, for NVIDIA's compute-sanitizer, which slows kernels down 10 to 100 times.

    compute-sanitizer --tool memcheck python -m tests.gpu.sanitize
    compute-sanitizer --tool racecheck --kernel-regex kns=device_kernel python -m tests.gpu.sanitize

Two ranks played by one process; a cooperative tile and one of the other kind, a gathered tensor that is kept,
both transports of matmul_reduce_scatter. The tool may let one rank's kernel run only after the other's, so no
kernel may wait for another: a gather's chunks are pushed before any kernel starts, and a scatter finds all
partials declared as there already. So only gathers have results to compare; the tool watches all accesses.
"""

from __future__ import annotations

import os
from typing import Any

# An allocation a tensor: an access beyond its end is beyond an allocation's end, which the tool sees.
os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")

import torch

from tests.support import emulated_ranks
from tests.support.emulated_ranks import AllGatherMatmulCall, EmulatedGroup, MatmulReduceScatterCall
from tests.support.gpu_kernels import kernels
from tests.support.numerics import product, randoms, relative_error, weight

WORLD = 2
GATHER_TILES = ("128x192x64/2x1", "128x128x64/2x1/pingpong")
SCATTER_TILES = ("128x192x64/2x1", "64x256x64/2x1")  # of two warpgroups, and of one
SMS = 4
WAIT_LIMIT_NS = 300_000_000_000
LATER = 1 << 20  # an epoch that these calls do not reach


class FewKernels:
    """The bindings with the kernels that are used here: preparing one instruments all of its code."""

    def __getattr__(self, name: str) -> Any:
        return getattr(kernels, name)

    def all_gather_matmul_kernels(self) -> list[Any]:
        return self._used(kernels.all_gather_matmul_kernels(), GATHER_TILES)

    def matmul_reduce_scatter_kernels(self) -> list[Any]:
        return self._used(kernels.matmul_reduce_scatter_kernels(), SCATTER_TILES)

    def _used(self, entries: list[Any], tiles: tuple[str, ...]) -> list[Any]:
        used = ("bf16", "bf16", "k_major")
        return [e for e in entries if e.tile in tiles and (e.element, e.result, e.layout) == used]


def small_group() -> EmulatedGroup:
    group = EmulatedGroup(WORLD)
    for rank in group.ranks:
        rank.sms = SMS
    return group


def finish(group: EmulatedGroup, what: str) -> None:
    for rank in group.ranks:
        assert rank.error()["state"] == 0, (what, rank.error())
    print(f"{what}: done", flush=True)


def gather(tile: str, keep: bool) -> None:
    strips, rows, n, k = 2, 150, 328, 136
    group = small_group()
    devices = [rank.device for rank in group.ranks]
    shards = randoms(WORLD, (strips, rows, k), torch.bfloat16, devices)
    weights = [[weight(k, n, torch.bfloat16, device, "k_major")] for device in devices]
    call = AllGatherMatmulCall(
        group,
        shards,
        weights,
        tile,
        rows_per_chunk=64,
        wait_limit_ns=WAIT_LIMIT_NS,
        keep=keep,
        last_rows=70,
        slices=2,
    )
    results = call.run()
    whole = torch.cat([shard.to(devices[0]) for shard in shards], dim=1)
    for rank, (mine,) in zip(group.ranks, results, strict=True):
        error = relative_error(mine, product(whole, weights[rank.index][0].to(devices[0])))
        assert error < 5e-3, (tile, keep, rank.index, error)
    for kept in call.kept:
        assert torch.equal(kept.to(devices[0]).view_as(whole), whole)
    finish(group, f"all_gather_matmul {tile}{' kept' if keep else ''}")


def scatter(tile: str, direction: str) -> None:
    strips, rows, n, k = 2, 150, 520, 136
    group = small_group()
    devices = [rank.device for rank in group.ranks]
    xs = randoms(WORLD, (strips, WORLD * rows, k), torch.bfloat16, devices)
    weights = [weight(k, n, torch.bfloat16, device, "k_major") for device in devices]
    for rank in group.ranks:
        rank.signals.fill_(LATER)
    call = MatmulReduceScatterCall(
        group, xs, weights, tile, chunk_columns=1, wait_limit_ns=WAIT_LIMIT_NS, direction=direction
    )
    call.run()
    finish(group, f"matmul_reduce_scatter {tile} {direction}")


def main() -> None:
    if kernels is None:
        raise SystemExit("tests.gpu.sanitize needs a Hopper GPU and the CUDA kernels")
    vars(emulated_ranks)["kernels"] = FewKernels()
    for tile in GATHER_TILES:
        for keep in (False, True):
            gather(tile, keep)
    for tile in SCATTER_TILES:
        for direction in ("push", "store"):
            scatter(tile, direction)


if __name__ == "__main__":
    main()
