"""Records when each chunk moved, was waited for and was multiplied, to show that they overlap."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal, TypeAlias

Activity: TypeAlias = Literal["move", "wait", "multiply"]


@dataclass(frozen=True)
class TraceEvent:
    """What `rank` of the group did with one chunk.

    Args:
        what: "move" (the transfer thread copied it), "wait" (the caller waited for it), "multiply".
        owner: the rank whose shard the chunk belongs to; with `chunk`, its index there, it names the chunk.
        start_ns, stop_ns: nanoseconds of CLOCK_MONOTONIC, which all processes of a host share.
    """

    rank: int
    what: Activity
    owner: int
    chunk: int
    start_ns: int
    stop_ns: int


_events: list[TraceEvent] | None = None
_NOTHING = nullcontext()


@contextmanager
def record_trace() -> Iterator[list[TraceEvent]]:
    """Collects the events of the fused ops that this process runs meanwhile.

    Raises:
        RuntimeError: a trace is being recorded already.
    """
    global _events
    if _events is not None:
        raise RuntimeError("a trace is being recorded already; leave that record_trace() first")
    _events = []
    try:
        yield _events
    finally:
        _events = None


def recording() -> bool:
    return _events is not None


def add(event: TraceEvent) -> None:
    if _events is not None:
        _events.append(event)


def span(rank: int, what: Activity, owner: int, chunk: int) -> AbstractContextManager[None]:
    """Records the time that its body takes, if a trace is being recorded."""
    return _NOTHING if _events is None else _timed(rank, what, owner, chunk)


@contextmanager
def _timed(rank: int, what: Activity, owner: int, chunk: int) -> Iterator[None]:
    start = time.monotonic_ns()
    yield
    add(TraceEvent(rank, what, owner, chunk, start, time.monotonic_ns()))
