"""Calls of the CUDA engine that are bound to their shapes once: what later ones may rely on, and what not."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import flux_inductor
from flux_inductor import ops  # noqa: F401  (registers the ops)
from flux_inductor.planning.plan import Plan
from flux_inductor.runtime import bound, cuda, cuda_memory, detect, engine
from flux_inductor.runtime.bound import BoundCalls, Run
from flux_inductor.runtime.cuda_group import CudaGroup
from flux_inductor.runtime.cuda_operands import row_stride, weight_strides
from flux_inductor.runtime.detect import topology_of
from flux_inductor.runtime.errors import DeadGroupError, FusedOpError, PeerTimeoutError
from flux_inductor.runtime.groups import state_of
from tests.runtime import cuda_stub
from tests.runtime.cuda_stub import WORLD, StubGroup, make_group, stub_engine, stubbed
from tests.support.engines import bind_scatter

fused = torch.ops.flux_inductor
GROUP, PLAN = "0", "mesh push chunk=64"


@pytest.fixture(autouse=True)
def _stub() -> Iterator[None]:
    with stubbed():
        yield


def gather(x: Tensor, weights: list[Tensor], biases: list[Tensor | None], keep: bool = False) -> list[Tensor]:
    return list(fused.all_gather_matmul(x, weights, biases, GROUP, PLAN, 0, keep))


def scatter(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, addend: Tensor | None = None, op: str = "sum"
) -> Tensor:
    result: Tensor = fused.matmul_reduce_scatter(x, weight, bias, addend, GROUP, PLAN, 0, op, 0.5)
    return result


def workspace_calls() -> int:
    return state_of(GROUP, StubGroup).workspace.calls


@st.composite
def matrices(draw: st.DrawFn, rows: int, columns: int) -> Tensor:
    """[rows, columns] in some layout, at some address, of the same values whenever shapes are the same."""
    values = torch.arange(float(rows * columns)).sin().view(rows, columns)
    padding, offset = draw(st.sampled_from([0, 3, 8])), draw(st.integers(0, 4))
    transposed = draw(st.booleans())
    outer, inner = (columns, rows) if transposed else (rows, columns)
    base = torch.empty(offset + outer * (inner + padding))[offset:].view(outer, inner + padding)[:, :inner]
    return (base.t() if transposed else base).copy_(values)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_layout_and_address(data: st.DataObject) -> None:
    x = data.draw(matrices(4, 16))
    weights = [data.draw(matrices(16, columns)) for columns in (8, 24)]
    bias = data.draw(matrices(1, 24))[0]
    whole = torch.cat([x] * WORLD)
    products = [whole @ weights[0], whole @ weights[1] + bias]
    for result, expected in zip(gather(x, weights, [None, bias], True), [*products, whole], strict=True):
        torch.testing.assert_close(result, expected)
        assert result.is_contiguous()
    addend = data.draw(matrices(4, 24))
    for op, factor in (("sum", WORLD), ("avg", 1)):
        part = (0.5 * (x @ weights[1]) + bias + addend)[:2] * factor
        torch.testing.assert_close(scatter(x, weights[1], bias, addend, op), part)
        torch.testing.assert_close(scatter(x, weights[0], op=op), 0.5 * (x @ weights[0])[:2] * factor)


def test_lazy_negations() -> None:
    x, weight, bias, addend = (
        torch._neg_view(torch.randn(*size)) for size in ((4, 16), (16, 8), (8,), (4, 8))
    )
    product = x @ weight + bias
    torch.testing.assert_close(gather(x, [weight], [bias])[0], torch.cat([product] * WORLD))
    expected = (0.5 * (x @ weight) + bias + addend)[:2] * WORLD
    torch.testing.assert_close(scatter(x, weight, bias, addend), expected)


def test_lazy_negations_and_addresses_of_calls_seen_before() -> None:
    x, weight, bias = torch.randn(4, 16), torch.randn(16, 8), torch.randn(8)
    gather(x, [weight], [bias])
    torch.testing.assert_close(
        gather(x, [weight], [torch._neg_view(bias)])[0], torch.cat([x @ weight - bias] * WORLD)
    )
    for place in range(3):
        off = [torch.empty(each.numel() + 1)[1:].view(each.shape).copy_(each) for each in (x, weight, bias)]
        a, b, c = (off[i] if i == place else each for i, each in enumerate((x, weight, bias)))
        product = torch.cat([x @ weight + bias] * WORLD)
        torch.testing.assert_close(gather(a, [b], [c])[0], product)
        torch.testing.assert_close(scatter(a, b, c), (0.5 * (x @ weight) + bias)[:2] * WORLD)


def test_results_are_on_the_device_of_their_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the current one is."""
    x, weight = torch.randn(4, 16), torch.randn(16, 8)
    gather(x, [weight], [])
    scatter(x, weight)
    current, made = [1], []

    @contextmanager
    def device(there: torch.device) -> Iterator[None]:
        assert there == state_of(GROUP, StubGroup).device
        current.append(0)
        yield
        current.pop()

    def make(*arguments: Any) -> Tensor:
        made.append(current[-1])
        return cuda_stub.empty_strided(*arguments)

    monkeypatch.setattr(StubGroup, "current_device", lambda self: current[-1])
    monkeypatch.setattr(StubGroup, "empty_strided", staticmethod(make))
    monkeypatch.setattr(torch.cuda, "device", device)
    torch.testing.assert_close(gather(x, [weight, weight], []), [torch.cat([x] * WORLD) @ weight] * 2)
    torch.testing.assert_close(scatter(x[:2], weight), 0.5 * (x[:1] @ weight) * WORLD)
    assert (current, made) == ([1], [0] * 4)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_strides_of_rows(data: st.DataObject) -> None:
    """As a view sees them: what fits is a matrix with rows far enough apart; all else is copied."""
    sizes = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    base = torch.empty(*(size + 1 for size in sizes), 16)
    cut = [slice(0, size + data.draw(st.integers(0, 1))) for size in sizes]
    x = base[tuple(cut)].permute(*data.draw(st.permutations(range(len(sizes)))), len(sizes))
    fits, stride = row_stride(x)
    flat = x.reshape(-1, 16)
    is_view = flat.data_ptr() == x.data_ptr() and flat.numel() > 0
    assert fits == (is_view and (flat.shape[0] == 1 or flat.stride(0) >= 16)), (x.shape, x.stride())
    if fits and flat.shape[0] > 1:
        assert stride == flat.stride(0)


