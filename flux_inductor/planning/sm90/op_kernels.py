"""What planning asks the sm_90 kernels of one op: their tiles, their own order, and how long they take."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from flux_inductor.planning.plan import Plan
from flux_inductor.planning.problem import Problem
from flux_inductor.planning.sm90.tiles import Grid, Menu
from flux_inductor.planning.sm90.timeline import Rounds
from flux_inductor.planning.tile import Tile


class OpKernels(ABC):
    """The kernels of one op.

    Args:
        last_chunk: whether the last chunk of a shard may have a size of its own, in slices (uneven.py).
    """

    last_chunk: ClassVar[bool]

    @abstractmethod
    def menu(self, problem: Problem) -> Menu:
        """The tiles that a plan may name for a problem, compiled or not."""

    @abstractmethod
    def best_chunks_first(self, problem: Problem, sizes: Sequence[int]) -> list[int]:
        """Sizes of chunks, those first that were measured best where the model sees no difference."""

    @abstractmethod
    def complete(self, problem: Problem, plan: Plan, tiles: Grid) -> Plan:
        """The plan with the tile of `tiles`, and a sweep and chunks that suit it."""

    @abstractmethod
    def epilogue_us(self, problem: Problem, tile: Tile) -> float:
        """From the product of a tile to the next one's start, on one SM."""

    @abstractmethod
    def time_us(self, problem: Problem, plan: Plan, launches: Sequence[Rounds]) -> tuple[float, int]:
        """Microseconds of a completed plan on the device, and the copies that the host queues for it.

        Args:
            launches: of the kernel, one for each weight.
        """

    @abstractmethod
    def fault(
        self, problem: Problem, plan: Plan, at_once: Sequence[int], resident: Sequence[int] | None
    ) -> str | None:
        """What is wrong with the kernels' order; see kernel_checker.counter_example."""
