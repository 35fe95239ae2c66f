"""Which engine runs a fused op, and how often each did."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Protocol, cast

from flux_inductor import _core, environment
from flux_inductor.planning.installed import CPU_ONLY, Installed, InstalledEngine
from flux_inductor.planning.ops.call import Call
from flux_inductor.planning.ops.op import Op
from flux_inductor.planning.plan import Plan, check_plan
from flux_inductor.planning.topology import Device
from flux_inductor.runtime.bound import Run, Tally
from flux_inductor.runtime.groups import group_size, process_group
from flux_inductor.runtime.reference import ReferenceEngine
from flux_inductor.runtime.torch_private import is_fake

ENGINE_VARIABLE = "FLUX_INDUCTOR_ENGINE"
ENGINE_CHOICES = ("auto", "reference")


class Engine(Protocol):
    """Executes the ops, each call bound first to its shapes and options (see bound.py), checked before."""

    @property
    def name(self) -> str: ...

    def bind(self, call: Call, operands: Sequence[Any], group: str, plan: Plan) -> Run:
        """What runs the call on operands of the same shapes, strides and alignment as these.

        Raises:
            ValueError: the engine cannot run it.
        """
        ...


_tallies: dict[tuple[str, str], Tally] = {}
_variable = ENGINE_VARIABLE.encode()


def engine_choice() -> bytes | None:
    """The value of FLUX_INDUCTOR_ENGINE, read anew, not checked."""
    return environment.values.get(_variable)


def tally_of(op: Op, engine: Engine) -> Tally:
    """For calls that need no choice of an engine any more: they count themselves."""
    return _tallies.setdefault((op.name, engine.name), Tally())


_UNFUSED = ReferenceEngine("unfused")
_FORCED = ReferenceEngine("reference")


def engine_for(op: Op, device_type: str, group: str, plan: Plan) -> Engine:
    """The engine for one call of `op`, which is counted.

    A group of one rank, or a fake one, has nobody to exchange with and runs as if the plan were "unfused".
    The environment variable FLUX_INDUCTOR_ENGINE is read at every call: "reference" runs the reference
    engine whatever the plan says, "auto" (or nothing) follows the plan.

    Raises:
        ValueError: the variable has another value, there is no such group, no engine for the device, or the
            engine cannot run the plan.
    """
    variable = engine_choice()
    choice = "auto" if variable is None else os.fsdecode(variable)
    if choice not in ENGINE_CHOICES:
        raise ValueError(f"{ENGINE_VARIABLE}={choice!r}; it must be one of {', '.join(ENGINE_CHOICES)}")
    engine: Engine
    if choice == "reference":
        engine = _FORCED
    elif not plan.fused or group_size(group) == 1 or _only_pretends(group, device_type):
        engine = _UNFUSED
    else:
        engine = _stand_ins.get(device_type) or _fused_engine(device_type)
        check_plan(plan, op, cast(Device, device_type))
    tally_of(op, engine).runs += 1
    return engine


@lru_cache
def installed() -> Installed:
    """The engines of this installation."""
    if not hasattr(_core, "cuda"):
        return CPU_ONLY
    from flux_inductor.runtime.cuda_kernels import compiled_variants

    return Installed((InstalledEngine("cpu"), InstalledEngine("cuda", tuple(compiled_variants()))))


def _only_pretends(group: str, device_type: str) -> bool:
    return device_type not in _stand_ins and is_fake(process_group(group))


_stand_ins: dict[str, Engine] = {}


@contextmanager
def standing_in(device_type: str, engine: Engine) -> Iterator[None]:
    """Within it, `engine` runs what is fused on such devices, in groups that only pretend, too. For tests."""
    _stand_ins[device_type] = engine
    try:
        yield
    finally:
        del _stand_ins[device_type]


@lru_cache
def _fused_engine(device_type: str) -> Engine:
    """Engines are loaded when first needed, since a CPU-only build has one of them."""
    if device_type == "cpu":
        from flux_inductor.runtime.cpu import CpuEngine

        return CpuEngine()
    if device_type == "cuda":
        from flux_inductor.runtime.cuda import CudaEngine

        return CudaEngine()
    raise ValueError(
        f"no fused engine for device {device_type!r}; move the tensors to the CPU or a CUDA device, or pass "
        "plan 'unfused'"
    )


def count_as(op: Op, chosen: Engine, ran: Engine) -> None:
    """Counts a call for the engine that ran it; it was counted for the one that was chosen, if at all."""
    tally = tally_of(op, chosen)
    tally.runs = max(tally.runs - 1, 0)
    tally_of(op, ran).runs += 1


def executions() -> dict[tuple[str, str], int]:
    """How often each (op, engine name) ran in this process since the start or the last reset."""
    return {ran: tally.runs for ran, tally in _tallies.items() if tally.runs}


def reset_executions() -> None:
    for tally in _tallies.values():
        tally.runs = 0
