"""The CUDA engine in CUDA graphs: replays alone, mixed with eager calls, after growth, with delayed ranks."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from flux_inductor.runtime.cuda_group import CudaGroup
from flux_inductor.runtime.errors import FusedOpError
from flux_inductor.runtime.groups import state_of
from tests.gpu.engine_calls import Call, Case, Gather, Scatter, fused, make
from tests.support.gpu_ranks import nccl_group, needs_two_gpus, run_gpu_ranks

pytestmark = needs_two_gpus

CASES: list[Case] = [
    Gather((256, 512), (768,), bias=True),
    Scatter((768, 512), 768),
    Gather((256, 512), (384, 128), keep=True),
    Scatter((2, 512, 256), 512, dim=1, addend=True),
    Scatter((1024, 512), 768, plan="mesh store chunk=256"),
    Scatter((4096, 136), 8192, plan="mesh store chunk=512"),
    Scatter((2, 512, 256), 512, dim=1, bias=True, plan="mesh store chunk=512 reserve=8"),
]
THREE = ([0, 1, 2], [4, 2, 5])  # graphs of three ops
INPUTS = 3


class Inputs:
    """One call with several inputs in turn, and its result for each."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.values = [torch.randn_like(call.x) for _ in range(INPUTS)]
        self.expected = []
        for value in self.values:
            call.x.copy_(value)
            self.expected.append(call())

    def choose(self, index: int) -> None:
        self.call.x.copy_(self.values[index])

    def wrong(self, results: list[Tensor], index: int) -> Tensor:
        """Whether any result is not the expected one; on the device."""
        pairs = zip(results, self.expected[index], strict=True)
        return torch.stack([(result != known).any() for result, known in pairs]).any()


def _capture(inputs: list[Inputs]) -> tuple[torch.cuda.CUDAGraph, list[list[Tensor]]]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [each.call() for each in inputs]
    return graph, results


def _replays(rank: int, world: int, rounds: int) -> None:
    group = nccl_group(world)
    inputs = [Inputs(make(case, group)) for case in CASES]
    graphs = [([i], *_capture([inputs[i]])) for i in range(len(inputs))]
    graphs += [(three, *_capture([inputs[i] for i in three])) for three in THREE]
    larger = Inputs(make(Gather((2048, 1024), (512,)), group))  # the workspace grows: graphs keep theirs
    inputs.append(larger)
    wrong = torch.zeros((), device="cuda", dtype=torch.int64)
    order, mine = random.Random(3), random.Random(rank)
    for turn in range(rounds):
        # Alone first, then mixed with eager calls.
        index = order.randrange(INPUTS)
        if mine.random() < 0.1:
            torch.cuda._sleep(mine.randrange(2_000_000))
        if turn < rounds // 2 or order.random() < 0.5:
            members, graph, results = order.choice(graphs)
            for i in members:
                inputs[i].choose(index)
            graph.replay()
            for i, result in zip(members, results, strict=True):
                wrong += inputs[i].wrong(result, index)
        else:
            one = order.choice(inputs)
            one.choose(index)
            wrong += one.wrong(one.call(), index)
    assert wrong.item() == 0


def test_replays_and_eager_calls_mixed_with_delayed_ranks() -> None:
    run_gpu_ranks(_replays, int(os.environ.get("FLUX_INDUCTOR_TEST_REPLAYS", "2000")))


def _unprepared(rank: int, world: int) -> None:
    call = make(CASES[0], nccl_group(world))
    graph = torch.cuda.CUDAGraph()
    with (
        torch.cuda.graph(graph),
        pytest.raises(ValueError, match="run the function once with the same shapes"),
    ):
        call()
    expected = call()
    _, results = _capture_once(call)
    assert all(map(torch.equal, results, expected))


def _capture_once(call: Call) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    graph.replay()
    return graph, results


def test_a_capture_of_a_call_that_never_ran_says_so_and_harms_nothing() -> None:
    run_gpu_ranks(_unprepared)


