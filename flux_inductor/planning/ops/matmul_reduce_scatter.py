"""matmul_reduce_scatter: x times a weight, summed over the ranks, of which each keeps its part."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, TypeAlias, get_args

import sympy

from flux_inductor._core import ScatterSchedule
from flux_inductor.planning.ops.op import Microseconds, Op, Orders, Terms
from flux_inductor.planning.plan import Direction, Plan
from flux_inductor.planning.problem import Layout, Problem, Size
from flux_inductor.planning.topology import Device

ReduceOp: TypeAlias = Literal["sum", "avg"]
REDUCE_OPS: tuple[ReduceOp, ...] = get_args(ReduceOp)


@dataclass(frozen=True, repr=False)
class MatmulReduceScatter(Op):
    """A transfer waits until its source has multiplied the chunk; a step of an own chunk, which adds the
    partials up, waits until every peer's has arrived."""

    name = "matmul_reduce_scatter"
    collective = "reduce_scatter"
    # Only a kernel that makes partials can store them where they belong.
    directions: ClassVar = {"cpu": ("push", "pull"), "cuda": ("push", "store")}
    collective_first = False

    def check(self, problem: Problem) -> None:
        assert len(problem.columns) == 1, problem
        assert not problem.return_gathered, problem

    def moved_width(self, problem: Problem) -> Size:
        return problem.columns[0]

    def shard_bytes(self, problem: Problem) -> Size:
        other = problem.rows if problem.split == "columns" else problem.columns[0]
        return problem.strips * problem.extent * other * problem.result_itemsize

    def priced(self, problem: Problem, up: Callable[[Size], int]) -> Problem:
        return replace(problem, depth=up(problem.depth))

    def orders(self, world: int, rank: int, extent: int, chunk: int) -> Orders:
        order = ScatterSchedule(world, rank, 1, extent, 1, (chunk, 1, 1, 1), 1, 1)
        places = [(part, m) for ((part, _, m, _, _),) in order.clusters(1)]
        return places, [part for part, *_ in order.chunks()]

    def owner(self, source: int, target: int) -> int:
        return target

    def sources(self, world: int, rank: int, owner: int) -> Iterable[int]:
        return (peer for peer in range(world) if peer != rank) if owner == rank else ()

    def exchange(self, plan: Plan, device: Device) -> Plan:
        """On CUDA all but the SMs in reserve, which each rank needs for communication of its own: chunks are
        cut along the order of the tiles."""
        if device == "cuda":
            return replace(plan, reserve=0)
        return replace(plan, tile=None, sweep=0, width=0, reserve=0)

    def collective_cost(self, t: Terms) -> tuple[Microseconds, object]:
        return t.reduce_scatter, t.reduce

    def matmuls_of_step(self, t: Terms) -> object:
        """One: partials are packed."""
        return 1

    def copied_shards(self, direction: Direction, t: Terms) -> object:
        """Partials are added up."""
        return t.world - 1

    def ends(
        self, step: Microseconds, transfer: Microseconds, peers: object
    ) -> tuple[Microseconds, Microseconds]:
        return peers * step + transfer + step, step + peers * transfer + step


MATMUL_REDUCE_SCATTER = MatmulReduceScatter()


@dataclass(frozen=True)
class ScatterCall:
    """One call, but for its tensors and its plan. Sizes may be symbols of a compiler.

    Args:
        shape: of x, [..., K].
        columns: N of the weight [K, N].
        dtype: of x and the weight.
        layout: of the weight, see Problem.
        world: ranks of the group.
        dim: of the product [..., N] that is scattered.
        reduce_op: "sum" or "avg", over the ranks.
        scale: of the product.
        out_dtype: of the sums and the result.
        addend: another tensor is added to the product.
    """

    shape: tuple[Size, ...]
    columns: Size
    dtype: str
    layout: Layout
    world: int
    dim: int
    reduce_op: ReduceOp
    scale: float
    out_dtype: str
    addend: bool

    op: ClassVar[Op] = MATMUL_REDUCE_SCATTER

    @property
    def by_columns(self) -> bool:
        return self.dim == len(self.shape) - 1

    @property
    def problem(self) -> Problem:
        *leading, depth = self.shape
        strips, cut = ((), leading) if self.by_columns else (leading[: self.dim], leading[self.dim :])
        rows: Size = math.prod(cut)
        return Problem(
            op=self.op,
            world=self.world,
            strips=math.prod(strips),
            rows=rows if self.by_columns else _divided(rows, self.world),
            columns=(self.columns,),
            depth=depth,
            dtype=self.dtype,
            result=self.out_dtype,
            split="columns" if self.by_columns else "rows",
            addend=self.addend,
            layout=self.layout,
        )

    @property
    def product(self) -> tuple[Size, ...]:
        """The shape of the whole product."""
        return (*self.shape[:-1], self.columns)

    @property
    def results(self) -> tuple[tuple[Size, ...], ...]:
        """The shape of this rank's part."""
        shape = list(self.product)
        shape[self.dim] = shape[self.dim] // self.world
        return (tuple(shape),)

    @property
    def result_dtype(self) -> str:
        return self.out_dtype

    @property
    def moves(self) -> tuple[str, Size, str]:
        """The unfused collective: what it is, and the elements and dtype of its input."""
        return f"{self.op.collective} {self.reduce_op}", math.prod(self.product), self.out_dtype

    @property
    def empty(self) -> bool:
        """Whether the result is, on all ranks alike: nothing to send."""
        return 0 in self.results[0]

    @property
    def factor(self) -> float:
        """Of the sum over the ranks."""
        return 1 / self.world if self.reduce_op == "avg" else 1.0


def _divided(size: Size, world: int) -> Size:
    """The size, which is known to be a multiple of world, divided by it."""
    return size / world if isinstance(size, sympy.Expr) else size // world
