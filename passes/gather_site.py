"""Follows a gathered tensor forward, by what the ops do to its rows, to the matmuls that multiply them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import cast

import torch
from torch.fx import Node

from flux_inductor.passes import pieces
from flux_inductor.passes.collectives import Collective
from flux_inductor.passes.matmul import Matmul, as_matmul, is_matmul
from flux_inductor.passes.reasons import Reason
from flux_inductor.passes.rows import Move, Step, follow, is_exact, source_of
from flux_inductor.passes.sizes import Size, below, product, same, shape_text, tensor
from flux_inductor.passes.views import PERMUTES, Roles, plain, row_sizes

aten = torch.ops.aten
# Shards of more dims are only read as rows and one last dim of columns.
_MOST_DIMS = 5


@dataclass(frozen=True)
class Whole:
    """All rows of the gathered tensor, as `node` arranges them.

    Args:
        dim: the dim of the shard along which the root of this tensor is the gather.
        roles: which dims of `node` are columns.
        parent: the whole that `node` was made from by `step`; None at the root.
    """

    node: Node
    dim: int
    roles: Roles
    parent: Whole | None = None
    step: Step | None = None

    @property
    def steps(self) -> list[Step]:
        """The way from the root to here."""
        return [] if self.parent is None or self.step is None else [*self.parent.steps, self.step]

    @property
    def root(self) -> Node:
        return self.node if self.parent is None else self.parent.root

    @property
    def casts(self) -> tuple[torch.dtype, ...]:
        """The dtypes to which the steps convert, in turn."""
        return tuple(tensor(step.node).dtype for step in self.steps if step.move is Move.CAST)


@dataclass(frozen=True)
class Opaque:
    """A tensor made of the gathered one in a way that no fused op follows.

    Args:
        by_columns: whether its last dim is the gathered one; None if no dim is.
    """

    reason: Reason
    by_columns: bool | None = None


@dataclass(frozen=True)
class Consumer:
    """A matmul that multiplies the rows of `lhs`."""

    matmul: Matmul
    lhs: Whole

    @property
    def factors(self) -> list[Step]:
        """What multiplies columns of the gathered tensor: as well, rows of the weight."""
        return [step for step in self.lhs.steps if step.move is Move.COLUMNS]

    @property
    def operands(self) -> list[Node]:
        """What the op needs beside the shard before it starts."""
        factors = [step.factor for step in self.factors]
        return [*self.matmul.operands, *(factor for factor in factors if isinstance(factor, Node))]

    @property
    def adds_behind(self) -> bool:
        """Whether a bias cannot be part of the op, since the product is still scaled or padded."""
        return any(step.move in (Move.SCALE, Move.PAD) for step in self.lhs.steps)


@dataclass
class GatherSite:
    """What becomes of one gathered tensor.

    Args:
        wait: the node that makes it, [world * n, ...], from shard `x`.
        roles: which dims of the shard are columns.
        consumers: matmuls of all its rows.
        blocked: why other matmuls that it reaches cannot be fused.
        used: its arrangements that something else needs, by node.
        sizes: nodes that ask for the size of a dim of rows of an arrangement; products have the same.
    """

    collective: Collective
    wait: Node
    x: Node
    roles: Roles
    consumers: list[Consumer] = field(default_factory=list)
    blocked: list[Reason] = field(default_factory=list)
    used: dict[Node, Whole] = field(default_factory=dict)
    sizes: dict[Node, Whole] = field(default_factory=dict)

    @property
    def shape(self) -> list[Size]:
        """Of the shard as the op takes it, [..., K]."""
        shape = tensor(self.x).shape
        depth = product(size for size, columns in zip(shape, self.roles, strict=True) if columns)
        return [*row_sizes(self.x, self.roles), depth]


def explore(collective: Collective) -> GatherSite | Reason:
    """Where the gathered tensor goes."""
    x, waits = collective.node.args[0], collective.waits
    assert isinstance(x, Node)
    if not waits:
        return Reason("no-matmul", "this graph does not wait for the gathered tensor")
    if tensor(x).dim() < 2:
        return Reason("no-matmul", f"the shard {shape_text(tensor(x).shape)} has no rows to multiply")
    first, *others = _readings(tensor(x).dim())
    told = _explored(GatherSite(collective, waits[0], x, first))
    for roles in () if told.consumers else others:
        site = _explored(GatherSite(collective, waits[0], x, roles))
        if site.consumers:
            return site
        # Of the readings without a matmul, the usual ones say why.
        told = site if roles[-1] and site.blocked and not told.blocked else told
    return told


def _readings(dims: int) -> Iterator[Roles]:
    """What a shard's columns may be: its last dim first of all, else others or several."""
    yield plain(dims)
    if dims <= _MOST_DIMS:
        for count in range(1, dims):
            for chosen in reversed(list(combinations(range(dims), count))):
                if chosen != (dims - 1,):
                    yield tuple(dim in chosen for dim in range(dims))


def _explored(site: GatherSite) -> GatherSite:
    _Explorer(site).run()
    if len(site.collective.node.users) > 1:
        # Kept for a backward that will wait for it: the op's result serves as well.
        site.used[site.wait] = Whole(site.wait, 0, site.roles)
    return site


