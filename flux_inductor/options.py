"""The options of flux_inductor, where they come from, and Inductor's own beside them.

One option may be given in several places; the first that names it wins:

    torch.compile(model, backend="flux_inductor", options={"strategy": "always"})
    with flux_inductor.options(strategy="always"): ...
    FLUX_INDUCTOR_STRATEGY=always python train.py

The backend resolves them once per graph, when it is entered, into a frozen `Options`; a backward that is
compiled later sees that same object. This module does not import torch when it is imported (see __init__.py).
"""

from __future__ import annotations

import difflib
import os
import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields
from types import MappingProxyType, UnionType
from typing import Any, Literal

from flux_inductor import environment

Strategy = Literal["auto", "always", "never"]
STRATEGIES: tuple[Strategy, ...] = typing.get_args(Strategy)

ENVIRONMENT_PREFIX = "FLUX_INDUCTOR_"
_SWITCH = {
    "1": True,
    "true": True,
    "yes": True,
    "on": True,
    "0": False,
    "false": False,
    "no": False,
    "off": False,
}


@dataclass(frozen=True)
class Options:
    """How one graph is compiled. Plain data: equal options mean equal rewrites of equal graphs.

    Args:
        strategy: "auto" fuses what the cost model finds faster, "always" whatever can be fused, "never"
            nothing.
        strict: a pair that can be fused but is left unfused is an error.
        report: print the table of the graph's collectives, on the first rank, to stderr.
        topology: written topology, such as "cpu ranks=2 nodes=1 link=shm", for the groups of that many
            ranks; "" detects it.
        reserve_sms: how many of a GPU's SMs fused kernels leave to other
            communication of the program; "auto" leaves some where the group is a part of all ranks.

    Raises:
        ValueError: a value of the wrong type or outside the valid ones.
    """

    strategy: Strategy = "auto"
    strict: bool = False
    report: bool = False
    topology: str = ""
    reserve_sms: int | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        for option in fields(self):
            value = getattr(self, option.name)
            expected = type(option.default)
            if option.name == "reserve_sms" and value != "auto":
                expected = int
            if type(value) is not expected:
                raise ValueError(
                    f"option {option.name}={value!r} has type {type(value).__name__}, not "
                    f"{expected.__name__}; valid options: {describe_options()}"
                )
        if self.strategy not in STRATEGIES:
            raise ValueError(f"option strategy={self.strategy!r} is unknown; valid: {', '.join(STRATEGIES)}")
        if self.topology:
            from flux_inductor.planning.topology import Topology

            Topology.parse(self.topology)
        if self.reserve is not None and self.reserve < 0:
            raise ValueError(f"option reserve_sms={self.reserve} must be 0 or more, or 'auto'")

    @property
    def reserve(self) -> int | None:
        """reserve_sms, None for "auto"."""
        return None if self.reserve_sms == "auto" else self.reserve_sms


_NAMES = tuple(option.name for option in fields(Options))
_NOTHING: Mapping[str, object] = MappingProxyType({})
_in_context: ContextVar[Mapping[str, object]] = ContextVar("flux_inductor_options", default=_NOTHING)

_VARIABLES = tuple(ENVIRONMENT_PREFIX + name.upper() for name in _NAMES)
_KEYS = tuple(variable.encode() for variable in _VARIABLES)


def describe_options() -> str:
    """All options with their values, for messages: 'strategy=auto|always|never, strict=True|False, ...'."""
    values = {
        "strategy": "|".join(STRATEGIES),
        "topology": "<text>",
        "reserve_sms": "auto|<count>",
    }
    return ", ".join(f"{name}={values.get(name, 'True|False')}" for name in _NAMES)


@contextmanager
def options(**values: object) -> Iterator[None]:
    """Options, ours and Inductor's, for all that is compiled inside the block in this thread. Blocks nest.

    What was compiled before keeps the options it was compiled with.

    Raises:
        ValueError: an unknown or ill-typed option.
    """
    resolve(given=values)
    token = _in_context.set({**_in_context.get(), **values})
    try:
        yield
    finally:
        _in_context.reset(token)


