"""Records kept beside Inductor's cache, for graphs that come out of it.

A graph from Inductor's cache skips the pass, and the cached artifact has no room for records. So the records
of every compiled graph are also written to a small file in the cache directory, under a key of the graph and
of everything that decides its rewrite; a process that finds its graph cached reports what it reads there, as
"loaded from the cache". The file is a convenience of the report: without it the graph runs just the same, and
the report says that nothing is on record. It lives and dies with the cache directory.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from torch._inductor import config
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._logging._internal import warning_once

from flux_inductor.passes.record import CollectiveRecord

logger = logging.getLogger("flux_inductor")

Kept = dict[str, tuple[CollectiveRecord, ...]]  # by the graph's part: "forward", "backward", "inference"


def enabled() -> bool:
    """Whether Inductor may load a graph from its cache."""
    return bool(config.fx_graph_cache) and not config.force_disable_caches


def key_of(gm: torch.fx.GraphModule, example_inputs: Sequence[object], *decisive: object) -> str:
    """A key for the graph as Dynamo hands it over; equal in every process that compiles the same.

    Ranks may share it, as they share Inductor's cache: what a plan is made from is the same on all of them.

    Args:
        gm: Dynamo's graph.
        example_inputs: its tensors and symbolic sizes; shapes, strides, dtypes and devices count.
        decisive: whatever else decides the rewrite, each with a repr that names it fully.
    """
    world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    inputs = [_describe(value) for value in example_inputs]
    # Bodies of higher-order operators, such as activation checkpointing, are modules of their own.
    graphs = [str(module.graph) for module in gm.modules() if isinstance(module, torch.fx.GraphModule)]
    text = repr((graphs, inputs, torch.is_grad_enabled(), world, decisive))
    return hashlib.sha256(text.encode()).hexdigest()


def load(key: str) -> Kept | None:
    """The records of that key; None if there is no file, or one that this version cannot read."""
    try:
        data = json.loads(_path(key).read_text())
        return {part: tuple(CollectiveRecord(**record) for record in kept) for part, kept in data.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def save(key: str, records: Kept) -> None:
    """Writes the file in one step: ranks and processes that share the directory never see half of it."""
    path = _path(key)
    data = {part: [asdict(record) for record in kept] for part, kept in records.items()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump(data, file)
        os.replace(file.name, path)
    except OSError as error:
        warning_once(
            logger,
            "cannot keep the report beside Inductor's cache (%s); later processes that load this graph from "
            "the cache will not know its collectives. Make TORCHINDUCTOR_CACHE_DIR writable.",
            error,
        )


def _path(key: str) -> Path:
    return Path(cache_dir()) / "flux_inductor" / f"{key}.json"


def _describe(value: object) -> str:
    if isinstance(value, torch.Tensor):
        layout = (tuple(value.shape), value.stride(), value.dtype, value.device, value.requires_grad)
        return f"{type(value).__name__}{layout}"
    return str(value)
