"""all_gather_matmul: the ranks' shards of x, gathered, times one or more weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

from flux_inductor._core import GatherSchedule
from flux_inductor.planning.ops.op import Microseconds, Op, Orders, Terms
from flux_inductor.planning.plan import Direction, Plan
from flux_inductor.planning.problem import Layout, Problem, Size
from flux_inductor.planning.topology import Device


@dataclass(frozen=True, repr=False)
class AllGatherMatmul(Op):
    """A step of a peer's chunk waits until the chunk has arrived; the own shard is there from the start."""

    name = "all_gather_matmul"
    collective = "all_gather"
    # On CUDA a pull would need a signal that a copy engine fetches from its owner.
    directions: ClassVar = {"cpu": ("push", "pull"), "cuda": ("push",)}
    collective_first = True

    def check(self, problem: Problem) -> None:
        assert problem.split == "rows", problem
        assert not problem.addend, problem
        assert not problem.result, problem

    def moved_width(self, problem: Problem) -> Size:
        return problem.depth

    def shard_bytes(self, problem: Problem) -> Size:
        return problem.strips * problem.rows * problem.depth * problem.itemsize

    def priced(self, problem: Problem, up: Callable[[Size], int]) -> Problem:
        return replace(problem, columns=tuple(map(up, problem.columns)))

    def orders(self, world: int, rank: int, extent: int, chunk: int) -> Orders:
        order = GatherSchedule(world, rank, 1, extent, 1, 1, (chunk, 1, 1, 1), 1, chunk)
        places = [(part, m) for ((part, _, m, _, _),) in order.clusters()]
        return places, [peer for peer, *_ in order.copies()]

    def owner(self, source: int, target: int) -> int:
        return source

    def sources(self, world: int, rank: int, owner: int) -> Iterable[int]:
        return () if owner == rank else (owner,)

    def exchange(self, plan: Plan, device: Device) -> Plan:
        """Not the tile: each rank cuts the rows that arrive as it likes."""
        return replace(plan, tile=None, sweep=0, width=0, reserve=0)

    def collective_cost(self, t: Terms) -> tuple[Microseconds, object]:
        return t.all_gather, t.gather

    def matmuls_of_step(self, t: Terms) -> object:
        """One for each strip, since its rows of the product lie apart."""
        return t.strips

    def copied_shards(self, direction: Direction, t: Terms) -> object:
        """An input that peers pull is first copied to where they can reach it. A gathered tensor that the
        program keeps is copied out of the buffer that peers push into."""
        return 1 + t.kept if direction == "pull" else t.world * t.kept

    def ends(
        self, step: Microseconds, transfer: Microseconds, peers: object
    ) -> tuple[Microseconds, Microseconds]:
        return transfer + peers * step, peers * transfer + step


ALL_GATHER_MATMUL = AllGatherMatmul()


@dataclass(frozen=True)
class GatherCall:
    """One call, but for its tensors and its plan. Sizes may be symbols of a compiler.

    Args:
        shape: of the shard x, [..., K].
        columns: N of each weight [K, N].
        dtype: of all tensors.
        layout: of the weights, see Problem.
        world: ranks of the group.
        dim: of x that is gathered.
        return_gathered: the gathered tensor is a result, too.
    """

    shape: tuple[Size, ...]
    columns: tuple[Size, ...]
    dtype: str
    layout: Layout
    world: int
    dim: int
    return_gathered: bool

    op: ClassVar[Op] = ALL_GATHER_MATMUL

    @property
    def problem(self) -> Problem:
        *leading, depth = self.shape
        return Problem(
            op=self.op,
            world=self.world,
            strips=math.prod(leading[: self.dim]),
            rows=math.prod(leading[self.dim :]),
            columns=self.columns,
            depth=depth,
            dtype=self.dtype,
            return_gathered=self.return_gathered,
            layout=self.layout,
        )

    @property
    def gathered(self) -> tuple[Size, ...]:
        """The shape of the gathered tensor."""
        before, size, after = self.shape[: self.dim], self.shape[self.dim], self.shape[self.dim + 1 :]
        return (*before, size * self.world, *after)

    @property
    def results(self) -> tuple[tuple[Size, ...], ...]:
        """Shapes: a product for each weight, then the gathered tensor if it is wanted."""
        products = ((*self.gathered[:-1], columns) for columns in self.columns)
        return (*products, *([self.gathered] if self.return_gathered else []))

    @property
    def result_dtype(self) -> str:
        return self.dtype

    @property
    def moves(self) -> tuple[str, Size, str]:
        """The unfused collective: what it is, and the elements and dtype of its input."""
        return self.op.collective, math.prod(self.shape), self.dtype

    @property
    def empty(self) -> bool:
        """Whether there are no rows, on all ranks alike: nothing to send."""
        return 0 in self.shape[:-1]
