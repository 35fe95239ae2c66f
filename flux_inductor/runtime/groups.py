"""Process groups by name, and what this process keeps for each."""

from __future__ import annotations

import torch.distributed as dist

from flux_inductor.runtime.torch_private import process_group

__all__ = ["group_size", "name_of", "process_group"]


def group_size(name: str) -> int:
    """How many ranks the group has.

    Raises:
        ValueError: there is no such group on this rank.
    """
    return process_group(name).size()


def name_of(group: dist.ProcessGroup | str | None) -> str:
    """The name of a group; None stands for all ranks.

    Raises:
        ValueError: torch.distributed is not initialised, or this rank is not in the group.
    """
    if group is None:
        if not dist.is_initialized():
            raise ValueError("torch.distributed is not initialised; call init_process_group first")
        group = dist.group.WORLD
    if isinstance(group, str):
        return group
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError("this rank is not in the group that was passed; only its members may call the op")
    return group.group_name
