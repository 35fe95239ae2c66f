"""One call of a fused op, as engines, agreement and strategy see it: without tensors, without a plan."""

from __future__ import annotations

from typing import Protocol

from flux_inductor.planning.ops.op import Op
from flux_inductor.planning.problem import Problem, Size


class Call(Protocol):
    """What the call objects of all ops have in common; each stands in its op's file. They are frozen."""

    @property
    def op(self) -> Op: ...

    @property
    def world(self) -> int:
        """Ranks of the group."""
        ...

    @property
    def problem(self) -> Problem: ...

    @property
    def results(self) -> tuple[tuple[Size, ...], ...]:
        """Shapes."""
        ...

    @property
    def result_dtype(self) -> str: ...

    @property
    def moves(self) -> tuple[str, Size, str]:
        """The unfused collective: what it is, and the elements and dtype of its input."""
        ...

    @property
    def empty(self) -> bool:
        """Whether nothing is moved, on all ranks alike."""
        ...
