"""What an installation can execute, as a value: the runtime knows it, and hands it to the strategy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from flux_inductor.planning.problem import Layout, Problem
from flux_inductor.planning.topology import Device

Variant: TypeAlias = tuple[str, Layout]  # a dtype, and how weights lie


@dataclass(frozen=True)
class InstalledEngine:
    """One that executes fused plans.

    Args:
        variants: that its kernels were compiled for, sorted; None: it takes all.
    """

    device: Device
    variants: tuple[Variant, ...] | None = None

    def __str__(self) -> str:
        return f"{self.device} {list(self.variants or ())}"


@dataclass(frozen=True)
class Installed:
    """The engines that there are, one a device."""

    engines: tuple[InstalledEngine, ...]

    def executes(self, device: Device) -> bool:
        return any(engine.device == device for engine in self.engines)

    def has_kernel(self, device: Device, problem: Problem) -> bool:
        """Whether kernels for the problem's dtype and layout were compiled."""
        variants = next(engine.variants for engine in self.engines if engine.device == device)
        return variants is None or (problem.dtype, problem.layout) in variants

    def __str__(self) -> str:
        return " ".join(map(str, self.engines))


CPU_ONLY = Installed((InstalledEngine("cpu"),))
