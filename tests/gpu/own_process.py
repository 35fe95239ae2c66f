"""Calls in a process of their own: those that lose the CUDA context, and those that might never end."""

import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any


def run_in_process(fn: Callable[..., Any], *args: Any, seconds: float = 120) -> Any:
    """What the module-level function `fn` returns in a fresh process, which is killed when time is up."""
    spawn = multiprocessing.get_context("spawn")
    receiver, sender = spawn.Pipe(duplex=False)
    process = spawn.Process(target=_call, args=(sender, fn, args), daemon=True)
    process.start()
    sender.close()
    try:
        if not receiver.poll(seconds):
            raise TimeoutError(f"{fn.__name__}{args} did not end within {seconds} s")
        succeeded, answer = receiver.recv()
    except EOFError:
        process.join()
        raise RuntimeError(f"{fn.__name__}{args} died with exit code {process.exitcode}") from None
    finally:
        process.kill()
        process.join()
    if not succeeded:
        raise RuntimeError(f"{fn.__name__}{args} raised\n{answer}")
    return answer


def _call(sender: Connection, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        answer = (True, fn(*args))
    except Exception:
        answer = (False, traceback.format_exc())
    sender.send(answer)
    sender.close()
    # An interpreter that ends in order frees its tensors, which a lost context makes fail.
    os._exit(0)
