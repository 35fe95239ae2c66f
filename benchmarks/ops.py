"""The fused ops on GPUs against cuBLAS alone, NCCL + cuBLAS, and PyTorch's async TP.

    python -m benchmarks.ops [--op all_gather_matmul] [--shapes 8192x6144x12288 ...] [--json FILE]
    python -m benchmarks.ops --world 8 --set paper

Starts one process a GPU. For each shape M x N x K (N and K of one rank's weight, bf16, random data) prints
the time of one call: the largest over ranks of the medians; all candidates take turns. "ratio" is the time
over that of the matmul alone (cuBLAS, the better of both layouts of the weight), "efficiency" how much of the
exposed communication is gone, 1 - (ours - matmul) / (unfused - matmul). Ours is the strategy's plan; what
--plans lists is timed beside it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory  # registers the ops of async TP

from benchmarks.gpu_timing import Candidate, host_us, paired
from benchmarks.shapes import SHAPES, Shape, paper_shapes
from benchmarks.versions import versions
from flux_inductor import ops  # noqa: F401  (registers the ops)
from flux_inductor.planning.ops import OPS
from flux_inductor.planning.problem import Problem
from flux_inductor.planning.strategy import choose
from flux_inductor.planning.topology import Topology
from flux_inductor.runtime.engine import installed
from flux_inductor.runtime.torch_private import process_group
from tests.support.gpu_ranks import nccl_group, run_gpu_ranks, why_not

LINK_GBPS = 385  # of a copy engine, both directions at once
BURST = 8
# Rounds: as many as keep the device busy for so long, within limits; a large product's time varies less.
BUSY_US, FEWEST, MOST = 10_000, 7, 21
TFLOPS = 600  # roughly, of a large product


def plan_for(kind: str, world: int, m: int, n: int, k: int, keep: bool) -> str:
    """The strategy's plan, which may be to leave the pair unfused."""
    problem = Problem(NAMED[kind], world, 1, m // world, (n,), k, "bf16", return_gathered=keep)
    return str(choose(problem, Topology("cuda", world, link="nvlink"), "auto", installed=installed()).plan)


def gather_candidates(group: str, m: int, n: int, k: int, plans: list[str]) -> dict[str, Candidate]:
    world = process_group(group).size()
    shard = torch.randn(m // world, k, device="cuda").bfloat16()
    weight = (torch.randn(n, k, device="cuda") / k**0.5).bfloat16().t()
    whole, product = shard.new_empty(m, k), shard.new_empty(m, n)
    dist.all_gather_into_tensor(whole, shard, process_group(group))
    other = weight.contiguous()
    fused = torch.ops.flux_inductor.all_gather_matmul

    def unfused() -> None:
        gathered = shard.new_empty(m, k)
        dist.all_gather_into_tensor(gathered, shard, process_group(group))
        torch.mm(gathered, weight)

    def ours(plan: str, keep: bool) -> Candidate:
        # The pass leaves such a pair as it is.
        return unfused if plan == "unfused" else lambda: fused(shard, [weight], [], group, plan, 0, keep)

    candidates: dict[str, Candidate] = {
        "matmul": lambda: torch.mm(whole, weight, out=product),
        "matmul, other layout": lambda: torch.mm(whole, other, out=product),
        "unfused": unfused,
        "async TP": lambda: torch.ops.symm_mem.fused_all_gather_matmul(shard, [weight], 0, group),
        "ours": ours(plan_for("all_gather_matmul", world, m, n, k, False), False),
        "ours, gathered kept": ours(plan_for("all_gather_matmul", world, m, n, k, True), True),
    }
    return candidates | {plan: ours(plan, False) for plan in plans}


def scatter_candidates(group: str, m: int, n: int, k: int, plans: list[str]) -> dict[str, Candidate]:
    world = process_group(group).size()
    x = torch.randn(m, k, device="cuda").bfloat16()
    weight = (torch.randn(n, k, device="cuda") / k**0.5).bfloat16().t()
    product = x.new_empty(m, n)
    other = weight.contiguous()
    fused = torch.ops.flux_inductor.matmul_reduce_scatter

    def unfused() -> None:
        dist.reduce_scatter_tensor(
            x.new_empty(m // world, n), torch.mm(x, weight), group=process_group(group)
        )

    def ours(plan: str) -> Candidate:
        if plan == "unfused":
            return unfused
        return lambda: fused(x, weight, None, None, group, plan, 0, "sum", 1.0)

    candidates: dict[str, Candidate] = {
        "matmul": lambda: torch.mm(x, weight, out=product),
        "matmul, other layout": lambda: torch.mm(x, other, out=product),
        "unfused": unfused,
        "async TP": lambda: torch.ops.symm_mem.fused_matmul_reduce_scatter(x, weight, "sum", 0, group),
        "ours": ours(plan_for("matmul_reduce_scatter", world, m, n, k, False)),
    }
    return candidates | {plan: ours(plan) for plan in plans}


NAMED = {op.name: op for op in OPS}
CANDIDATES = {"all_gather_matmul": gather_candidates, "matmul_reduce_scatter": scatter_candidates}


def measure(
    rank: int, world: int, shapes: list[tuple[str, Shape]], plans: list[str], rounds: int | None
) -> Any:
    """One row a shape and candidate; the same on every rank."""
    # Nothing else communicates while an op is timed: plans keep no SMs free for it.
    os.environ["FLUX_INDUCTOR_RESERVE_SMS"] = "0"
    group = nccl_group(world)
    torch.use_deterministic_algorithms(False)  # no filling of new tensors while the clock runs
    rows: list[dict[str, Any]] = []
    for kind, (m, n, k) in shapes:
        candidates = CANDIDATES[kind](group, m, n, k, plans)
        for name, call in list(candidates.items()):
            try:
                call()
            except ValueError as error:  # a plan whose tile was not compiled
                if rank == 0:
                    print(f"{name}: {error}", file=sys.stderr)
                del candidates[name]
        turns = rounds or rounds_for((m, n, k))
        single = paired(candidates, process_group(group), turns)
        bursts = paired(candidates, process_group(group), max(turns // 3, 3), BURST)
        matmul = min(single["matmul"], single["matmul, other layout"])
        burst_matmul = min(bursts["matmul"], bursts["matmul, other layout"])
        moved = m // world * (world - 1) * (k if kind == "all_gather_matmul" else n) * 2
        bound = max(matmul, moved / LINK_GBPS / 1e3)
        for name, us in single.items():
            rows.append(
                {
                    "op": kind,
                    "m": m,
                    "n": n,
                    "k": k,
                    "candidate": name,
                    "plan": plan_for(kind, world, m, n, k, "kept" in name) if name.startswith("ours") else "",
                    "us": us,
                    "burst_us": bursts[name],
                    "ratio": us / matmul,
                    "burst_ratio": bursts[name] / burst_matmul,
                    "bound_ratio": us / bound,
                    "tflops": 2 * m * n * k / us / 1e6,
                    "ect_us": us - matmul,
                    "efficiency": 1 - (us - matmul) / (single["unfused"] - matmul),
                    "host_us": host_us(candidates[name], calls=10, rounds=5)
                    if name.startswith("ours")
                    else math.nan,
                }
            )
        if rank == 0:
            print_shape(kind, (m, n, k), rows[-len(single) :])
    return rows


def rounds_for(shape: Shape) -> int:
    """How often each candidate is timed; the same on all ranks."""
    m, n, k = shape
    return min(max(int(BUSY_US / (2 * m * n * k / TFLOPS / 1e6)), FEWEST), MOST)


def print_shape(kind: str, shape: Shape, rows: list[dict[str, Any]]) -> None:
    m, n, k = shape
    print(f"\n{kind} M={m} N={n} K={k}")
    print(f"{'':48}{'us':>9}{'ratio':>8}{'burst':>8}{'bound':>8}{'TFLOP/s':>9}{'effic.':>8}{'host us':>9}")
    for row in rows:
        print(
            f"{row['candidate']:48}{row['us']:9.1f}{row['ratio']:8.3f}{row['burst_ratio']:8.3f}"
            f"{row['bound_ratio']:8.3f}{row['tflops']:9.0f}{row['efficiency']:8.2f}{row['host_us']:9.1f}",
            flush=True,
        )


def summary(rows: list[dict[str, Any]]) -> str:
    """One line a shape: every way's time over that of the matmul alone, and "ours" in bursts."""
    names = ("unfused", "async TP", "ours", "ours, gathered kept")
    lines = [
        f"{'op':3}{'M':>7}{'N':>7}{'K':>7}{'matmul us':>11}"
        f"{'unfused':>9}{'async':>7}{'ours':>7}{'kept':>7}{'burst':>7}{'host us':>9}  plan"
    ]
    for op, m, n, k in dict.fromkeys((row["op"], row["m"], row["n"], row["k"]) for row in rows):
        mine = {r["candidate"]: r for r in rows if (r["op"], r["m"], r["n"], r["k"]) == (op, m, n, k)}
        ratios = [f"{mine[name]['ratio']:.3f}" if name in mine else "" for name in names]
        ours, short = mine["ours"], "AG" if op == "all_gather_matmul" else "RS"
        lines.append(
            f"{short:3}{m:7}{n:7}{k:7}{ours['us'] / ours['ratio']:11.1f}"
            f"{ratios[0]:>9}{ratios[1]:>7}{ratios[2]:>7}{ratios[3]:>7}{ours['burst_ratio']:7.3f}"
            f"{ours['host_us']:9.1f}  {ours['plan']}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--op", choices=sorted(SHAPES), action="append", help="default: both")
    parser.add_argument("--shapes", nargs="*", help="MxNxK; default: those of --set")
    parser.add_argument("--set", choices=("goals", "paper"), default="goals", help="which shapes")
    parser.add_argument("--plans", nargs="*", default=[], help="further plans to time")
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--rounds", type=int, help="default: by the size of the product")
    parser.add_argument("--json", help="write the figures there")
    options = parser.parse_args()
    if why_not(options.world):
        raise SystemExit(f"benchmarks.ops cannot run here: {why_not(options.world)}")
    given = [tuple(map(int, shape.split("x"))) for shape in options.shapes or []]
    chosen = SHAPES if options.set == "goals" else paper_shapes(options.world)
    shapes = [(op, shape) for op in options.op or sorted(SHAPES) for shape in given or chosen[op]]
    rows = run_gpu_ranks(measure, shapes, options.plans, options.rounds, world=options.world, timeout=900)[0]
    print(f"\n{summary(rows)}")
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"versions": versions("ops"), "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