class _Explorer:
    """One traversal: every tensor that is made of the gathered one is visited once."""

    def __init__(self, site: GatherSite) -> None:
        self.site = site
        self.world = site.collective.world
        self.seen: set[Node] = set()
        self.pending: list[tuple[Node, Whole | Opaque]] = [(site.wait, Whole(site.wait, 0, site.roles))]

    def run(self) -> None:
        while self.pending:
            node, value = self.pending.pop()
            for user in node.users:
                if is_matmul(user):
                    self._meet_matmul(node, value, user)
                elif isinstance(value, Whole):
                    self._follow_whole(node, value, user)
                elif user.target in PERMUTES:
                    known = value.by_columns is not None
                    self._push(user, replace(value, by_columns=not value.by_columns) if known else value)
                elif source_of(user) is node:
                    self._push(user, value)

    def _push(self, node: Node, value: Whole | Opaque) -> None:
        if node not in self.seen:
            self.seen.add(node)
            self.pending.append((node, value))

    def _follow_whole(self, node: Node, value: Whole, user: Node) -> None:
        step = follow(node, user, value.roles, self.world)
        if step is not None:
            self._push(user, self._stepped(value, step))
        elif user.target in pieces.SPLITS:
            for part in user.users:
                self._follow_piece(value, part)
        elif user.target in pieces.CUTS:
            self._follow_piece(value, user)
        elif user.target is aten.sym_size.int and not value.roles[cast(int, user.args[1])]:
            self.site.sizes[user] = value
        else:
            self.site.used[node] = value

    def _stepped(self, value: Whole, step: Step) -> Whole | Opaque:
        if step.move not in (Move.SCALE, Move.COLUMNS) or is_exact(step):
            return Whole(step.node, value.dim, step.after, value, step)
        if tensor(step.node).dtype != torch.float16:
            return Whole(step.node, value.dim, step.after, value, step)
        self.site.used[value.node] = value
        text = f"{step.node.name} scales the gathered fp16 tensor; the product alone may leave the range"
        return Opaque(Reason("factor", text))

    def _follow_piece(self, value: Whole, part: Node) -> None:
        for user in part.users:
            if user in self.seen:
                continue
            whole = pieces.concatenation_of(user)
            if whole is not None:
                self._push(user, self._concatenated(value, whole))
                continue
            self.site.used[value.node] = value
            shape = shape_text(tensor(part).shape)
            self._push(part, Opaque(Reason("partial", f"the matmul gets only the part {part.name} {shape}")))

    def _concatenated(self, value: Whole, whole: pieces.Concatenation) -> Whole | Opaque:
        if whole.is_identity():
            return self._joined(value, whole, Move.COPY)
        if self._by_ranks(value, whole) and whole.cut == 0 and whole.is_by_shards(self.world):
            if not self.site.roles[whole.dim]:
                return Whole(whole.node, whole.dim, self.site.roles)
            shard = shape_text(tensor(self.site.x).shape)
            by_columns = whole.dim == tensor(whole.node).dim() - 1
            name = "the last dim" if by_columns else f"dim {whole.dim}"
            text = f"the gather is along {name} of the shard {shard}, over which the matmul sums"
            self.site.used[value.node] = value
            return Opaque(Reason("contracted", text), by_columns)
        if not value.roles[whole.dim] and whole.is_trim(self.world):
            return self._joined(value, whole, Move.TRIM)
        self.site.used[value.node] = value
        return Opaque(whole.complaint(self.world))

    def _joined(self, value: Whole, whole: pieces.Concatenation, move: Move) -> Whole:
        step = Step(whole.node, value.node, move, value.roles, value.roles)
        return Whole(whole.node, value.dim, value.roles, value, step)

    def _by_ranks(self, value: Whole, whole: pieces.Concatenation) -> bool:
        """Whether dim 0 of what was cut goes by ranks: it is the raw tensor, or that as [ranks, ...shard]."""
        if not whole.without_dim:
            return value.node is self.site.wait
        raw, shape = value.parent, (self.world, *tensor(self.site.x).shape)
        return raw is not None and raw.node is self.site.wait and same(tensor(value.node).shape, shape)

    def _meet_matmul(self, node: Node, value: Whole | Opaque, user: Node) -> None:
        matmul = as_matmul(user)
        if isinstance(value, Opaque):
            as_weight = value.by_columns and user.args[-1] is node
            self.site.blocked.append(_as_weight(user) if as_weight else value.reason)
            return
        if isinstance(matmul, Matmul) and matmul.lhs is node and matmul.weight is not node:
            reason = self._not_by_rows(value, matmul)
            if reason is None:
                self.site.consumers.append(Consumer(matmul, value))
                if matmul.full is node:  # g + g @ w
                    self.site.used[node] = value
                return
            matmul = reason
        self.site.used[node] = value
        if isinstance(matmul, Reason):
            self.site.blocked.append(matmul)
        elif matmul.weight is node:
            transposed = value.roles[-1] is self.site.roles[value.dim]
            text = f"the gathered tensor is the right operand of {user.name}, which sums over its rows"
            self.site.blocked.append(_as_weight(user) if transposed else Reason("contracted", text))

    def _not_by_rows(self, value: Whole, matmul: Matmul) -> Reason | None:
        """Why the matmul is no product of the rows that were gathered; None if it is one."""
        lhs = tensor(value.node)
        if value.roles != plain(lhs.dim()) or self.site.roles[value.dim]:
            text = f"{value.node.name} transposes the gathered tensor, so that the matmul sums over its rows"
            return Reason("contracted", text)
        consumer = Consumer(matmul, value)
        rows = product(lhs.shape[:-1])
        if consumer.factors and below(rows, matmul.columns):
            text = f"{matmul.node.name} has fewer rows than columns: to scale its weight instead costs more"
            return Reason("factor", text)
        return None


def _as_weight(user: Node) -> Reason:
    text = f"{user.name} takes the gathered tensor as its weight, whose columns stay one product"
    return Reason("as-weight", text)
