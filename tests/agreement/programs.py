"""Programs that differ between ranks as they legally may, each compiled, against the same in eager code."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import flux_inductor
import flux_inductor.backend
from flux_inductor.planning import strategy
from flux_inductor.planning.plan import parse_plan
from flux_inductor.runtime.agreement import Agreement
from flux_inductor.runtime.engine import executions, reset_executions
from tests.passes.programs import gather, scatter

Program = Callable[..., Any]


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def rand(rank: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank + 17))


def run(fn: Program, *args: Any, mode: str = "always", **options: Any) -> tuple[bool, dict[str, int]]:
    """Whether compiled code gives what eager code does, and the calls of each engine."""
    with torch.no_grad():
        expected = fn(*args)
        dist.barrier()
        reset_executions()
        torch._dynamo.reset()
        with flux_inductor.options(strategy=mode, **options):
            results = torch.compile(fn, backend="flux_inductor")(*args)
    close = all(
        torch.allclose(one, other, rtol=1e-3, atol=2e-2)
        for one, other in zip(_tensors(results), _tensors(expected), strict=True)
    )
    return close, engines()


def _tensors(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else list(value)


def engines() -> dict[str, int]:
    found: dict[str, int] = {}
    for (_, engine), calls in executions().items():
        found[engine] = found.get(engine, 0) + calls
    return found


def head(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(gather(x, 0, world()), w)


def row(x: Tensor, w: Tensor) -> Tensor:
    return scatter(F.linear(x, w), 0, world())


def columns(rank: int, sizes: tuple[int, ...], mode: str, rows: int = 32, depth: int = 64) -> Any:
    """N of a gather differs."""
    n = sizes[rank]
    close, ran = run(
        lambda x, w: head(x, w).sum(-1), rand(rank, rows, depth), rand(rank, n, depth), mode=mode
    )
    return close, ran


def depth(rank: int, sizes: tuple[int, ...], mode: str) -> Any:
    """K of a scatter differs."""
    k = sizes[rank]
    return run(row, rand(rank, 64, k), rand(rank, 48, k), mode=mode)


def two_gathers(rank: int) -> Any:
    """Independent gathers, uneven in opposite directions: each rank fuses another one."""
    wide, narrow = (2048, 16) if rank == 0 else (16, 2048)

    def fn(x: Tensor, y: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return head(x, v).sum(-1), head(y, w).sum(-1)

    args = rand(rank, 256, 256), rand(rank + 5, 256, 256), rand(rank, wide, 256), rand(rank, narrow, 256)
    return run(fn, *args, mode="auto")


def keeps(rank: int) -> Any:
    """One rank alone returns the gathered tensor, too."""

    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        whole = gather(x, 0, world())
        return (F.linear(whole, w), whole) if rank else (F.linear(whole, w),)

    return run(fn, rand(rank, 16, 32), rand(rank, 24, 32))


def breaks(rank: int) -> Any:
    """One rank alone has a graph break between two pairs, and one inside of the second."""

    def fn(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        first = head(x, w)
        if rank == 1:
            torch._dynamo.graph_break()
        whole = gather(first[:8, :16].contiguous(), 0, world())
        if rank == 1:
            torch._dynamo.graph_break()
        return first, F.linear(whole, v)

    return run(fn, rand(rank, 16, 32), rand(rank, 24, 32), rand(rank, 8, 16))


def recompiles(rank: int) -> Any:
    """One rank alone compiles again, to look at the gathered tensor, after both ran fused."""

    def fn(x: Tensor, w: Tensor, look: bool) -> tuple[Tensor, ...]:
        whole = gather(x, 0, world())
        product = F.linear(whole, w)
        return (product, whole.sum()) if look else (product,)

    compiled = torch.compile(fn, backend="flux_inductor")
    x, w = rand(rank, 16, 32), rand(rank, 24, 32)
    reset_executions()
    with torch.no_grad(), flux_inductor.options(strategy="always"):
        values = [compiled(x, w, rank == 1 and step == 2)[0] for step in range(4)]
    return all(torch.equal(value, values[0]) for value in values), engines()


def layers(rank: int) -> Any:
    """Another number of layers in one graph: one rank compiles them one by one."""

    def layer(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return scatter(F.linear(F.linear(gather(x, 0, world()), w), v), 0, world())

    def fn(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        for _ in range(3):
            x = layer(x, w, v)
            if rank == 0:
                torch._dynamo.graph_break()
        return x

    return run(fn, rand(rank, 16, 32), rand(rank, 24, 32) / 32, rand(rank, 32, 24) / 32)


def empty_shard(rank: int) -> Any:
    """The last shard of a vocabulary has no columns, so there the matmul is dead."""
    n = 24 if rank == 0 else 0

    def fn(x: Tensor, w: Tensor) -> Tensor:
        return head(x, w)

    return run(fn, rand(rank, 20, 32), rand(rank, n, 32))


def eager(rank: int) -> Any:
    """Calls by name: N, K and the need of the gathered tensor differ, and so does what pays."""
    reset_executions()
    group = world()
    good = []
    with torch.no_grad():
        for mode, n in (
            ("always", 24 + rank),
            ("auto", 4096 if rank else 16),
            ("auto", 4096 if rank else 16),
        ):
            with flux_inductor.options(strategy=mode):
                x, w = rand(rank, 64, 128), rand(rank, 128, n)
                out = flux_inductor.all_gather_matmul(x, w, group, return_gathered=rank == 1)
                product = out if isinstance(out, Tensor) else out[0]
                good.append(torch.allclose(product, gather(x, 0, group) @ w, rtol=1e-4, atol=1e-4))
                k = 33 + rank
                a, b = rand(rank, 64, k), rand(rank, k, 40)
                part = flux_inductor.matmul_reduce_scatter(a, b, group)
                good.append(torch.allclose(part, scatter(a @ b, 0, group), rtol=1e-4, atol=1e-4))
    return all(good), engines()


def other_plan(rank: int) -> Any:
    """One rank plans otherwise: it takes the first one's chunks."""
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(strategy, "candidates", lambda *_: (parse_plan("mesh pull chunk=5").at(1),))
            strategy._choose.cache_clear()
        found = run(head, rand(rank, 44, 32), rand(rank, 24, 32))
    strategy._choose.cache_clear()
    return found


