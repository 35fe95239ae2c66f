"""Follows the input of a reduce_scatter back to a matmul, and notes what is done to the product on the way.

    reduce_scatter(cut(steps(scale * (x @ W + bias) + another) - yet another))

The cut says along which dim the product is scattered. All that comes before it must be linear in the product:
row-structural steps (rows.py), which can be taken on x instead; factors; sums with other tensors, of which
the fused op takes one of the product's shape (addend) and one with an entry a column (bias). A bf16 or fp16
product may become fp32 on the way: then the ranks' products are summed in fp32.

The search goes back from the scatter, and only at the matmul is it known which dims are rows and which are
columns: then way.py goes forth again and checks each step.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import TypeAlias, cast

import torch
from torch.fx import Node

from flux_inductor.passes import pieces
from flux_inductor.passes.collectives import Collective
from flux_inductor.passes.matmul import Matmul, as_matmul, is_matmul
from flux_inductor.passes.reasons import Reason
from flux_inductor.passes.rows import Move, Step, factor_of, is_quotient, source_of
from flux_inductor.passes.sizes import Size, divides, dtype_text, is_tensor, same, shape_text, tensor
from flux_inductor.passes.views import Roles, row_index, row_sizes
from flux_inductor.passes.way import Addition, Stretch, Summand, steps_of, summand_of
from flux_inductor.planning.ops.matmul_reduce_scatter import REDUCE_OPS, ReduceOp

aten = torch.ops.aten
# A matmul behind more sums than this is not looked for: in a residual stream the search would go on for ever.
_MOST_SUMS = 8
_WIDENED = (torch.bfloat16, torch.float16)  # to float32, by the fused op
_SUMS: dict[object, int] = {aten.add.Tensor: 1, aten.sub.Tensor: -1}


@dataclass(frozen=True)
class Term:
    """A view of the scattered tensor as stretches(scale * node) + others.

    Args:
        obstacle: what in this view no fused op expresses, if `node` is a matmul.
    """

    node: Node
    stretches: tuple[Stretch, ...] = ()
    scale: float = 1.0
    others: tuple[Addition, ...] = ()
    obstacle: Reason | None = None


@dataclass(frozen=True)
class ScatterSite:
    """One reduce_scatter of a product.

    Args:
        product: the tensor that is scattered.
        term: the way from it back to the matmul.
        steps: the row-structural part of that way, from the matmul on.
        roles: which dims of `product` are columns.
        dim: along which the op scatters its product, which has plain roles.
    """

    collective: Collective
    product: Node
    matmul: Matmul
    term: Term
    steps: tuple[Step, ...]
    roles: Roles
    dim: int

    @property
    def reduce_op(self) -> ReduceOp:
        return cast(ReduceOp, self.collective.node.args[1])

    @property
    def shape(self) -> list[Size]:
        """Of the op's product, [..., N]."""
        return [*row_sizes(self.product, self.roles), self.matmul.columns]

    @property
    def summands(self) -> list[Summand]:
        """All that is added to the scaled product, the matmul's own bias first."""
        own = [node for node in (self.matmul.bias, self.matmul.full) if node is not None]
        like, scale = self.matmul.node, self.term.scale
        additions = [*(Addition(node, like, len(self.steps), scale) for node in own), *self.term.others]
        return [summand_of(one, self.steps, self.roles) for one in additions]

    @property
    def operands(self) -> list[Node]:
        """What the op needs beside x."""
        values = [one.addition.value for one in self.summands]
        return [self.matmul.weight, *(value for value in values if isinstance(value, Node))]

    @property
    def has_addend(self) -> bool:
        return not all(one.is_bias for one in self.summands)

    @property
    def dtype(self) -> torch.dtype:
        """In which the ranks' products are summed: wider than the matmul's if a cast stands between."""
        return tensor(self.product).dtype

    @property
    def by_columns(self) -> bool:
        return self.dim == len(self.shape) - 1


def explore(collective: Collective) -> ScatterSite | Reason:
    """The matmul that makes what is scattered, or why none can be fused."""
    world = collective.world
    scattered, dim, obstacle = cast(Node, collective.node.args[0]), 0, None
    whole = pieces.concatenation_of(scattered)
    if whole is None or whole.is_identity():
        product, others = scattered, _other_users(scattered, collective.node)
    else:
        product, others = whole.source, _other_users_of_parts(whole, collective.node)
        dim = whole.cut
        if whole.dim != 0 or whole.without_dim or not whole.is_by_shards(world):
            obstacle = whole.complaint(world)
    found = _find_matmul(Term(product, obstacle=obstacle or _needed_by(product, others)), world)
    if isinstance(found, Reason):
        return found
    matmul, term, (steps, roles) = found
    reduce_op = cast(str, collective.node.args[1])
    if reduce_op not in REDUCE_OPS:
        return Reason("reduce-op", f"the reduction is {reduce_op}; a fused op sums or averages")
    shape = tensor(product).shape
    if len(shape) < 2 or not divides(world, shape[dim]):
        code = "not-divisible" if all(isinstance(size, int) for size in shape) else "unknown-size"
        text = f"dim {dim} of the product {shape_text(shape)} is not known to divide by the {world} ranks"
        return Reason(code, text)
    split = [size for size, columns in zip(shape, roles, strict=True) if columns]
    if roles[dim] and any(roles[:dim]):
        text = f"the scatter along dim {dim} of {shape_text(shape)} cuts blocks of the product's columns"
        return Reason("chunk-order", text)
    if not all(isinstance(size, int) for size in split[1:]):
        return Reason("unknown-size", f"the columns are split into dims of unknown size, {shape_text(shape)}")
    place = len(shape) - len(split) if roles[dim] else row_index(roles, dim)
    return ScatterSite(collective, product, matmul, term, steps, roles, place)


