"""Times of several ways to compute one thing on all ranks, measured against each other in one loop."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

Candidate = Callable[[], object]
# Clock cycles for which the device sleeps while the host queues what is timed.
SLEEP_CYCLES = 1_600_000


def paired(
    candidates: Mapping[str, Candidate],
    group: dist.ProcessGroup,
    rounds: int,
    burst: int = 1,
    sleep_cycles: int = SLEEP_CYCLES,
) -> dict[str, float]:
    """Microseconds of one call of each candidate: the largest over ranks of the medians over rounds.

    Clocks drift, so the candidates take turns. Before each turn the devices sleep for so many cycles a call,
    in which the host queues what follows: a collective of the NCCL `group`, so that all begin together (their
    sleeps differ by several microseconds), then the calls. A `burst` of several calls shows what is left of a
    time when calls follow one another and ranks drift apart.
    """
    for call in candidates.values():
        for _ in range(2):
            call()
        torch.cuda.synchronize()
        dist.barrier()
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, call in candidates.items():
            times[name].append(_once(call, group, burst, sleep_cycles))
    medians = torch.tensor([statistics.median(times[name]) for name in candidates])
    dist.all_reduce(medians, op=dist.ReduceOp.MAX)
    return dict(zip(candidates, medians.tolist(), strict=True))


def _once(call: Candidate, group: dist.ProcessGroup, burst: int, sleep_cycles: int) -> float:
    together = torch.ones(1, device="cuda")
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    dist.barrier()  # of the hosts
    torch.cuda._sleep(sleep_cycles * burst)
    dist.all_reduce(together, group=group)
    begin.record()
    for _ in range(burst):
        call()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) * 1e3 / burst


def host_us(call: Candidate, calls: int = 20, rounds: int = 9) -> float:
    """Microseconds of the host for one call, the device being busy: the median over rounds."""
    taken = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda._sleep(20 * SLEEP_CYCLES)
        start = time.perf_counter()
        for _ in range(calls):
            call()
        taken.append((time.perf_counter() - start) * 1e6 / calls)
    torch.cuda.synchronize()
    return statistics.median(taken)