def cost_us() -> float:
    """Of a known graph's start."""
    sites = "all_gather 8 fp32 | 1 2 4 fp32 | mesh push chunk=2"
    begin = torch.ops.flux_inductor.agree.default
    device, calls = torch.device("cpu"), 1000
    begin("0", "cost", sites, device)
    start = time.process_time()
    for _ in range(calls):
        begin("0", "cost", sites, device)
    return 1e6 * (time.process_time() - start) / calls


def other_collectives(rank: int) -> tuple[str, float]:
    """A gather on one rank meets a scatter on the other."""
    compiled = torch.compile(row if rank else head, backend="flux_inductor")
    shapes = ((64, 24), (32, 24)) if rank else ((16, 32), (24, 32))
    return _guarded(compiled, tuple(rand(0, *shape) for shape in shapes))


def other_sizes(rank: int) -> tuple[str, float]:
    compiled = torch.compile(head, backend="flux_inductor")
    return _guarded(compiled, (rand(0, 16 + 16 * rank, 32), rand(0, 24, 32)))


def fixed(rank: int) -> tuple[str, float]:
    """One rank alone stops fusing what both have run fused."""

    def fn(x: Tensor, w: Tensor, stop: bool) -> Tensor:
        whole = gather(x, 0, world())
        if stop:
            torch._dynamo.graph_break()
        return F.linear(whole, w)

    compiled = torch.compile(fn, backend="flux_inductor")
    args = rand(rank, 16, 32), rand(rank, 24, 32)
    with torch.no_grad(), flux_inductor.options(strategy="always"):
        compiled(*args, False)
    return _guarded(compiled, (*args, rank == 1))


def _guarded(compiled: Program, args: tuple[Any, ...]) -> tuple[str, float]:
    """Compiled apart from its first run, which takes seconds."""
    began: list[float] = []
    begin = Agreement.begin

    def noted(self: Agreement, *given: Any) -> None:
        if not began:
            dist.barrier()
            began.append(time.monotonic())
        begin(self, *given)

    error = ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Agreement, "begin", noted)
        try:
            with torch.no_grad(), flux_inductor.options(strategy="always"):
                compiled(*args)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
    return error, time.monotonic() - began[0]