def test_strides_that_repeat_rows_are_copied() -> None:
    assert row_stride(torch.empty(1, 16).expand(4, 16)) == (False, 16)
    assert weight_strides(torch.empty(1, 16).expand(16, 16))[0] is False
    assert weight_strides(torch.empty(16, 24).t()) == (True, "k_major", 24)
    assert weight_strides(torch.empty(16, 20)) == (False, "n_major", 20)


def test_calls_are_bound_once_and_counted_always(monkeypatch: pytest.MonkeyPatch) -> None:
    engine.reset_executions()
    x, weight = torch.randn(4, 16), torch.randn(16, 8)
    bindings = []
    bind = cuda.CudaEngine.bind

    def bind_and_count(*arguments: Any) -> Run:
        bindings.append(arguments)
        return bind(*arguments)

    monkeypatch.setattr(cuda.CudaEngine, "bind", bind_and_count)
    for _ in range(3):
        gather(torch.randn(4, 16), [weight], [])
    assert (len(bindings), workspace_calls()) == (1, 3)
    monkeypatch.setenv(engine.ENGINE_VARIABLE, "reference")
    gather(x, [weight], [])
    monkeypatch.delenv(engine.ENGINE_VARIABLE)
    gather(x, [weight], [])
    assert engine.executions() == {
        ("all_gather_matmul", "cuda"): 4,
        ("all_gather_matmul", "reference"): 1,
    }


