"""Looks at the error records of all CUDA groups, also while the program waits for the device.

A kernel whose wait has run into the limit writes a record into host memory and traps. The next call of the
group raises what it says; until there is one, this thread says in the log what happened, since all that the
program sees is a CUDA error wherever it next waits for the device.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from typing import Protocol

from flux_inductor.runtime.errors import FusedOpError

PERIOD_S = 0.5

_log = logging.getLogger("flux_inductor")


class Watched(Protocol):
    """A group with an error record."""

    def error(self) -> FusedOpError | None: ...

    def fail(self, why: str) -> None: ...


_groups: weakref.WeakSet[Watched] = weakref.WeakSet()
_starting = threading.Lock()
_thread: threading.Thread | None = None


def watch(group: Watched) -> None:
    """Looks after `group` as long as it lives."""
    global _thread
    with _starting:
        _groups.add(group)
        if _thread is None:
            _thread = threading.Thread(target=_run, name="flux_inductor watchdog", daemon=True)
            _thread.start()


def _run() -> None:
    reported: weakref.WeakSet[Watched] = weakref.WeakSet()
    while True:
        time.sleep(PERIOD_S)
        for group in list(_groups):
            error = group.error()
            if error is not None and group not in reported:
                reported.add(group)
                _log.error("%s", error)