def _reduce_overhead(rank: int, world: int) -> None:
    group = nccl_group(world)
    plan = "mesh push chunk=256"
    up = torch.randn(512, 256, device="cuda").bfloat16().t()
    down = torch.randn(256, 512, device="cuda").bfloat16().t()

    def block(x: Tensor) -> Tensor:
        (hidden,) = fused.all_gather_matmul(x, [up], [], group, plan, 0, False)
        result: Tensor = fused.matmul_reduce_scatter(
            hidden.relu(), down, None, None, group, plan, 0, "sum", 0.01
        )
        return result.relu()

    compiled = torch.compile(block, mode="reduce-overhead")
    for _ in range(10):
        x = torch.randn(128, 256, device="cuda").bfloat16()
        expected = block(x)
        for _ in range(3):
            torch.compiler.cudagraph_mark_step_begin()
            assert torch.equal(compiled(x), expected)


def test_compiled_with_reduce_overhead() -> None:
    run_gpu_ranks(_reduce_overhead)


def _in_a_thread(function: Callable[[], None]) -> None:
    """Runs it on a stream of its own, in another thread; raises what it raises."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                function()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def _beside_a_capture(rank: int, world: int) -> None:
    group = nccl_group(world)
    calls = [make(case, group) for case in CASES[:2]]
    expected = [call() for call in calls]
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    eager: list[list[Tensor]] = []
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        captured = [call() for call in calls]
        for call in calls:
            _in_a_thread(lambda: eager.append(call()))  # noqa: B023
    torch.cuda.synchronize()  # nothing else orders replays behind eager calls of other streams
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    for results in (captured, eager):
        for found, known in zip(results, expected, strict=True):
            assert all(map(torch.equal, found, known))

    # Also behind an eager call on the stream that is captured now.
    with torch.cuda.stream(stream):
        calls[0]()
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream, capture_error_mode="thread_local"):
        _in_a_thread(lambda: eager.append(calls[0]()))
    torch.cuda.synchronize()
    assert all(map(torch.equal, eager[-1], expected[0]))


def test_eager_calls_beside_a_capture() -> None:
    run_gpu_ranks(_beside_a_capture)


def _destroyed_beside_a_capture(rank: int, world: int) -> None:
    """Its memory is freed when the capture has ended, which a synchronisation would break."""
    name = nccl_group(world)
    kept = make(CASES[0], name)
    expected = kept()
    graph = torch.cuda.CUDAGraph()
    group = dist.new_group(list(range(world)), backend="nccl")
    assert isinstance(group, dist.ProcessGroup)
    make(CASES[0], group.group_name)()
    torch.cuda.synchronize()
    free = torch.cuda.mem_get_info()[0]
    with torch.cuda.graph(graph):
        captured = kept()
        thread = threading.Thread(target=state_of(group.group_name, CudaGroup).close)
        thread.start()
        thread.join()
    graph.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, captured, expected))
    deadline = time.monotonic() + 10
    while torch.cuda.mem_get_info()[0] <= free and time.monotonic() < deadline:
        time.sleep(0.05)
    assert torch.cuda.mem_get_info()[0] > free
    dist.barrier()


def test_a_group_destroyed_beside_a_capture() -> None:
    run_gpu_ranks(_destroyed_beside_a_capture)


def _asymmetric_captures(rank: int, world: int) -> None:
    """One rank captures once more than the other: no replay differs, and no new call that follows."""
    group = nccl_group(world, seconds=10)
    call, larger = make(Gather((256, 512), (768,)), group), make(Gather((512, 512), (768,)), group)
    expected = call()
    for _ in range(2 if rank == 0 else 1):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = call()
    graph.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, result, expected))
    assert torch.equal(larger()[0], larger()[0])


def test_captures_that_differ_between_ranks() -> None:
    run_gpu_ranks(_asymmetric_captures)


def _replay_beside_eager(rank: int, world: int, captures: str, calls: int) -> float:
    """Both ranks make the same calls, rank 0 by a replay. The results are right, or both ranks soon raise.

    `captures` names the ranks that have captured at all; all that have, have replayed.
    """
    group = nccl_group(world, seconds=60)
    call = make(Gather((256, 512), (768,)), group)
    for _ in range(calls):
        expected = call()
    graph = torch.cuda.CUDAGraph()
    if str(rank) in captures:
        with torch.cuda.graph(graph):
            result = call()
    if captures == "01":
        graph.replay()
    torch.cuda.synchronize()
    dist.barrier()
    start = time.monotonic()
    if rank == 0:
        graph.replay()
    else:
        result = call()
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        with pytest.raises(FusedOpError):
            call()
    else:
        assert all(map(torch.equal, result, expected))
    dist.barrier()
    return time.monotonic() - start


@pytest.mark.parametrize("captures", ["0", "01"])
@pytest.mark.parametrize("calls", [1, 2])
def test_a_replay_beside_an_eager_call_of_another_rank(captures: str, calls: int) -> None:
    assert max(run_gpu_ranks(_replay_beside_eager, captures, calls)) < 5


def _one_queue(rank: int, world: int) -> None:
    """As Megatron has it. A scatter's copies wait for its kernel, and might lie before it in the queue."""
    group = nccl_group(world, seconds=10)
    cases: list[Case] = [
        Gather((1024, 1024), (1024,), plan="mesh push chunk=256"),
        Scatter((4096, 1024), 2048, plan="mesh push chunk=256"),
        Scatter((4096, 1024), 2048, plan="mesh store chunk=256"),
    ]
    inputs = [Inputs(make(case, group)) for case in cases]
    graphs = [([i], *_capture([inputs[i]])) for i in range(3)] + [([0, 1, 2], *_capture(inputs))]
    wrong = torch.zeros((), device="cuda", dtype=torch.int64)
    for turn in range(60):
        members, graph, results = graphs[turn % 4]
        for i in members:
            inputs[i].choose(turn % INPUTS)
        graph.replay()
        for i, result in zip(members, results, strict=True):
            wrong += inputs[i].wrong(result, turn % INPUTS)
        one = inputs[turn % 3]
        one.choose(turn % INPUTS)
        wrong += one.wrong(one.call(), turn % INPUTS)
    assert wrong.item() == 0


