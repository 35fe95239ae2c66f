"""The CUDA kernels against cuBLAS, without the runtime: one process plays both ranks on two GPUs.

    python -m benchmarks.kernels [--op all_gather_matmul] [--shapes 8192x6144x12288 ...] [--json FILE]

For each shape M x N x K (N and K of the weight each rank holds) and each configuration, prints the time of
the fused op, maximum over ranks of the medians, over that of the cuBLAS product alone. All candidates of a
shape take turns in one loop, since clocks drift; both ranks start each call together, behind an event of one
of them.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Iterator

import torch

from benchmarks.shapes import SHAPES
from benchmarks.versions import versions
from tests.support.emulated_ranks import AllGatherMatmulCall, EmulatedGroup, MatmulReduceScatterCall
from tests.support.gpu_kernels import kernels

SWEPT_ROWS = 2048
Candidates = Iterator[tuple[str, Callable[[], None]]]


def timed(group: EmulatedGroup, candidates: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Microseconds of each candidate: maximum over ranks of the median over rounds."""
    times: dict[str, list[list[float]]] = {name: [[] for _ in group.ranks] for name in candidates}
    streams = [rank.compute for rank in group.ranks]
    for turn in range(rounds + 2):
        for name, call in candidates.items():
            group.synchronize()
            with torch.cuda.device(group.ranks[0].device), torch.cuda.stream(streams[0]):
                torch.cuda._sleep(1_000_000)  # the host enqueues everything meanwhile
                together = torch.cuda.Event()
                together.record(streams[0])
            begins, ends = [], []
            for rank, stream in zip(group.ranks, streams, strict=True):
                with torch.cuda.device(rank.device):
                    stream.wait_event(together)
                    begins.append(torch.cuda.Event(enable_timing=True))
                    begins[-1].record(stream)
            call()
            for rank, stream in zip(group.ranks, streams, strict=True):
                with torch.cuda.device(rank.device):
                    ends.append(torch.cuda.Event(enable_timing=True))
                    ends[-1].record(stream)
            group.synchronize()
            if turn >= 2:
                for i, (begin, end) in enumerate(zip(begins, ends, strict=True)):
                    times[name][i].append(begin.elapsed_time(end) * 1e3)
    return {name: max(statistics.median(t) for t in ranks) for name, ranks in times.items()}


def cublas(group: EmulatedGroup, xs: list[torch.Tensor], ws: list[torch.Tensor]) -> Callable[[], None]:
    outs = [
        torch.empty(x.shape[0], w.shape[1], dtype=x.dtype, device=x.device)
        for x, w in zip(xs, ws, strict=True)
    ]

    def call() -> None:
        for rank, x, w, out in zip(group.ranks, xs, ws, outs, strict=True):
            with torch.cuda.device(x.device), torch.cuda.stream(rank.compute):
                torch.mm(x, w, out=out)

    return call


