"""The CUDA engine in CUDA graphs: replays alone, mixed with eager calls, after growth, with delayed ranks."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.gpu.engine_calls import Call, Case, Gather, Scatter, fused, make
from tests.gpu.engine_ranks import nccl_group, needs_two_gpus, run_gpu_ranks

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

    with torch.cuda.stream(stream):
        calls[0]()
    with (
        torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream, capture_error_mode="thread_local"),
        pytest.raises(ValueError, match="another thread now captures"),
    ):
        _in_a_thread(lambda: eager.append(calls[0]()))


def test_eager_calls_beside_a_capture() -> None:
    run_gpu_ranks(_beside_a_capture)
