"""The kinds of devices that plans are made for."""

from __future__ import annotations

from collections.abc import Mapping

from flux_inductor.planning.architecture import Architecture
from flux_inductor.planning.cpu import Cpu
from flux_inductor.planning.sm90.sm90 import Sm90
from flux_inductor.planning.topology import Device

ARCHITECTURES: Mapping[Device, Architecture] = {"cpu": Cpu(), "cuda": Sm90()}


def check_reserve(reserve: int) -> None:
    """ValueError for a number of SMs that no kernel can leave alone."""
    largest = max(ARCHITECTURES.values(), key=lambda one: one.sms)
    if not 0 <= reserve <= largest.most_reserve:
        raise ValueError(
            f"reserve_sms={reserve} is out of range: a kernel can leave 0 to {largest.most_reserve} of the "
            f"device's {largest.sms} SMs to other communication"
        )
