"""What a rewrite depends on beside the graph, as a key for Inductor's cache of compiled graphs."""

from __future__ import annotations

import hashlib
import os
from functools import lru_cache
from pathlib import Path

import torch
import torch.distributed as dist

import flux_inductor
from flux_inductor.options import Options
from flux_inductor.planning.installed import Installed

_PACKAGE = Path(flux_inductor.__file__).parent
# Variables by which launchers tell how the ranks are laid out over hosts: the topology follows from it.
# Not all launchers do, and a key must not wait for peers to say where they run: they may compile later, or
# wait for this rank. So a graph may be found by ranks that are laid out otherwise; engines notice it when
# the ranks first meet (see runtime/cpu.py).
_LAYOUT = (
    *("LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"),  # torchrun
    *("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
    *("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE"),
)


def cache_key(options: Options, installed: Installed) -> str:
    """Equal exactly where the same graph is rewritten in the same way. Waits for nobody."""
    parts = (_sources(), repr(options), torch.__version__, _machine(), str(installed))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _machine() -> str:
    world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 0
    return " ".join([f"world={world}", *(f"{name}={os.environ.get(name, '')}" for name in _LAYOUT)])


@lru_cache
def _sources() -> str:
    """Of every file whose change may change a rewrite."""
    files = [
        _PACKAGE / "ops.py",
        _PACKAGE / "op_arguments.py",
        *Path(__file__).parent.rglob("*.py"),
        *(_PACKAGE / "planning").rglob("*.py"),
    ]
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()