def test_one_queue_for_all_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    run_gpu_ranks(_one_queue)


def _trees(rank: int, world: int, growth: bool) -> None:
    """The first fused call, or the first of a larger size, comes while graph trees warm up in their pool."""
    name = nccl_group(world, seconds=20)
    plan = "mesh push chunk=256"
    torch.manual_seed(7)
    up = (torch.randn(1024, 512, device="cuda") / 23).bfloat16().t()
    down = (torch.randn(512, 1024, device="cuda") / 32).bfloat16().t()
    torch.manual_seed(rank)

    def block(x: Tensor) -> tuple[Tensor, Tensor]:
        (h,) = fused.all_gather_matmul(x, [up], [], name, plan, 0, False)
        y = fused.matmul_reduce_scatter(h.sin(), down, None, None, name, plan, 0, "sum", 1.0)
        return y, y.float().pow(2).mean(-1)

    other = torch.compile(lambda x: (x.sin() * 2).sum(-1).relu(), mode="reduce-overhead", dynamic=False)
    compiled = torch.compile(block, mode="reduce-overhead", dynamic=False)
    noise = torch.randn(512, 256, device="cuda")
    sizes = (256, 2048) if growth else (256,)
    xs = {rows: torch.randn(rows, 512, device="cuda").bfloat16() for rows in sizes}
    found: dict[int, list[Tensor]] = {rows: [] for rows in sizes}
    for turn in range(12):
        torch.compiler.cudagraph_mark_step_begin()
        if not growth:
            other(noise)
            if turn < 4:
                continue
        rows = sizes[turn % len(sizes)] if turn >= 4 else 256
        found[rows].append(compiled(xs[rows])[0].clone())
    for rows, results in found.items():
        expected = block(xs[rows])[0]
        assert len(results) >= 4
        for result in results:
            difference = (result.float() - expected.float()).norm() / expected.float().norm()
            assert float(difference) < 0.01, (rows, float(difference))


@pytest.mark.parametrize("growth", [False, True])
def test_a_workspace_made_while_graph_trees_warm_up(growth: bool) -> None:
    run_gpu_ranks(_trees, growth)


def _in_a_pool(rank: int, world: int) -> None:
    """The first call happens in a memory pool of the program's, which then goes."""
    call = make(CASES[0], nccl_group(world))
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        first = [result.clone() for result in call()]
    held = [segment for segment in pool.snapshot() if segment["allocated_size"]]
    assert len(held) <= len(first), held
    expected = [result.cpu() for result in first]
    del first, held
    del pool
    torch.cuda.empty_cache()
    for _ in range(3):
        assert all(torch.equal(a.cpu(), b) for a, b in zip(call(), expected, strict=True))


def test_the_first_call_in_a_pool_of_the_program() -> None:
    run_gpu_ranks(_in_a_pool)
