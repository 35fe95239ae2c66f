"""Where the ranks of one process group sit, and what connects them.

A topology is plain data, the same on every rank of the group, and its text form round-trips:

    cpu ranks=2 nodes=1 link=shm
    cuda ranks=16 nodes=2 numa=2 link=pcie
    cuda ranks=2 nodes=1 link=nvlink shared=yes
    cuda ranks=4 nodes=1 link=nvlink sms=114

Detection from a process group is the runtime's business.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, cast

Device: TypeAlias = Literal["cpu", "cuda"]
Link: TypeAlias = Literal["shm", "nvlink", "pcie"]

LINKS: dict[Device, tuple[Link, ...]] = {"cpu": ("shm",), "cuda": ("nvlink", "pcie")}
_COUNTS = ("ranks", "nodes", "numa", "sms")
# SMs of a device where nobody has said how many: those of H100 SXM and H200.
USUAL_SMS: dict[Device, int] = {"cpu": 0, "cuda": 132}
_EXAMPLE = "'cpu ranks=2 nodes=1 link=shm' or 'cuda ranks=16 nodes=2 numa=2 link=pcie'"


@dataclass(frozen=True)
class Topology:
    """Ranks of a group and their links.

    Args:
        device: what the ranks compute on.
        ranks: all ranks of the group.
        nodes: hosts, each with the same number of ranks. To CPU ranks, a process namespace is a host.
        numa: NUMA domains of each node, each with the same number of ranks.
        link: what connects two ranks of one node.
        shared: the ranks also communicate with ranks outside of the group, as beside data parallelism: their
            devices must serve both at once.
        sms: of each device, all of which are alike; 0 stands for the usual number (none on CPU ranks).
    """

    device: Device
    ranks: int
    nodes: int = 1
    numa: int = 1
    link: Link = "shm"
    shared: bool = False
    sms: int = 0

    def __post_init__(self) -> None:
        if self.device not in LINKS:
            raise ValueError(f"topology: unknown device {self.device!r}; valid: {', '.join(LINKS)}")
        if self.link not in LINKS[self.device]:
            valid = ", ".join(LINKS[self.device])
            raise ValueError(f"topology: unknown link {self.link!r} for {self.device}; valid: {valid}")
        if not self.sms:
            object.__setattr__(self, "sms", USUAL_SMS[self.device])
        if self.sms and self.device == "cpu":
            raise ValueError(f"topology: sms={self.sms}, but CPU ranks have no SMs; leave it out")
        for name in _COUNTS if self.sms else _COUNTS[:-1]:
            if getattr(self, name) < 1:
                raise ValueError(f"topology: {name}={getattr(self, name)} must be at least 1")
        if self.ranks % self.nodes:
            raise ValueError(
                f"topology: ranks={self.ranks} is not divisible by nodes={self.nodes}; "
                "every node must hold the same number of ranks"
            )
        if self.ranks_per_node % self.numa:
            raise ValueError(
                f"topology: {self.ranks_per_node} ranks per node are not divisible by "
                f"numa={self.numa}; every NUMA domain must hold the same number of ranks"
            )

    @property
    def ranks_per_node(self) -> int:
        return self.ranks // self.nodes

    def __str__(self) -> str:
        numa = f" numa={self.numa}" if self.numa != 1 else ""
        shared = " shared=yes" if self.shared else ""
        sms = f" sms={self.sms}" if self.sms != USUAL_SMS[self.device] else ""
        return f"{self.device} ranks={self.ranks} nodes={self.nodes}{numa} link={self.link}{shared}{sms}"

    @staticmethod
    def parse(text: str) -> Topology:
        """Reads the text form. Fields may stand in any order; left out, `nodes` and `numa` are 1.

        Raises:
            ValueError: names the wrong token and the valid ones.
        """
        device, *tokens = text.split() or [""]
        if device not in LINKS:
            raise ValueError(
                f"topology {text!r}: unknown device {device!r}; valid: {', '.join(LINKS)}; "
                f"write for example {_EXAMPLE}"
            )
        fields: dict[str, str] = {}
        for token in tokens:
            key, equals, value = token.partition("=")
            if not equals or key not in (*_COUNTS, "link", "shared"):
                valid = ", ".join(f"{name}=<count>" for name in _COUNTS)
                raise ValueError(
                    f"topology {text!r}: unknown token {token!r}; valid: {valid}, link=<link>, shared=yes"
                )
            if key in fields:
                raise ValueError(f"topology {text!r}: {key} is given twice")
            if key in _COUNTS and not (value.isascii() and value.isdecimal()):
                raise ValueError(f"topology {text!r}: {token!r} must be a count, such as {key}=2")
            if key == "shared" and value not in ("yes", "no"):
                raise ValueError(f"topology {text!r}: {token!r} must be shared=yes or shared=no")
            fields[key] = value
        for key in ("ranks", "link"):
            if key not in fields:
                raise ValueError(f"topology {text!r}: {key} is missing; write for example {_EXAMPLE}")
        counts = {key: int(fields[key]) for key in _COUNTS if key in fields}
        shared = fields.get("shared") == "yes"
        return Topology(device, link=cast(Link, fields["link"]), shared=shared, **counts)
