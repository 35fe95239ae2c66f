"""What the strategy asks the kind of device that it plans for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from flux_inductor.planning.machine import MachineModel
from flux_inductor.planning.plan import Plan
from flux_inductor.planning.problem import Problem
from flux_inductor.planning.topology import Device

# A shard is cut into at most this many chunks: beyond, only fixed costs grow.
MOST_CHUNKS = 32


@dataclass(frozen=True)
class Architecture(ABC):
    """One kind of device.

    Args:
        device: its type.
        machine: its speeds.
        reserve: SMs that its kernels leave to other communication, where there is any; 0: it has no SMs.
        sms: of one device, on which its kernels run.
    """

    device: ClassVar[Device]
    machine: ClassVar[MachineModel]
    reserve: ClassVar[int]

    sms: int

    @property
    def most_reserve(self) -> int:
        """SMs that a plan may leave, at most: who wants more is better off unfused. The engine holds plans to
        the same share of the device that it finds."""
        return self.sms // 2

    @abstractmethod
    def limit(self, problem: Problem) -> str:
        """Why no engine runs this problem, as a sentence with the sizes; "" if one may.

        Sizes that are unknown until the program runs are taken for suitable; the engine checks them again.
        """

    @abstractmethod
    def chunks(self, problem: Problem) -> list[int]:
        """Sizes of chunks worth trying; the best first, of those that the model finds equal."""

    @abstractmethod
    def completed(self, problem: Problem, plans: Sequence[Plan]) -> tuple[Plan, ...]:
        """Plans with all that an engine needs of them, and others that these suggest."""

    @abstractmethod
    def fused_us(self, problem: Problem, plan: Plan) -> float | None:
        """Microseconds of a fused plan, where more is known of them than the cost model's formulas say."""


def cuts(extent: int, granule: int) -> list[int]:
    """Sizes of chunks that cut so many rows into 1, 2, 4, ... parts of whole granules, the largest first.

    What rounding makes larger than a shard is the shard.
    """
    sizes = {-(-extent // (1 << power)) for power in range(MOST_CHUNKS.bit_length())}
    return sorted({min(-(-size // granule) * granule, extent) for size in sizes}, reverse=True)


def powers(granule: int, most: int) -> list[int]:
    """Sizes of chunks for extents that are unknown: granule, twice that, ... up to `most`; largest first."""
    return [granule << power for power in reversed(range((most // granule).bit_length()))]
