"""What planning asks a fused op.

Schedule, checker, cost model, exchange and strategy are generic: whatever differs between ops is asked here.
An op has no state, so that two of one class are the same op, also in another process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from flux_inductor.planning.topology import Device

if TYPE_CHECKING:
    from flux_inductor.planning.plan import Direction, Plan
    from flux_inductor.planning.problem import Problem, Size

Terms: TypeAlias = SimpleNamespace  # of the cost model, see cost.py
Microseconds: TypeAlias = Any  # float, or sympy.Expr when a term is one
# (shard, chunk of it) of each step, and the peers to whom a rank pushes.
Orders: TypeAlias = tuple[Sequence[tuple[int, int]], Sequence[int]]


class Op(ABC):
    """One fused op.

    Args:
        name: of the op in graphs and in the Python API.
        collective: of the unfused pair.
        directions: what the engine of a device can do.
        collective_first: whether the collective feeds the matmul, or the matmul the collective.
    """

    name: ClassVar[str]
    collective: ClassVar[str]
    directions: ClassVar[Mapping[Device, tuple[Direction, ...]]]
    collective_first: ClassVar[bool]

    def __repr__(self) -> str:
        return self.name

    # ------------------------------------------------------------ sizes

    @abstractmethod
    def check(self, problem: Problem) -> None:
        """Asserts what every problem of this op has."""

    @abstractmethod
    def moved_width(self, problem: Problem) -> Size:
        """Elements of one row of what crosses the link."""

    @abstractmethod
    def shard_bytes(self, problem: Problem) -> Size:
        """Bytes that one rank sends to one peer."""

    @abstractmethod
    def priced(self, problem: Problem, up: Callable[[Size], int]) -> Problem:
        """The problem with those sizes rounded up by `up` that may differ between ranks."""

    # ------------------------------------------------------------ schedule

    @abstractmethod
    def orders(self, world: int, rank: int, extent: int, chunk: int) -> Orders:
        """The compiled core's orders of one rank, for tiles as large as a chunk."""

    @abstractmethod
    def owner(self, source: int, target: int) -> int:
        """Whose shard moves from `source` to `target`."""

    @abstractmethod
    def sources(self, world: int, rank: int, owner: int) -> Iterable[int]:
        """The peers whose data the step of a chunk of `owner` waits for on `rank`."""

    @abstractmethod
    def exchange(self, plan: Plan, device: Device) -> Plan:
        """The part of a fused plan that all ranks must follow, with the rest left out."""

    # ------------------------------------------------------------ cost

    @abstractmethod
    def collective_cost(self, t: Terms) -> tuple[Microseconds, Any]:
        """(fixed cost, rate) of the unfused collective."""

    @abstractmethod
    def matmuls_of_step(self, t: Terms) -> Any:
        """Calls of a matmul for each weight in one step, where steps call matmuls."""

    @abstractmethod
    def copied_shards(self, direction: Direction, t: Terms) -> Any:
        """Copies of a shard inside a rank's memory that nothing hides."""

    @abstractmethod
    def ends(
        self, step: Microseconds, transfer: Microseconds, peers: Any
    ) -> tuple[Microseconds, Microseconds]:
        """When a fused op can end at the earliest, as bound by its first and by its last transfer.

        Args:
            step, transfer: of one chunk. peers: chunks that cross the link, `(world - 1) * chunks`.
        """
