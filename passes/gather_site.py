"""Follows a gathered tensor forward, by what the ops do to its rows, to the matmuls that multiply them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.fx import Node

from flux_inductor.passes import pieces
from flux_inductor.passes.collectives import Collective
from flux_inductor.passes.matmul import Matmul, as_matmul, is_matmul
from flux_inductor.passes.reasons import Reason
from flux_inductor.passes.rows import Move, follow
from flux_inductor.passes.sizes import same, shape_text, tensor

aten = torch.ops.aten
_TRANSPOSES = (aten.permute.default, aten.transpose.int)


@dataclass(frozen=True)
class Whole:
    """All rows of the gathered tensor, as `node` arranges them.

    Args:
        dim: the dim of the shard along which the root of this tensor is the gather.
        parent: the whole that `node` was made from by `move`; None at the root.
    """

    node: Node
    dim: int
    parent: Whole | None = None
    move: Move | None = None

    @property
    def steps(self) -> list[Whole]:
        """The way from the root, without the root, to here."""
        return [] if self.parent is None else [*self.parent.steps, self]

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
        transposed: whether it is the gathered one with rows for columns.
    """

    reason: Reason
    transposed: bool = False


@dataclass(frozen=True)
class Consumer:
    """A matmul that multiplies the rows of `lhs`."""

    matmul: Matmul
    lhs: Whole


@dataclass
class GatherSite:
    """What becomes of one gathered tensor.

    Args:
        wait: the node that makes it, [world * n, ...], from shard `x`.
        consumers: matmuls of all its rows.
        blocked: why other matmuls that it reaches cannot be fused.
        used: its arrangements that something else needs, by node.
        sizes: nodes that ask for the size of a leading dim of an arrangement; products have the same.
    """

    collective: Collective
    wait: Node
    x: Node
    consumers: list[Consumer] = field(default_factory=list)
    blocked: list[Reason] = field(default_factory=list)
    used: dict[Node, Whole] = field(default_factory=dict)
    sizes: dict[Node, Whole] = field(default_factory=dict)


def explore(collective: Collective) -> GatherSite | Reason:
    """Where the gathered tensor goes."""
    x, waits = collective.node.args[0], collective.waits
    assert isinstance(x, Node)
    if not waits:
        return Reason("no-matmul", "this graph does not wait for the gathered tensor")
    if tensor(x).dim() < 2:
        return Reason("no-matmul", f"the shard {shape_text(tensor(x).shape)} has no rows to multiply")
    site = GatherSite(collective, waits[0], x)
    _Explorer(site).run()
    if len(collective.node.users) > 1:
        # Kept for a backward that will wait for it: the op's result serves as well.
        site.used[site.wait] = Whole(site.wait, 0)
    return site


class _Explorer:
    """One traversal: every tensor that is made of the gathered one is visited once."""

    def __init__(self, site: GatherSite) -> None:
        self.site = site
        self.world = site.collective.world
        self.seen: set[Node] = set()
        self.pending: list[tuple[Node, Whole | Opaque]] = [(site.wait, Whole(site.wait, 0))]

    def run(self) -> None:
        while self.pending:
            node, value = self.pending.pop()
            for user in node.users:
                if is_matmul(user):
                    self._meet_matmul(node, value, user)
                elif isinstance(value, Whole):
                    self._follow_whole(node, value, user)
                elif follow(node, user, self.world) is not None or user.target in _TRANSPOSES:
                    self._push(user, value)

    def _push(self, node: Node, value: Whole | Opaque) -> None:
        if node not in self.seen:
            self.seen.add(node)
            self.pending.append((node, value))

    def _follow_whole(self, node: Node, value: Whole, user: Node) -> None:
        move = follow(node, user, self.world)
        if move is not None:
            self._push(user, Whole(user, value.dim, value, move))
        elif user.target in pieces.SPLITS:
            for part in user.users:
                self._follow_piece(value, part)
        elif user.target in pieces.CUTS:
            self._follow_piece(value, user)
        elif user.target is aten.sym_size.int and user.args[1] != tensor(node).dim() - 1:
            self.site.sizes[user] = value
        else:
            self.site.used[node] = value
            if user.target in _TRANSPOSES:
                text = f"{user.name} transposes the gathered tensor, so that the matmul sums over its rows"
                self._push(user, Opaque(Reason("contracted", text), transposed=True))

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
            return Whole(whole.node, value.dim, value, Move.COPY)
        if self._by_ranks(value, whole) and whole.cut == 0 and whole.is_by_shards(self.world):
            if whole.dim < tensor(whole.node).dim() - 1:
                return Whole(whole.node, whole.dim)
            shard = shape_text(tensor(self.site.x).shape)
            text = f"the gather is along the last dim of the shard {shard}, over which the matmul sums"
            reason = Reason("contracted", text)
        else:
            reason = whole.complaint(self.world)
        self.site.used[value.node] = value
        return Opaque(reason)

    def _by_ranks(self, value: Whole, whole: pieces.Concatenation) -> bool:
        """Whether dim 0 of what was cut goes by ranks: it is the raw tensor, or that as [ranks, ...shard]."""
        if not whole.without_dim:
            return value.node is self.site.wait
        raw, shape = value.parent, (self.world, *tensor(self.site.x).shape)
        return raw is not None and raw.node is self.site.wait and same(tensor(value.node).shape, shape)

    def _meet_matmul(self, node: Node, value: Whole | Opaque, user: Node) -> None:
        matmul = as_matmul(user)
        if isinstance(value, Opaque):
            as_weight = value.transposed and isinstance(matmul, Matmul) and matmul.weight is node
            text = f"{user.name} takes the gathered tensor as its weight, whose columns stay one product"
            self.site.blocked.append(Reason("as-weight", text) if as_weight else value.reason)
            return
        if isinstance(matmul, Matmul) and matmul.lhs is node and matmul.weight is not node:
            self.site.consumers.append(Consumer(matmul, value))
            if matmul.full is node:  # g + g @ w
                self.site.used[node] = value
            return
        self.site.used[node] = value
        if isinstance(matmul, Reason):
            self.site.blocked.append(matmul)
        elif matmul.weight is node:
            text = f"the gathered tensor is the right operand of {user.name}, which sums over its rows"
            self.site.blocked.append(Reason("contracted", text))
