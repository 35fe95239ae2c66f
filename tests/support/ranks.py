"""Runs a function on several real processes that share a gloo process group.

Ranks are forked from a server that has imported torch and this package and done nothing else: importing takes
each of them seconds otherwise, most of the test suite's time.
"""

from __future__ import annotations

import os
import tempfile
import time
import traceback
from collections.abc import Callable, Collection
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

PRELOADED = ["torch", "torch._inductor.compile_fx", "torch.distributed.tensor", "flux_inductor.backend"]


def _serve(
    pipe: Connection,
    environment: dict[str, str],
    store: str,
    rank: int,
    world: int,
    seconds: float,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    """Body of one rank: joins the group, calls `fn(rank, world, *args)`, sends its result or its failure."""
    os.environ.clear()
    os.environ.update(environment)  # the server has that of its start
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, world),  # type: ignore[attr-defined]
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=seconds),
        )
        pipe.send(("ok", fn(rank, world, *args)))
        dist.destroy_process_group()
    except BaseException as error:
        pipe.send(("error", f"rank {rank}: {type(error).__name__}: {error}\n{traceback.format_exc()}"))


def run_ranks(
    fn: Callable[..., Any],
    world: int,
    *args: Any,
    timeout: float = 60,
    group_timeout: float = 30,
    dying: Collection[int] = (),
) -> list[Any]:
    """Calls the module-level function `fn(rank, world, *args)` on `world` processes; returns results by rank.

    The first failure is raised as a RuntimeError that holds the rank's traceback. Every process is ended
    when one fails or `timeout` seconds have passed. `group_timeout` is the process group's own, in seconds.
    The ranks in `dying` may end without a result, which is then None.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    environment = dict(os.environ)
    with tempfile.TemporaryDirectory(prefix="flux_ranks_") as directory:
        store = str(Path(directory) / "store")
        pipes: list[Connection] = []
        processes = []
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(theirs, environment, store, rank, world, group_timeout, fn, args),
                daemon=True,
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            return _collect(pipes, time.monotonic() + timeout, dying)
        finally:
            for process in processes:
                process.join(timeout=2)
                if process.is_alive():
                    process.kill()
                    process.join()


def _collect(pipes: list[Connection], deadline: float, dying: Collection[int]) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        waiting = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in results}
        ready = wait(list(waiting), max(deadline - time.monotonic(), 0))
        if not ready:
            raise TimeoutError(f"no answer from ranks {sorted(waiting.values())}")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = waiting[pipe]
            try:
                state, value = pipe.recv()
            except EOFError:
                if rank in dying:
                    results[rank] = None
                    continue
                raise RuntimeError(f"rank {rank} died without a word") from None
            if state == "error":
                raise RuntimeError(value)
            results[rank] = value
    return [results[rank] for rank in range(len(pipes))]
