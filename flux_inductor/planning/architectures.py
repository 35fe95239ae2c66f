"""The kinds of devices that plans are made for."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from flux_inductor.planning.architecture import Architecture
from flux_inductor.planning.cpu import Cpu
from flux_inductor.planning.sm90.sm90 import Sm90
from flux_inductor.planning.topology import Device, Topology

KINDS: Mapping[Device, type[Architecture]] = {"cpu": Cpu, "cuda": Sm90}


@lru_cache
def architecture_of(topology: Topology) -> Architecture:
    """That of the devices of a group."""
    return KINDS[topology.device](topology.sms)


def check_reserve(reserve: int, topology: Topology) -> None:
    """ValueError for a number of SMs that no kernel there can leave alone. CPU ranks ignore it."""
    architecture = architecture_of(topology)
    if reserve < 0 or (architecture.sms and reserve > architecture.most_reserve):
        raise ValueError(
            f"reserve_sms={reserve} is out of range: a kernel can leave 0 to {architecture.most_reserve} of "
            f"the device's {architecture.sms} SMs to other communication"
        )
