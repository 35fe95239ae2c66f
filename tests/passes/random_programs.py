"""Random programs around one collective or two: what real ones do between a collective and a matmul.

A program is made from a seed. Each form below is a line of a table, so that a new one is one more line.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.passes.programs import wait

DEPTH, COLUMNS = 6, 8
Maker = Callable[..., Tensor]  # shape -> an input of the program


@dataclass
class Program:
    """Calls `body` with all inputs that were asked for while it was made.

    Args:
        forms: what was drawn, for messages.
    """

    world: int
    rng: random.Random
    inputs: list[Tensor] = field(default_factory=list)
    forms: list[str] = field(default_factory=list)

    def given(self, *shape: int) -> int:
        """A new input; its place among them."""
        self.inputs.append(torch.randn(shape))
        return len(self.inputs) - 1

    def one_of(self, forms: dict[str, Form], shape: list[int]) -> Step | None:
        """One of the forms, None if it does not fit a tensor of this shape."""
        name = self.rng.choice(list(forms))
        step = forms[name](self, shape)
        if step is not None:
            self.forms.append(name)
        return step


Step = tuple[Callable[[Tensor, list[Tensor]], Tensor], list[int]]  # of a tensor and all inputs; shape behind
Form = Callable[[Program, list[int]], Step | None]


def _same(change: Callable[[Tensor], Tensor]) -> Form:
    return lambda program, shape: (lambda t, _: change(t), shape)


def _with(operand: Callable[[list[int]], list[int]], change: Callable[[Tensor, Tensor], Tensor]) -> Form:
    """A change by another tensor, whose shape follows from that of the first one."""

    def form(program: Program, shape: list[int]) -> Step:
        place = program.given(*operand(shape))
        return lambda t, inputs: change(t, inputs[place]), shape

    return form


def _rows(change: Callable[[Tensor, int], Tensor]) -> Form:
    """A change of a dim of rows."""

    def form(program: Program, shape: list[int]) -> Step:
        dim = program.rng.randrange(len(shape) - 1)
        after = list(change(torch.empty(shape), dim).shape)
        return lambda t, _: change(t, dim), after

    return form


def _column(shape: list[int]) -> list[int]:
    return shape[-1:]


def _row(shape: list[int]) -> list[int]:
    return [*shape[:-1], 1]


def _scalar(_: list[int]) -> list[int]:
    return []


SCALES: dict[str, Form] = {
    "* 0.5": _same(lambda t: t * 0.5),
    "/ 4": _same(lambda t: t / 4),
    "neg": _same(torch.neg),
    "* scalar": _with(_scalar, torch.mul),
    "scalar *": _with(_scalar, lambda t, s: s * t),
    "/ scalar": _with(_scalar, torch.div),
    "* row": _with(_row, torch.mul),
    "* column": _with(_column, torch.mul),
}


def _joined_parts(t: Tensor, dim: int) -> Tensor:
    size = t.shape[dim]
    if size < 5:
        return t.clone()
    return torch.cat([t.narrow(dim, 0, 2), t.narrow(dim, 3, size - 3)], dim)


def _merged(t: Tensor, dim: int) -> Tensor:
    return t.flatten(0, -2) if dim == 0 else t.flatten(dim - 1, dim)


VIEWS: dict[str, Form] = {
    "trim": _rows(lambda t, dim: t.narrow(dim, 0, max(t.shape[dim] - 1, 1))),
    "trim by cat": _rows(_joined_parts),
    "pad": _rows(lambda t, dim: F.pad(t, [0, 0] * (t.dim() - 1 - dim) + [0, 1])),
    "squeeze": _same(lambda t: t.unsqueeze(0).squeeze(0)),
    "squeeze()": _rows(lambda t, dim: t.squeeze() if t.squeeze().dim() > 1 else t),
    "squeeze((0,))": _rows(lambda t, dim: t.unsqueeze(0).squeeze((0,))),
    "unsqueeze": _rows(lambda t, dim: t.unsqueeze(dim)),
    "transpose rows": _rows(lambda t, dim: t.transpose(0, dim)),
    "merge rows": _rows(_merged),
    "split and cat": _rows(lambda t, dim: torch.cat(t.split([1, t.shape[dim] - 1], dim), dim)),
    "columns away and back": _rows(lambda t, dim: t.transpose(dim, -1).contiguous().transpose(dim, -1)),
    "heads and back": _same(lambda t: t.unflatten(-1, (2, -1)).flatten(-2)),
}

ADDITIONS: dict[str, Form] = {
    "+ r": _with(list, torch.add),
    "- r": _with(list, torch.sub),
    "r -": _with(list, lambda t, r: r - t),
    # Not torch.add: Inductor loses its alpha where it makes an addmm of the sum.
    "- 0.5 r": _with(list, lambda t, r: torch.sub(t, r, alpha=0.5)),
    "- bias": _with(_column, torch.sub),
    "bias -": _with(_column, lambda t, b: b - t),
    "+ row": _with(_row, torch.add),
    "+ scalar": _with(_scalar, torch.add),
    "+ 1": _same(lambda t: t + 1.0),
    "1 -": _same(lambda t: 1 - t),
}


def _product(weight: Callable[[int], list[int]], change: Callable[[Tensor, Tensor], Tensor]) -> Form:
    def form(program: Program, shape: list[int]) -> Step:
        place = program.given(*weight(shape[-1]))
        return lambda t, inputs: change(t, inputs[place]), [*shape[:-1], COLUMNS]

    return form


def _biased(program: Program, shape: list[int]) -> Step:
    weight, bias = program.given(COLUMNS, shape[-1]), program.given(COLUMNS)
    return lambda t, inputs: F.linear(t, inputs[weight], inputs[bias]), [*shape[:-1], COLUMNS]


def _twice(program: Program, shape: list[int]) -> Step:
    """As a residual has it: t + t @ w."""
    weight = program.given(shape[-1], shape[-1])
    return lambda t, inputs: t + t @ inputs[weight], shape


def _two_weights(program: Program, shape: list[int]) -> Step:
    first, second = program.given(shape[-1], COLUMNS), program.given(shape[-1], COLUMNS)
    return lambda t, inputs: t @ inputs[first] + t @ inputs[second], [*shape[:-1], COLUMNS]


def _batched(program: Program, shape: list[int]) -> Step:
    place = program.given(1, shape[-1], COLUMNS)
    rows = math.prod(shape[:-1])

    def change(t: Tensor, inputs: list[Tensor]) -> Tensor:
        return torch.bmm(t.reshape(1, rows, -1), inputs[place]).reshape(*t.shape[:-1], COLUMNS)

    return change, [*shape[:-1], COLUMNS]


MATMULS: dict[str, Form] = {
    "x @ w": _product(lambda depth: [depth, COLUMNS], torch.matmul),
    "linear": _product(lambda depth: [COLUMNS, depth], F.linear),
    "linear with bias": _biased,
    "x @ w[1]": _product(lambda depth: [1, depth, COLUMNS], lambda t, w: t @ w if t.dim() == 3 else t @ w[0]),
    "bmm": _batched,
    "einsum kn": _product(lambda depth: [depth, COLUMNS], lambda t, w: torch.einsum("...k,kn->...n", t, w)),
    "einsum nk": _product(lambda depth: [COLUMNS, depth], lambda t, w: torch.einsum("...k,nk->...n", t, w)),
    "einsum heads": _product(
        lambda depth: [depth, 2, COLUMNS // 2],
        lambda t, w: torch.einsum("...k,khd->...hd", t, w).flatten(-2),
    ),
    "t + t @ w": _twice,
    "t @ w1 + t @ w2": _two_weights,
}


def _gathered(program: Program) -> Step:
    """A gather of a random shard along a random dim of rows; with heads, which are merged behind it."""
    rng, world = program.rng, program.world
    rows = [rng.choice([1, 2, 3]) for _ in range(rng.randint(1, 2))]
    layout = rng.choice(["plain", "plain", "heads last", "heads first", "features first"])
    program.forms.append(layout)
    dim = rng.randrange(len(rows))
    shape = {
        "plain": [*rows, DEPTH],
        "heads last": [*rows, 2, DEPTH // 2],
        "heads first": [2, *rows, DEPTH // 2],
        "features first": [DEPTH, *rows],
    }[layout]
    cut = dim + (layout in ("heads first", "features first"))
    place = program.given(*shape)

    def run(_: Tensor, inputs: list[Tensor]) -> Tensor:
        raw = wait(torch.ops._c10d_functional.all_gather_into_tensor(inputs[place], world, "0"))
        whole = raw if cut == 0 else torch.cat(raw.chunk(world), cut)
        if layout == "heads last":
            return whole.flatten(-2)
        if layout == "heads first":
            return whole.movedim(0, -2).flatten(-2)
        return whole.movedim(0, -1) if layout == "features first" else whole

    rows[dim] *= world
    return run, [*rows, DEPTH]


def _scattered(program: Program, shape: list[int]) -> Callable[[Tensor], Tensor]:
    """A scatter along a random dim that divides, of the tensor as it is or in another layout."""
    rng, world = program.rng, program.world
    layouts: dict[str, Callable[[Tensor], Tensor]] = {
        "plain": lambda t: t,
        "heads": lambda t: t.unflatten(-1, (4, -1)),
        "heads first": lambda t: t.unflatten(-1, (4, -1)).movedim(-2, 0),
        "channels first": lambda t: t.transpose(0, -1),
    }
    possible = ["plain", *layouts] if shape[-1] % 4 == 0 else ["plain", "channels first"]
    name = rng.choice(possible)
    program.forms.append(name)
    sizes = layouts[name](torch.empty(shape)).shape
    dims = [dim for dim, size in enumerate(sizes) if size % world == 0]
    missing = 0 if dims else -shape[0] % world
    dim = rng.choice(dims) if dims else 0
    op = rng.choice(["sum", "avg"])

    def run(t: Tensor) -> Tensor:
        t = F.pad(t, [0, 0] * (t.dim() - 1) + [0, missing]) if missing else layouts[name](t)
        t = torch.cat(t.chunk(world, dim)) if dim else t.contiguous()
        return wait(torch.ops._c10d_functional.reduce_scatter_tensor(t, op, world, "0"))

    return run


def make_program(seed: int, world: int) -> tuple[Callable[..., tuple[Tensor, ...]], Program]:
    """A function of the program's inputs, and what it is made of."""
    rng = random.Random(seed)
    program = Program(world, rng)
    kind = rng.choice(["gather", "scatter", "both"])
    outputs_too = rng.random() < 0.3
    if kind == "scatter":
        shape = [*(rng.choice([1, 2, 4]) for _ in range(rng.randint(1, 2))), DEPTH]
        place = program.given(*shape)
        stages: list[Step | None] = [(lambda _, inputs: inputs[place].relu(), shape)]
    else:
        stages = [_gathered(program)]
    shape = stages[0][1]  # type: ignore[index]

    def draw(forms: dict[str, Form], most: int) -> None:
        nonlocal shape
        for _ in range(rng.randint(0, most)):
            step = program.one_of(forms, shape)
            if step is not None:
                stages.append(step)
                shape = step[1]

    def multiply() -> None:
        nonlocal shape
        step = program.one_of(MATMULS, shape)
        assert step is not None
        stages.append(step)
        shape = step[1]

    kept = len(stages)
    if kind != "scatter":
        draw({**SCALES, **VIEWS}, 3)
        kept = rng.randint(1, len(stages))
    multiply()
    if kind == "both":
        stages.append((lambda t, _: t.relu(), shape))
        multiply()
    scatter = None
    if kind != "gather":
        draw({**SCALES, **VIEWS, **ADDITIONS}, 3)
        scatter = _scattered(program, shape)

    def run(*inputs: Tensor) -> tuple[Tensor, ...]:
        value, extra = inputs[0], []
        for number, stage in enumerate(stages, 1):
            assert stage is not None
            value = stage[0](value, list(inputs))
            if number == kept and outputs_too:
                extra.append(value.relu())
        return (scatter(value) if scatter is not None else value, *extra)

    return run, program