def _other_users(node: Node, user: Node) -> list[Node]:
    return [one for one in node.users if one is not user]


def _other_users_of_parts(whole: pieces.Concatenation, user: Node) -> list[Node]:
    """What else needs the source, a part of it, or the concatenation, beside `user` of the latter."""
    between = {whole.node: True}
    pending = list(cast(list[Node], whole.node.args[0]))
    while pending:
        node = pending.pop(0)
        if node is not whole.source and node not in between:
            between[node] = True
            pending.append(cast(Node, node.args[0]))
    users = [one for node in (whole.source, *between) for one in node.users]
    return [one for one in users if one not in between and one is not user]


def _needed_by(node: Node, others: list[Node]) -> Reason | None:
    names = ", ".join(other.name for other in others)
    return Reason("product-used", f"{node.name} is also needed by {names}") if others else None


Found: TypeAlias = tuple[Matmul, Term, tuple[tuple[Step, ...], Roles]]


def _find_matmul(product: Term, world: int) -> Found | Reason:
    """The matmul behind the fewest sums; the largest of several."""
    missed: list[Reason] = []
    level = [product]
    for _ in range(_MOST_SUMS):
        found: list[Found] = []
        following: list[Term] = []
        for start in level:
            term = _through_views(start)
            if is_matmul(term.node):
                matmul = as_matmul(term.node)
                obstacle = matmul if isinstance(matmul, Reason) else term.obstacle
                if obstacle is not None:
                    missed.append(obstacle)
                    continue
                assert isinstance(matmul, Matmul)
                way = steps_of(matmul, term.stretches, world)
                if isinstance(way, Reason):
                    missed.append(way)
                else:
                    found.append((matmul, term, way))
            elif branches := _branches(term):
                following += branches
            else:
                missed.append(_no_matmul(term.node))
        if found:
            return max(found, key=lambda pair: _cost(pair[0]))
        level = following
    missed += [_no_matmul(term.node) for term in level]
    return next((reason for reason in missed if reason.code != "no-matmul"), missed[0])


def _cost(matmul: Matmul) -> int:
    """Operations of a matmul; 0 if its sizes are symbolic."""
    sizes = [*tensor(matmul.lhs).shape, matmul.columns]
    total = 1
    for size in sizes:
        total *= size if isinstance(size, int) else 0
    return total


def _through_views(term: Term) -> Term:
    """The term without its outermost views and factors."""
    while not is_matmul(term.node):
        node = term.node
        whole = pieces.concatenation_of(node)
        if whole is not None and (whole.is_identity() or whole.is_padding()):
            others = _other_users_of_parts(whole, next(iter(node.users)))
            used = _needed_by(whole.source, others)
            move = Move.COPY if whole.is_identity() else Move.PAD
            stretches = (Stretch(whole.source, node, move), *term.stretches)
            term = replace(term, node=whole.source, stretches=stretches, obstacle=term.obstacle or used)
            continue
        source = source_of(node)
        if source is None:
            return term
        obstacle = _cast_obstacle(source, node)
        factor = _number(source, node)
        if factor is not None:
            term = replace(term, scale=term.scale * factor)
        else:
            term = replace(term, stretches=(Stretch(source, node), *term.stretches))
        term = _step_back(term, source, obstacle)
    return term


def _number(source: Node, node: Node) -> float | None:
    """The number by which `node` multiplies `source`, None if it does something else."""
    factor = factor_of(source, node)
    if not isinstance(factor, (int, float)):
        return None
    return 1 / factor if is_quotient(node) else factor


def _step_back(term: Term, source: Node, obstacle: Reason | None) -> Term:
    obstacle = term.obstacle or obstacle or _needed_by(source, _other_users(source, term.node))
    return replace(term, node=source, obstacle=obstacle)


def _cast_obstacle(source: Node, node: Node) -> Reason | None:
    """Why a fused op cannot give `source` the dtype of `node`; None if it can, or need not."""
    dtypes = tensor(source).dtype, tensor(node).dtype
    if dtypes[0] == dtypes[1] or (dtypes[0] in _WIDENED and dtypes[1] == torch.float32):
        return None
    before, after = map(dtype_text, dtypes)
    text = f"{node.name} makes the {before} product {after}, and the sum over the ranks must be {after} too"
    return Reason("cast", text)


def _branches(term: Term) -> list[Term]:
    """Both summands of a sum, each with the other one joined; none if the node is no sum."""
    node = term.node
    sign = _SUMS.get(node.target)
    if sign is None or node.args[0] is node.args[1]:
        return []
    sides = list(zip(node.args[:2], (1, sign * cast(float, node.kwargs.get("alpha", 1))), strict=True))
    branches = []
    for (side, factor), (other, by) in (sides, sides[::-1]):
        if not is_tensor(side) or not same(tensor(side).shape, tensor(node).shape):
            continue
        if not (is_tensor(other) or isinstance(other, (int, float))):
            continue
        obstacle = _cast_obstacle(side, node)
        joined = Addition(other, node, len(term.stretches), term.scale * by)
        scaled = replace(term, scale=term.scale * factor, others=(*term.others, joined))
        branches.append(_step_back(scaled, side, obstacle))
    return branches


def _no_matmul(node: Node) -> Reason:
    source = node.args[0] if node.target is operator.getitem else None
    if isinstance(source, Node) and source.target is torch.ops.flux_inductor.all_gather_matmul.default:
        return Reason("matmul-taken", f"the matmul is part of {source.name}, which gathers its input")
    made = "is an input of the graph" if node.op == "placeholder" else f"comes from {node.target}"
    return Reason("no-matmul", f"the scattered tensor is no product: {node.name} {made}")
