"""Looks after all CUDA groups, also while the program waits for the device.

A kernel whose wait has run into the limit writes a record into host memory and traps. The next call of the
group raises what it says; until there is one, this thread says in the log what happened, since all that the
program sees is a CUDA error wherever it next waits for the device. And it hears of calls that peers will
never begin (cuda_order.py), while kernels of this rank may be waiting for them.
"""

from __future__ import annotations

import threading
import time
import weakref
from typing import Protocol

PERIOD_S = 0.25


class Watched(Protocol):
    """A group that wants to be looked after."""

    def look(self) -> None:
        """Called once a period. Waits for nobody and never raises."""
        ...


_groups: weakref.WeakSet[Watched] = weakref.WeakSet()
_changing = threading.Lock()
_thread: threading.Thread | None = None


def watch(group: Watched) -> None:
    """Looks after `group` as long as it lives."""
    global _thread
    with _changing:
        _groups.add(group)
        if _thread is None:
            _thread = threading.Thread(target=_run, name="flux_inductor watchdog", daemon=True)
            _thread.start()


def _run() -> None:
    while True:
        time.sleep(PERIOD_S)
        look_at_all()


def look_at_all() -> None:
    with _changing:  # a set that grows cannot be iterated over
        groups = list(_groups)
    for group in groups:
        group.look()