def resolve(
    mode: str | None = None, given: Mapping[str, object] | None = None
) -> tuple[Options, dict[str, object]]:
    """Splits what torch.compile was given into our options and Inductor's.

    Args:
        mode: torch.compile's mode, which stands for options of Inductor.
        given: torch.compile's options, ours and Inductor's mixed.

    Returns:
        Ours, completed from context, environment and defaults, and Inductor's as a patch of its config.

    Raises:
        ValueError: an unknown or ill-typed key of either kind, a bad environment variable or mode.
    """
    ours: dict[str, Any] = _from_environment()
    theirs: dict[str, object] = {}
    for source in (_in_context.get(), _of_mode(mode), given or _NOTHING):
        for name, value in source.items():
            (ours if name in _NAMES else theirs)[name] = value
    return Options(**ours), _checked_for_inductor(theirs)


def current() -> Options:
    """resolve()[0], remembered until the context or the environment changes: 0.3 us instead of 7.

    Of the environment, it compares the values of our variables and the count of all, since one more may be
    a misspelt one. One that takes the place of another goes unnoticed until something else changes, or
    until resolve() is called; to compare all names would cost a microsecond.
    """
    global _latest
    sources = (_in_context.get(), len(environment.values), *map(environment.values.get, _KEYS))
    seen, found = _latest
    if found is None or sources != seen:
        found = resolve()[0]
        _latest = sources, found  # one assignment, since other threads read both
    return found


_latest: tuple[tuple[object, ...], Options | None] = ((), None)


def _unknown(name: str, known: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(name, known, n=3)
    hint = f" (did you mean {' or '.join(near)}?)" if near else ""
    return f"unknown option {name!r}{hint}; valid options of flux_inductor: {describe_options()}"


def _from_environment() -> dict[str, Any]:
    values: dict[str, Any] = {}
    for variable in os.environ:
        if not variable.startswith(ENVIRONMENT_PREFIX):
            continue
        name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
        if variable in _VARIABLES:
            values[name] = _parse(variable, os.environ[variable], name)
        elif near := difflib.get_close_matches(name, _NAMES, n=1, cutoff=0.75):
            # Not every variable of this prefix is an option (FLUX_INDUCTOR_ENGINE is none); catch slips only.
            raise ValueError(
                f"unknown environment variable {variable}; "
                f"did you mean {ENVIRONMENT_PREFIX}{near[0].upper()}?"
            )
    return values


def _parse(variable: str, text: str, name: str) -> object:
    if name == "reserve_sms" and text != "auto":
        if not (text.isascii() and text.isdecimal()):
            raise ValueError(f"{variable}={text!r} is neither 'auto' nor a count of SMs such as 8")
        return int(text)
    if not isinstance(getattr(Options, name), bool):
        return text
    if text.lower() not in _SWITCH:
        raise ValueError(f"{variable}={text!r} is neither on nor off; valid: {', '.join(_SWITCH)}")
    return _SWITCH[text.lower()]


def _of_mode(mode: str | None) -> Mapping[str, object]:
    if mode is None:
        return _NOTHING
    from torch._inductor import list_mode_options

    modes: dict[str, dict[str, object]] = list_mode_options()
    if mode not in modes:
        raise ValueError(f"unknown mode {mode!r}; valid: {', '.join(modes)}")
    return modes[mode]


def _checked_for_inductor(given: Mapping[str, object]) -> dict[str, object]:
    """The keys with '-' read as '_', as torch does; ValueError for what Inductor would stumble over later."""
    if not given:
        return {}
    from torch._inductor import config

    type_of: Callable[[str], object] = config.get_type  # type: ignore[attr-defined]
    known = config.get_config_copy()
    checked: dict[str, object] = {}
    for key, value in given.items():
        name = key.replace("-", "_")
        if name not in known:
            raise ValueError(
                _unknown(key, (*_NAMES, *known))
                + "; every option of Inductor (torch._inductor.list_options()) is valid too"
            )
        if not _fits(value, type_of(name)):
            declared = type_of(name)
            expected = declared.__name__ if isinstance(declared, type) else declared
            raise ValueError(
                f"option {key}={value!r} of Inductor has type {type(value).__name__}, not {expected}; "
                f"it is {known[name]!r} by default"
            )
        checked[name] = value
    return checked


def _fits(value: object, expected: object) -> bool:
    """Whether `value` has a type that Inductor declares; True for types that isinstance cannot decide."""
    origin = typing.get_origin(expected)
    if origin in (UnionType, typing.Union):
        return any(_fits(value, member) for member in typing.get_args(expected))
    if origin is Literal:
        return value in typing.get_args(expected)
    return isinstance(value, expected) if isinstance(expected, type) else True
