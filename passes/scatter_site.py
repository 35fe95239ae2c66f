"""Follows the input of a reduce_scatter back to a matmul, and notes what is done to the product on the way.

    reduce_scatter(cut(steps(scale * (x @ W + bias) + another) + yet another))

The cut says along which dim the product is scattered. All that comes before it must be linear in the product:
row-structural steps (rows.py), which can be taken on x instead; factors; sums with other tensors, of which
the fused op takes one of the product's shape (addend) and one with an entry a column (bias). A bf16 or fp16
product may become fp32 on the way: then the ranks' products are summed in fp32.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch.fx import Node

from flux_inductor.passes import pieces
from flux_inductor.passes.collectives import Collective
from flux_inductor.passes.matmul import Matmul, as_matmul, is_matmul
from flux_inductor.passes.reasons import Reason
from flux_inductor.passes.rows import Move, follow
from flux_inductor.passes.sizes import divides, dtype_text, equal, is_tensor, same, shape_text, tensor

aten = torch.ops.aten
# A matmul behind more sums than this is not looked for: in a residual stream the search would go on for ever.
_MOST_SUMS = 8
_WIDENED = (torch.bfloat16, torch.float16)  # to float32, by the fused op
_PRODUCTS = (aten.mul.Tensor, aten.mul.Scalar)
_QUOTIENTS = (aten.div.Tensor, aten.div.Scalar)


Steps = tuple[tuple[Node, Move], ...]  # row-structural nodes, in the order in which data passes them


@dataclass(frozen=True)
class Addition:
    """A tensor that is added on the way: steps(scale * expand(node)).

    Args:
        like: the node to whose shape it is expanded.
    """

    node: Node
    like: Node
    steps: Steps
    scale: float

    @property
    def is_bias(self) -> bool:
        """Whether it has one entry a column of the product."""
        shape = tensor(self.node).shape
        return len(shape) == 1 and equal(shape[0], tensor(self.like).shape[-1])


@dataclass(frozen=True)
class Term:
    """A view of the scattered tensor as steps(scale * node) + others.

    Args:
        obstacle: what in this view no fused op expresses, if `node` is a matmul.
    """

    node: Node
    steps: Steps = ()
    scale: float = 1.0
    others: tuple[Addition, ...] = ()
    obstacle: Reason | None = None


@dataclass(frozen=True)
class ScatterSite:
    """One reduce_scatter of a product.

    Args:
        product: the tensor that is scattered along `dim`.
        term: the way from it back to the matmul.
    """

    collective: Collective
    product: Node
    dim: int
    matmul: Matmul
    term: Term

    @property
    def reduce_op(self) -> str:
        return cast(str, self.collective.node.args[1])

    @property
    def additions(self) -> list[Addition]:
        """All that is added to the scaled product, the matmul's own bias first."""
        own = [node for node in (self.matmul.bias, self.matmul.full) if node is not None]
        term, like = self.term, self.matmul.node
        return [*(Addition(node, like, term.steps, term.scale) for node in own), *term.others]

    @property
    def has_addend(self) -> bool:
        return not all(addition.is_bias for addition in self.additions)

    @property
    def dtype(self) -> torch.dtype:
        """In which the ranks' products are summed: wider than the matmul's if a cast stands between."""
        return tensor(self.product).dtype

    @property
    def by_columns(self) -> bool:
        return self.dim == tensor(self.product).dim() - 1


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
    matmul, term = found
    site = ScatterSite(collective, product, dim, matmul, term)
    if site.reduce_op not in ("sum", "avg"):
        return Reason("reduce-op", f"the reduction is {site.reduce_op}; a fused op sums or averages")
    shape = tensor(product).shape
    if len(shape) < 2 or not divides(world, shape[dim]):
        code = "not-divisible" if all(isinstance(size, int) for size in shape) else "unknown-size"
        text = f"dim {dim} of the product {shape_text(shape)} is not known to divide by the {world} ranks"
        return Reason(code, text)
    return site


