"""The devices that plans are made for, as tests have them: H200s."""

from __future__ import annotations

from collections.abc import Mapping

from flux_inductor.planning.architecture import Architecture
from flux_inductor.planning.architectures import KINDS
from flux_inductor.planning.topology import USUAL_SMS, Device

SMS = USUAL_SMS["cuda"]
ARCHITECTURES: Mapping[Device, Architecture] = {device: KINDS[device](USUAL_SMS[device]) for device in KINDS}