def all_gather_candidates(group: EmulatedGroup, m: int, n: int, k: int) -> Candidates:
    """Every compiled tile with one, two and four chunks a shard; with four also with the shards kept."""
    devices = [rank.device for rank in group.ranks]
    rows = m // group.world
    shards = [torch.randn(1, rows, k, device=d, dtype=torch.bfloat16) for d in devices]
    ws = [torch.randn(n, k, device=d, dtype=torch.bfloat16).t() for d in devices]
    whole = [torch.cat([s[0].to(d) for s in shards]) for d in devices]
    yield "cublas", cublas(group, whole, ws)
    yield "cublas, other layout", cublas(group, whole, [w.contiguous() for w in ws])
    alone = group.alone()
    for entry in kernels.all_gather_matmul_kernels():
        if (entry.element, entry.layout) != ("bf16", "k_major"):
            continue
        sweep_rows = 2 * int(entry.tile.split("x")[0])
        local = AllGatherMatmulCall(
            alone, [whole[0][None]], [[ws[0]]], entry.tile, m, sweep=SWEPT_ROWS // sweep_rows
        )
        yield f"{entry.tile} gathered", local.enqueue
        for chunks in (1, 2, 4):
            chunk = -(-rows // chunks)
            # A sweep over more rows than a chunk has waits for the next chunk before it has used the first.
            sweep = max(1, min(SWEPT_ROWS, chunk) // sweep_rows)
            call = AllGatherMatmulCall(group, shards, [[w] for w in ws], entry.tile, chunk, sweep=sweep)
            yield f"{entry.tile} chunks={chunks}", call.enqueue
        weights = [[w] for w in ws]
        keeping = AllGatherMatmulCall(group, shards, weights, entry.tile, chunk, sweep=sweep, keep=True)
        yield f"{entry.tile} chunks={chunks} kept", keeping.enqueue


def reduce_scatter_candidates(group: EmulatedGroup, m: int, n: int, k: int) -> Candidates:
    """Every compiled tile with several ways to cut the chunks; with four cuts also stored by the kernel."""
    devices = [rank.device for rank in group.ranks]
    xs = [torch.randn(1, m, k, device=d, dtype=torch.bfloat16) for d in devices]
    ws = [torch.randn(n, k, device=d, dtype=torch.bfloat16).t() for d in devices]
    yield "cublas", cublas(group, [x[0] for x in xs], ws)
    yield "cublas, other layout", cublas(group, [x[0] for x in xs], [w.contiguous() for w in ws])
    alone = group.alone()
    for entry in kernels.matmul_reduce_scatter_kernels():
        if (entry.element, entry.result, entry.layout) != ("bf16", "bf16", "k_major"):
            continue
        tile_m, tile_n = (int(size) for size in entry.tile.split("x")[:2])
        local = MatmulReduceScatterCall(alone, xs[:1], ws[:1], entry.tile, sweep=1024 // tile_m)
        yield f"{entry.tile} alone", local.enqueue
        columns = -(-n // tile_n)
        for sweep in {1024 // tile_m, 2048 // tile_m}:
            for cuts in (1, 2, 4):
                call = MatmulReduceScatterCall(
                    group, xs, ws, entry.tile, sweep=sweep, chunk_columns=-(-columns // cuts)
                )
                yield f"{entry.tile} sweep={sweep} cuts={cuts}", call.enqueue
            cut = -(-columns // cuts)
            stores = MatmulReduceScatterCall(
                group, xs, ws, entry.tile, sweep=sweep, chunk_columns=cut, direction="store"
            )
            yield f"{entry.tile} sweep={sweep} cuts={cuts} store", stores.enqueue


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--op", choices=sorted(SHAPES), action="append", help="default: both")
    parser.add_argument("--shapes", nargs="*", help="MxNxK; default: the shapes of the project's goals")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", help="write the figures there")
    options = parser.parse_args()
    group = EmulatedGroup(2)
    results = []
    for op in options.op or sorted(SHAPES):
        candidates_of = all_gather_candidates if op == "all_gather_matmul" else reduce_scatter_candidates
        shapes = [tuple(map(int, s.split("x"))) for s in options.shapes] if options.shapes else SHAPES[op]
        for m, n, k in shapes:
            times = timed(group, dict(candidates_of(group, m, n, k)), options.rounds)
            base = min(time for name, time in times.items() if name.startswith("cublas"))
            print(f"{op} M={m} N={n} K={k}: cuBLAS {base:.1f} us", flush=True)
            for name, time in sorted(times.items(), key=lambda item: item[1]):
                print(f"    {name:40s} {time:8.1f} us  {time / base:.3f}", flush=True)
                results.append(
                    {"op": op, "m": m, "n": n, "k": k, "candidate": name, "us": time, "ratio": time / base}
                )
            assert all(rank.error()["state"] == 0 for rank in group.ranks), [
                rank.error() for rank in group.ranks
            ]
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"versions": versions("kernels"), "results": results}, file, indent=1)


if __name__ == "__main__":
    main()
