"""Process groups by name, and what engines keep for each as long as it lives."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

from flux_inductor.runtime.torch_private import group_size, process_group, until_destroyed

__all__ = [
    "GroupState",
    "close_all",
    "end",
    "ending",
    "group_size",
    "name_of",
    "process_group",
    "state_of",
    "workspace_bytes",
]


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


class GroupState(Protocol):
    """What an engine keeps for one process group, for example its shared memory."""

    def __init__(self, name: str, group: dist.ProcessGroup) -> None: ...

    def close(self) -> None:
        """Gives everything back. No call is running, and none follows."""
        ...


@dataclass(frozen=True, slots=True)
class _Kept:
    group: weakref.ref[dist.ProcessGroup]
    watch: object  # for the group's end
    state: Any  # of the kind that it is kept under


State = TypeVar("State", bound=GroupState)
_kept: dict[tuple[type[GroupState], str], _Kept] = {}
_changing = threading.RLock()


def state_of(name: str, kind: type[State]) -> State:
    """The state of that kind for a group: the one made before, or a new one `kind(name, group)`.

    A group that was destroyed and made anew under the same name gets a new state; the old one is closed when
    its process group is destroyed.

    Raises:
        ValueError: there is no such group on this rank.
    """
    group = process_group(name)
    kept = _kept.get((kind, name))
    if kept is None or kept.group() is not group:
        with _changing:
            kept = _kept.get((kind, name))
            if kept is None or kept.group() is not group:
                kept = _replace(kept, name, kind, group)
    state: State = kept.state
    return state


def _replace(old: _Kept | None, name: str, kind: type[GroupState], group: dist.ProcessGroup) -> _Kept:
    if old is not None:
        old.state.close()
    new = _kept[kind, name] = _Kept(
        weakref.ref(group),
        until_destroyed(group, lambda destroyed: _drop(kind, name, destroyed)),
        kind(name, group),
    )
    return new


def _drop(kind: type[GroupState], name: str, destroyed: object) -> None:
    """Closes the state of a process group that was destroyed, unless a newer group has its place already."""
    with _changing:
        kept = _kept.get((kind, name))
        if kept is not None and kept.watch is destroyed:
            del _kept[kind, name]
            kept.state.close()


def end(name: str, error: Exception) -> None:
    """Tells everything that is kept for a group that it is dead for fused ops, and so the other ranks."""
    with _changing:
        states = [kept.state for (_, group), kept in _kept.items() if group == name]
    for state in states:
        if hasattr(state, "end"):
            state.end(error)


def workspace_bytes() -> int:
    """Memory that this rank holds for its peers to reach, over all groups."""
    return sum(getattr(kept.state, "workspace_bytes", 0) for kept in _kept.values())


def ending() -> bool:
    """Whether states are closed because the process ends: then nothing may be waited for."""
    return _ending


_ending = False


@atexit.register
def close_all() -> None:
    """Closes every state, so that no thread runs into the interpreter's end."""
    global _ending
    _ending = True
    with _changing:
        while _kept:
            _kept.popitem()[1].state.close()


def _forget_in_child() -> None:
    """A fork's child must not tell the peers that their rank leaves; its copies are no use to it."""
    _inherited.append(dict(_kept))
    _kept.clear()


_inherited: list[dict[tuple[type[GroupState], str], _Kept]] = []
os.register_at_fork(after_in_child=_forget_in_child)
