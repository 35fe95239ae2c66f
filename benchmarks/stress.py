"""Many fused calls of random ops, sizes and plans on CPU ranks that are delayed at random.

    python -m benchmarks.stress [--calls 10000] [--ranks 4] [--seed 0]

Inputs are small integers, so that every result is exact in every dtype and is compared for equality: one
chunk taken too early, or overwritten too early, shows.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from flux_inductor.planning.ops import ALL_GATHER_MATMUL, MATMUL_REDUCE_SCATTER
from flux_inductor.planning.plan import Plan
from flux_inductor.runtime import cpu_group
from flux_inductor.runtime.cpu_group import CpuGroup
from flux_inductor.runtime.engine import engine_for, executions
from flux_inductor.runtime.groups import state_of
from tests.support.engines import bind_gather, bind_scatter
from tests.support.ranks import run_ranks

GROUP = "0"
POOL = 1 << 20  # numbers that inputs are cut from
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SLOW_S = 0.003  # the longest delay
DELAYED = 0.1  # share of calls before which a rank is delayed


@dataclass(frozen=True)
class Result:
    calls: int
    seconds: float
    workspace_bytes: int
    scratch_bytes: int
    largest_bytes: int  # gathered tensor, or whole product, of the largest op


class Program:
    """The same random calls on every rank."""

    def __init__(self, rank: int, world: int, seed: int) -> None:
        self.rank, self.world = rank, world
        self.choice = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        self.pool = torch.randint(-1, 2, (POOL,), generator=generator).float()
        self.largest_bytes = 0

    def tensor(self, dtype: torch.dtype, *shape: int) -> Tensor:
        count = int(torch.Size(shape).numel())
        start = self.choice.randrange(POOL - count)
        return self.pool[start : start + count].view(shape).to(dtype)

    def plan(self) -> Plan:
        chunk = self.choice.choice((1, 2, 3, 8, 100))
        return Plan("mesh", self.choice.choice(("push", "pull")), chunk)

    def sizes(self) -> tuple[int, int, int, int]:
        """Strips, rows, K, N; now and then large ones, for which the workspace must grow."""
        large = self.choice.random() < 0.005
        rows = self.choice.randint(1, 64 if large else 12)
        return self.choice.choice((1, 1, 3)), rows, self.choice.randint(1, 48), self.choice.randint(1, 48)

    def gather(self) -> bool:
        strips, rows, depth, columns = self.sizes()
        dtype, wanted = self.choice.choice(DTYPES), self.choice.random() < 0.5
        shards = [self.tensor(dtype, strips, rows, depth) for _ in range(self.world)]
        weight = self.tensor(dtype, depth, columns)
        plan = self.plan()
        engine = engine_for(ALL_GATHER_MATMUL, "cpu", GROUP, plan)
        call = bind_gather(engine, shards[self.rank], [weight], [], GROUP, plan, 1, wanted)
        outputs = call(shards[self.rank], [weight], [])
        whole = torch.cat(shards, 1)
        self.largest_bytes = max(self.largest_bytes, whole.nbytes)
        right = torch.equal(outputs[0], (whole.float() @ weight.float()).to(dtype))
        return right and (not wanted or torch.equal(outputs[1], whole))

    def scatter(self) -> bool:
        strips, rows, depth, columns = self.sizes()
        dtype, dim = self.choice.choice(DTYPES), self.choice.choice((1, 2))
        inputs = [self.tensor(dtype, strips, rows * self.world, depth) for _ in range(self.world)]
        weight = self.tensor(dtype, depth, columns * self.world)
        plan = self.plan()
        engine = engine_for(MATMUL_REDUCE_SCATTER, "cpu", GROUP, plan)
        x = inputs[self.rank]
        result = bind_scatter(engine, x, weight, None, None, GROUP, plan, dim, "sum", 1.0)(
            x, weight, None, None
        )
        product = (torch.stack(inputs).sum(0).float() @ weight.float()).to(dtype)
        self.largest_bytes = max(self.largest_bytes, product.nbytes)
        return torch.equal(result, product.chunk(self.world, dim)[self.rank])


def run(rank: int, world: int, calls: int, seed: int) -> Result:
    """Body of one rank.

    Raises:
        AssertionError: a result was wrong, or a call did not run on the cpu engine.
    """
    if rank % 2 == 1:
        cpu_group.INLINE_BYTES = 0  # small transfers by the thread on these ranks, by the caller on others
    program = Program(rank, world, seed)
    delays = random.Random(f"{seed} {rank}")
    start = time.monotonic()
    for call in range(calls):
        if delays.random() < DELAYED:
            time.sleep(delays.uniform(0, SLOW_S))
        gathers = program.choice.random() < 0.5
        if not (program.gather() if gathers else program.scatter()):
            raise AssertionError(f"call {call} is wrong on rank {rank} (seed {seed})")
    ran = executions()
    if sum(ran.values()) != calls or {engine for _, engine in ran} != {"cpu"}:
        raise AssertionError(f"not all calls ran on the cpu engine: {ran}")
    state = state_of(GROUP, CpuGroup)
    seconds = time.monotonic() - start
    return Result(calls, seconds, state.workspace_bytes, state.scratch_bytes, program.largest_bytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    results: list[Result] = run_ranks(run, options.ranks, options.calls, options.seed, timeout=3600)
    slowest = max(results, key=lambda result: result.seconds)
    print(
        f"{slowest.calls} calls on each of {options.ranks} ranks in {slowest.seconds:.1f} s, all exact\n"
        f"workspace of a rank: {slowest.workspace_bytes} bytes of shared memory, at most "
        f"{2 * slowest.largest_bytes} for two gathered buffers of the largest op and some signals; "
        f"private scratch: {slowest.scratch_bytes} bytes"
    )


if __name__ == "__main__":
    main()
