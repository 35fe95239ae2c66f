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
    most = max(one.most_reserve for one in ARCHITECTURES.values())
    if not 0 <= reserve <= most:
        raise ValueError(
            f"reserve_sms={reserve} is out of range: a kernel can leave 0 to {most} of the "
            f"device's {2 * most} SMs to other communication"
        )