def _other_users(node: Node, user: Node) -> list[Node]:
    return [one for one in node.users if one is not user]


def _other_users_of_parts(whole: pieces.Concatenation, user: Node) -> list[Node]:
    """What else needs the source, a part of it, or the concatenation, beside `user` of the latter."""
    parts = cast(list[Node], whole.node.args[0])
    cuts = [part if part.target in pieces.CUTS else part.args[0] for part in parts]
    others = [one for one in whole.source.users if one not in cuts]
    return [
        *others,
        *(one for part in parts for one in _other_users(part, whole.node)),
        *_other_users(whole.node, user),
    ]


def _needed_by(node: Node, others: list[Node]) -> Reason | None:
    names = ", ".join(other.name for other in others)
    return Reason("product-used", f"{node.name} is also needed by {names}") if others else None


def _find_matmul(product: Term, world: int) -> tuple[Matmul, Term] | Reason:
    """The matmul behind the fewest sums; the largest of several."""
    missed: list[Reason] = []
    level = [product]
    for _ in range(_MOST_SUMS):
        found: list[tuple[Matmul, Term]] = []
        following: list[Term] = []
        for start in level:
            term = _through_views(start, world)
            if is_matmul(term.node):
                matmul = as_matmul(term.node)
                obstacle = matmul if isinstance(matmul, Reason) else term.obstacle
                if obstacle is not None:
                    missed.append(obstacle)
                elif isinstance(matmul, Matmul):
                    found.append((matmul, term))
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
    sizes = [*tensor(matmul.lhs).shape, tensor(matmul.weight).shape[1]]
    total = 1
    for size in sizes:
        total *= size if isinstance(size, int) else 0
    return total


def _through_views(term: Term, world: int) -> Term:
    """The term without its outermost views and factors."""
    while True:
        node = term.node
        whole = pieces.concatenation_of(node)
        if whole is not None and whole.is_identity():
            others = _other_users_of_parts(whole, next(iter(node.users)))
            used = _needed_by(whole.source, others)
            term = replace(term, node=whole.source, obstacle=term.obstacle or used)
            continue
        source = node.args[0] if node.args else None
        if not is_tensor(source) or is_matmul(node):
            return term
        move = follow(source, node, world)
        if move is not None:
            steps = ((node, move), *term.steps)
            obstacle = _cast_obstacle(source, node)
            term = replace(term, steps=steps)
        elif (factor := _factor(node)) is not None:
            obstacle = _cast_obstacle(source, node)
            term = replace(term, scale=term.scale * factor)
        else:
            return term
        term = _step_back(term, source, obstacle)


def _factor(node: Node) -> float | None:
    """The number by which the node multiplies its first input, None if it does something else."""
    if node.target not in (*_PRODUCTS, *_QUOTIENTS) or not isinstance(node.args[1], (int, float)):
        return None
    number = node.args[1]
    if node.target in _PRODUCTS:
        return number
    return 1 / number if number != 0 else None


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
    sides = node.args[:2]
    if node.target is not aten.add.Tensor or node.kwargs.get("alpha", 1) != 1 or sides[0] is sides[1]:
        return []
    branches = []
    for side, other in (sides, sides[::-1]):
        if not (isinstance(side, Node) and isinstance(other, Node)):
            continue
        if not same(tensor(side).shape, tensor(node).shape):
            continue
        obstacle = _cast_obstacle(side, node)
        joined = Addition(other, node, term.steps, term.scale)
        branches.append(_step_back(replace(term, others=(*term.others, joined)), side, obstacle))
    return branches


def _no_matmul(node: Node) -> Reason:
    source = node.args[0] if node.target is operator.getitem else None
    if isinstance(source, Node) and source.target is torch.ops.flux_inductor.all_gather_matmul.default:
        return Reason("matmul-taken", f"the matmul is part of {source.name}, which gathers its input")
    made = "is an input of the graph" if node.op == "placeholder" else f"comes from {node.target}"
    return Reason("no-matmul", f"the scattered tensor is no product: {node.name} {made}")