def test_a_valid_call_makes_no_other_one_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = torch.randn(4, 16), torch.randn(16, 16), torch.randn(16)
    gather(x, [weight, weight], [])
    gather(x, [weight], [bias])
    scatter(x, weight, bias, torch.randn(4, 16))
    double = weight.double()
    with pytest.raises(ValueError, match=r"a weight is torch\.float64"):
        gather(x, [double, weight], [])
    with pytest.raises(ValueError, match=r"x is torch\.float64"):
        gather(x.double(), [double], [])
    with pytest.raises(ValueError, match=r"a bias of shape \(16, 16\)"):  # the same tensors as a valid call
        gather(x, [weight], [weight])
    with pytest.raises(ValueError, match="1 biases for 2 weights"):
        gather(x, [weight, weight], [bias])
    with pytest.raises(ValueError, match=r"a weight of shape \(8, 16\)"):
        gather(x, [weight[:8], weight], [])
    with pytest.raises(ValueError, match=r"a bias is torch\.float64"):
        scatter(x, weight, bias.double(), torch.randn(4, 16))
    with pytest.raises(ValueError, match="addend has shape"):
        scatter(x, weight, bias, torch.randn(2, 16))
    with pytest.raises(ValueError, match="reduce_op is 'max'"):
        scatter(x, weight, bias, torch.randn(4, 16), "max")
    with pytest.raises(ValueError, match="no process group 'tp'"):
        fused.all_gather_matmul(x, [weight], [bias], "tp", PLAN, 0, False)
    with pytest.raises(ValueError, match="unknown token"):
        fused.all_gather_matmul(x, [weight], [bias], GROUP, PLAN + " a=1", 0, False)
    monkeypatch.setenv(engine.ENGINE_VARIABLE, "fast")
    with pytest.raises(ValueError, match="FLUX_INDUCTOR_ENGINE='fast'"):
        gather(x, [weight], [bias])


def test_a_call_that_cannot_run_is_not_remembered() -> None:
    before = len(state_of(GROUP, BoundCalls).known)
    for _ in range(2):
        with pytest.raises(ValueError, match="no weight"):
            gather(torch.randn(4, 16), [], [])
    assert len(state_of(GROUP, BoundCalls).known) == before


def test_remembered_calls_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bound, "REMEMBERED", 4)
    for rows in range(1, 12):
        gather(torch.randn(rows, 16), [torch.randn(16, 8)], [])
        assert len(state_of(GROUP, BoundCalls).known) <= 4


def test_remembered_calls_go_with_their_group() -> None:
    x, weight = torch.randn(4, 16), torch.randn(16, 8)
    gather(x, [weight], [])
    made, first = StubGroup.made, state_of(GROUP, StubGroup)
    dist.destroy_process_group()
    with pytest.raises(ValueError, match="no process group '0'"):
        gather(x, [weight], [])
    make_group()
    gather(x, [weight], [])
    assert StubGroup.made == made + 1
    assert state_of(GROUP, StubGroup) is not first


def test_a_topology_is_detected_once_for_each_group(monkeypatch: pytest.MonkeyPatch) -> None:
    known = topology_of(GROUP, "cpu")
    monkeypatch.setattr(detect, "_detect", lambda group, device: pytest.fail("detected twice"))
    assert topology_of(GROUP, "cpu") is known
    monkeypatch.undo()
    dist.destroy_process_group()
    make_group()
    assert topology_of(GROUP, "cpu") is not known


def test_after_a_failed_wait_nothing_touches_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.randn(4, 16), torch.randn(16, 8)
    gather(x, [weight], [])
    scatter(x, weight)
    state_of(GROUP, StubGroup).trap()
    asked = "CUDA was asked for a device"
    monkeypatch.setattr(StubGroup, "current_device", lambda self: pytest.fail(asked))
    with pytest.raises(PeerTimeoutError, match="waited for a chunk"):
        gather(x, [weight], [])
    with pytest.raises(DeadGroupError, match="waited for a chunk"):
        scatter(x, weight)


