"""The CUDA engine's Python half on CPU tensors: a workspace that computes what the kernels would.

Every rank is taken to have this rank's operands. Memory is read and written by address, as the kernels do.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from flux_inductor.dtypes import DTYPES
from flux_inductor.planning.ops.all_gather_matmul import GatherCall
from flux_inductor.planning.ops.matmul_reduce_scatter import ScatterCall
from flux_inductor.planning.plan import Plan
from flux_inductor.planning.problem import Layout
from flux_inductor.runtime import engine
from flux_inductor.runtime.bound import BoundCalls
from flux_inductor.runtime.cuda import CudaEngine
from flux_inductor.runtime.cuda_group import CudaGroup
from flux_inductor.runtime.cuda_memory import Need
from flux_inductor.runtime.cuda_order import Notice, Order
from flux_inductor.runtime.cuda_prepare import Preparation, Prepared, Seat
from flux_inductor.runtime.errors import FusedOpError, PeerTimeoutError
from flux_inductor.runtime.groups import state_of

WORLD = 2
ALIGNMENT = 16


def allocate(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype)


def empty_strided(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return allocate(shape, strides, dtype)  # calls that were bound before find another one, too


def address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def memory(
    address: int, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype = torch.float32
) -> Tensor:
    """The tensor that lies at an address."""
    assert address % ALIGNMENT == 0, address
    extent = 1 + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
    values = torch.frombuffer((ctypes.c_char * (extent * dtype.itemsize)).from_address(address), dtype=dtype)
    return values.as_strided(tuple(shape), tuple(strides))


def contiguous(address: int, *shape: int) -> Tensor:
    return memory(address, shape, [math.prod(shape[dim + 1 :]) for dim in range(len(shape))])


def weight(
    address: int,
    depth: int,
    columns: int,
    layout: Layout,
    leading: int,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    strides = (leading, 1) if layout == "n_major" else (1, leading)
    return memory(address, (depth, columns), strides, dtype)


class StubWorkspace:
    """See `_core.cuda.Workspace`; a call is the arguments of its preparation."""

    def __init__(self) -> None:
        self.calls = 0

    def all_gather_matmul(
        self, call: Any, x: Tensor, weights: list[Tensor], biases: list[Tensor | None], results: list[Tensor]
    ) -> bool:
        self.calls += 1
        shape, sizes, dim = call
        whole = torch.cat([contiguous(address(x), *shape)] * WORLD, dim)
        assert len(weights) == len(sizes)
        assert len(biases) in (0, len(sizes))
        assert len(results) - len(sizes) in (0, 1)
        for kept in results[len(sizes) :]:
            contiguous(address(kept), *whole.shape).copy_(whole)
        for index, (columns, layout, leading) in enumerate(sizes):
            where, product = address(weights[index]), address(results[index])
            bias = address(biases[index]) if biases else 0
            value = whole @ weight(where, shape[-1], columns, layout, leading)
            value = value + contiguous(bias, columns) if bias else value
            contiguous(product, *value.shape).copy_(value)
        return True

    def matmul_reduce_scatter(self, call: Any, *operands: Tensor | None) -> bool:
        self.calls += 1
        x, w, bias, addend, partials, result = map(address, operands)
        shape, dtype, row_stride, (columns, layout, leading), dim, scale = call
        rows = memory(x, (math.prod(shape[:-1]), shape[-1]), (row_stride, 1), dtype)
        value = scale * (rows.float() @ weight(w, shape[-1], columns, layout, leading, dtype).float())
        value = value + contiguous(bias, columns) if bias else value
        value = value.view(*shape[:-1], columns)
        value = value + contiguous(addend, *value.shape) if addend else value
        assert partials, "there is room for partials"
        part = WORLD * value.chunk(WORLD, dim)[0]
        contiguous(result, *part.shape).copy_(part)
        return True


class StubGeneration:
    """Ranks that always come, and are told of failures."""

    def __init__(self) -> None:
        self.failures: list[str] = []

    def fail(self, why: str) -> None:
        self.failures.append(why)

    def leave(self) -> None:
        pass


class StubNotices:
    """What this rank has told, and what it will hear."""

    def __init__(self) -> None:
        self.told: list[Notice] = []
        self.coming: list[Notice] = []

    def tell(self, notice: Notice) -> None:
        self.told.append(notice)

    def news(self) -> list[Notice]:
        heard, self.coming = self.coming, []
        return heard


class StubGroup(CudaGroup):
    """A group whose ranks agree on everything."""

    made = 0
    current_device = staticmethod(lambda: 0)
    empty_strided = staticmethod(empty_strided)
    sms = 132

    def __init__(self, name: str, group: dist.ProcessGroup) -> None:
        StubGroup.made += 1
        self.name, self.rank, self.world = name, group.rank(), group.size()
        self.device, self.device_index = torch.device("cpu"), 0
        self.lock = threading.Lock()
        self.workspace = StubWorkspace()
        self._errors = torch.zeros(24, dtype=torch.uint8)
        self._state = ctypes.c_uint32.from_address(self._errors.data_ptr())
        self._dead, self._over, self._reported = "", False, False
        self._generation, self._notices = StubGeneration(), StubNotices()  # type: ignore[assignment]
        self._agreed, self._order, self._next_look = set(), Order(), 0.0
        self._bound, self._refused = state_of(name, BoundCalls), 0
        room = SimpleNamespace(covers=lambda need: True)
        self._memory = SimpleNamespace(workspace=self.workspace, capacity=room)  # type: ignore[assignment]
        self.compared: list[str] = []  # what the ranks have met for
        self._kept = []

    def _compare(self, descriptor: str) -> None:
        self.compared.append(descriptor)

    def _grow(self, need: Need) -> None:
        raise AssertionError("there is room for every call")

    def trap(self) -> None:
        """A wait of a kernel has failed."""
        self._state.value = 2

    def error(self) -> FusedOpError | None:
        return PeerTimeoutError("waited for a chunk") if self._state.value else None

    def close(self) -> None:
        self._dead = "it was destroyed"


def _prepare_gather(call: GatherCall, seat: Seat, weights: Any, plan: Plan) -> Prepared:
    return Prepared((call.shape, weights, call.dim), f"gather {call} {weights} {plan}", Need())


def _prepare_scatter(call: ScatterCall, seat: Seat, row_stride: int, weight: Any, plan: Plan) -> Prepared:
    dtype, scale = DTYPES[call.dtype], call.scale * call.factor
    seen = (call.shape, dtype, row_stride, weight, call.dim, scale)
    return Prepared(seen, f"scatter {call} {seen} {plan}", Need(), partials=8)


def make_group() -> None:
    """The default group, of ranks that pretend to communicate."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)


def stub_engine(group: type[StubGroup] = StubGroup) -> CudaEngine:
    return CudaEngine(group, Preparation(_prepare_gather, _prepare_scatter))


@contextmanager
def stubbed() -> Iterator[None]:
    """A group of two ranks whose fused ops on the CPU run on the CUDA engine, on the stub."""
    make_group()
    try:
        with engine.standing_in("cpu", stub_engine()):
            yield
    finally:
        dist.destroy_process_group()
