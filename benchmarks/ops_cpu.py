"""Fused ops on CPU ranks against the same ops unfused, and the cost model's raw quantities.

    python -m benchmarks.ops_cpu [--ranks 2] [--calls 30]

All methods run in turns in one program, since absolute times drift. A time is the slowest rank's median, in
microseconds; with more ranks than cores it says little about the ranks' own speed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from flux_inductor.planning.ops import ALL_GATHER_MATMUL, MATMUL_REDUCE_SCATTER
from flux_inductor.planning.plan import UNFUSED, Plan
from flux_inductor.runtime.engine import engine_for
from tests.support.engines import bind_gather, bind_scatter
from tests.support.ranks import run_ranks

GROUP = "0"
CHUNKS = (32, 128, 512)


@dataclass(frozen=True)
class Shape:
    """M rows of the whole product, K and N on each rank (the whole N for a reduce_scatter)."""

    op: str
    m: int
    k: int
    n: int
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.op:3} {self.m:5} {self.k:5} {self.n:5} {str(self.dtype).removeprefix('torch.'):8}"


SHAPES = [
    Shape(op, m, k, n, dtype)
    for dtype in (torch.float32, torch.bfloat16)
    for op in ("ag", "rs")
    for m, k, n in ((16, 256, 256), (128, 256, 256), (512, 256, 1024), (1024, 1024, 1024), (2048, 1024, 512))
]


def operation(shape: Shape, rank: int, world: int, plan: Plan) -> Callable[[], object]:
    torch.manual_seed(rank)
    weight = torch.randn(shape.k, shape.n).to(shape.dtype)
    if shape.op == "ag":
        x = torch.randn(shape.m // world, shape.k).to(shape.dtype)
        engine = engine_for(ALL_GATHER_MATMUL, "cpu", GROUP, plan)
        gather = bind_gather(engine, x, [weight], [], GROUP, plan, 0, False)
        return lambda: gather(x, [weight], [])
    x = torch.randn(shape.m, shape.k).to(shape.dtype)
    engine = engine_for(MATMUL_REDUCE_SCATTER, "cpu", GROUP, plan)
    scatter = bind_scatter(engine, x, weight, None, None, GROUP, plan, 0, "sum", 1.0)
    return lambda: scatter(x, weight, None, None)


def matmul(shape: Shape) -> Callable[[], object]:
    x, weight = (torch.randn(*size).to(shape.dtype) for size in ((shape.m, shape.k), (shape.k, shape.n)))
    return lambda: torch.mm(x, weight)


def times(methods: dict[str, Callable[[], object]], calls: int) -> dict[str, float]:
    """Medians of this rank, in us; the methods take turns."""
    spent: dict[str, list[float]] = {name: [] for name in methods}
    for turn in range(calls + 3):
        for name, method in methods.items():
            start = time.perf_counter()
            method()
            if turn >= 3:
                spent[name].append((time.perf_counter() - start) * 1e6)
    return {name: statistics.median(values) for name, values in spent.items()}


def measure(rank: int, world: int, calls: int) -> list[tuple[Shape, dict[str, float]]]:
    rows = []
    for shape in SHAPES:
        methods = {"matmul": matmul(shape), "unfused": operation(shape, rank, world, UNFUSED)}
        for direction in ("push", "pull"):
            for chunk in CHUNKS:
                if chunk <= max(shape.m // world, CHUNKS[0]):
                    plan = Plan("mesh", direction, chunk)  # type: ignore[arg-type]
                    methods[f"{direction} {chunk}"] = operation(shape, rank, world, plan)
        mine = times(methods, calls)
        slowest = torch.tensor(list(mine.values()))
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        rows.append((shape, dict(zip(mine, slowest.tolist(), strict=True))))
    return rows


def collectives(rank: int, world: int, calls: int) -> list[tuple[str, int, float]]:
    """(collective, bytes of the whole tensor, us) of what the unfused ops use."""
    functional = torch.ops._c10d_functional

    def gather(shard: Tensor) -> object:
        return functional.wait_tensor(functional.all_gather_into_tensor(shard, world, GROUP))

    def scatter(whole: Tensor) -> object:
        return functional.wait_tensor(functional.reduce_scatter_tensor(whole, "sum", world, GROUP))

    rows = []
    for exponent in (10, 14, 18, 20, 22, 24):
        whole = torch.randn(2**exponent // 4)
        shard = whole[: whole.numel() // world].clone()
        for name, method in (
            ("all_gather", lambda shard=shard: gather(shard)),
            ("reduce_scatter", lambda whole=whole: scatter(whole)),
        ):
            rows.append((name, 2**exponent, times({"it": method}, calls)["it"]))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--calls", type=int, default=30)
    options = parser.parse_args()
    for name, size, spent in run_ranks(collectives, options.ranks, options.calls, timeout=300)[0]:
        print(f"{name:15} {size:9} bytes {spent:9.0f} us  {size / spent / 1e3:6.2f} GB/s")
    print(f"\n{'op':3} {'M':>5} {'K':>5} {'N':>5} dtype      matmul  unfused    best fused")
    for shape, spent in run_ranks(measure, options.ranks, options.calls, timeout=1800)[0]:
        fused = {name: value for name, value in spent.items() if name.startswith("pu")}
        best = min(fused, key=lambda name: fused[name])
        listed = "  ".join(f"{name}: {value:.0f}" for name, value in fused.items())
        gain = spent["unfused"] / fused[best]
        plain = f"{spent['matmul']:8.0f} {spent['unfused']:8.0f}"
        print(f"{shape} {plain} {fused[best]:8.0f} {gain:5.2f}x  {listed}")


if __name__ == "__main__":
    main()