@pytest.mark.parametrize("kind", [RuntimeError, ValueError])
def test_a_call_that_could_not_be_started_ends_the_group(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank's next call would be one that its peers do not expect yet."""
    x, weight = torch.randn(4, 16), torch.randn(16, 8)
    gather(x, [weight], [])
    scatter(x, weight)

    def refuse(*arguments: Any) -> bool:
        raise kind("copy of a chunk: invalid argument")

    monkeypatch.setattr(state_of(GROUP, StubGroup).workspace, "matmul_reduce_scatter", refuse)
    capturing = True
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    with pytest.raises(kind, match="copy of a chunk"):
        scatter(x, weight)
    gather(x, [weight], [])  # nothing of a capture has run
    capturing = False
    with pytest.raises(kind, match="copy of a chunk"):
        scatter(x, weight)
    with pytest.raises(DeadGroupError, match="matmul_reduce_scatter could not be started: copy of a chunk"):
        gather(x, [weight], [])


def test_tensors_on_another_device_than_the_group() -> None:
    state_of(GROUP, StubGroup).device = torch.device("cuda", 1)
    x, weight = torch.randn(4, 16), torch.randn(16, 8)
    for call in (lambda: gather(x, [weight], []), lambda: scatter(x, weight)):
        with pytest.raises(ValueError, match=r"tensors are on cpu, but .* run on cuda:1, where"):
            call()


def test_blocking_launches_would_hang_where_copies_follow_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.randn(4, 16), torch.randn(16, 8)
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    with pytest.raises(ValueError, match="CUDA_LAUNCH_BLOCKING is set: with plan 'mesh push chunk=64'"):
        scatter(x, weight)
    gather(x, [weight], [])
    stores = Plan("mesh", "store", 64)
    run = bind_scatter(stub_engine(), x, weight, None, None, GROUP, stores, 0, "sum", 1.0)
    run(x, weight, None, None)


def test_a_record_that_was_never_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    state = state_of(GROUP, StubGroup)
    state.trap()
    monkeypatch.setattr(state, "error", lambda: None)
    with pytest.raises(FusedOpError, match="stopped before it could say why"):
        gather(torch.randn(4, 16), [torch.randn(16, 8)], [])


def test_results_without_elements_have_the_strides_of_torch() -> None:
    product, whole = fused.all_gather_matmul(
        torch.randn(3, 0, 16), [torch.randn(16, 8)], [], GROUP, PLAN, 1, True
    )
    for result in (product, whole):
        assert result.stride() == torch.empty(result.shape).stride()


@pytest.mark.parametrize("grads", [True, False])
def test_the_gathered_tensor_is_kept_for_gradients_alone(
    grads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight = torch.randn(4, 16), torch.randn(16, 8, requires_grad=True)
    workspace, kept = state_of(GROUP, StubGroup).workspace, []
    run = workspace.all_gather_matmul

    def look(call: Any, x: Tensor, weights: list[Tensor], biases: list[Any], results: list[Tensor]) -> bool:
        kept.append(len(results) == 2)
        return run(call, x, weights, biases, results)

    monkeypatch.setattr(workspace, "all_gather_matmul", look)
    with torch.set_grad_enabled(grads):
        product = flux_inductor.all_gather_matmul(x, weight, GROUP, plan=PLAN)
    assert isinstance(product, Tensor)
    assert (kept, product.requires_grad) == ([grads], grads)


def test_nothing_to_send() -> None:
    before = workspace_calls()
    product, whole = gather(torch.randn(0, 16), [torch.randn(16, 8)], [], True)
    assert (product.shape, whole.shape) == ((0, 8), (0, 16))
    assert scatter(torch.randn(0, 16), torch.randn(16, 8)).shape == (0, 8)
    assert workspace_calls() == before


@pytest.mark.parametrize("trapped", [False, True])
@pytest.mark.parametrize("drained", [False, True])
@pytest.mark.parametrize("captures", [0, 3])
def test_memory_is_freed_once_nothing_runs_in_it(
    captures: int, trapped: bool, drained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And once no thread captures, whose capture a synchronisation would break."""
    left = [captures]

    def capturing(device: torch.device) -> bool:
        left[0] -= 1
        return left[0] >= 0

    def wait_for(device: torch.device) -> bool:
        assert left[0] < 0, "synchronised during a capture"
        return drained

    monkeypatch.setattr(cuda_memory, "capturing", capturing)
    monkeypatch.setattr(cuda_memory, "drained", wait_for)
    monkeypatch.setattr(cuda_memory, "_PAUSE_S", 0.001)
    state = state_of(GROUP, StubGroup)
    memory, record = map(weakref.ref, (state.workspace, state._errors))
    del state.workspace
    if trapped:
        state.trap()
    CudaGroup.close(state)
    del state._errors, state._state
    for thread in threading.enumerate():
        if thread.name == "flux_inductor memory":
            thread.join()
    gone = drained and not trapped
    assert [memory() is None, record() is None] == [gone, gone]
    with pytest.raises(DeadGroupError, match="it was destroyed"):
        state.check()
