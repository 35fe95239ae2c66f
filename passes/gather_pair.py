"""Which matmuls of a gathered tensor one fused op can make, and what else it must give."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from flux_inductor.passes.dependencies import Dependencies
from flux_inductor.passes.gather_site import Consumer, GatherSite, Whole
from flux_inductor.passes.reasons import Reason
from flux_inductor.passes.sizes import dtype_text, tensor
from flux_inductor.passes.views import row_index


@dataclass(frozen=True)
class GatherPair:
    """One gather and the matmuls that it is fused with.

    Args:
        root: the node that arranges the gathered tensor as the op does, but for its roles.
        dim: along which the op gathers the shard, of plain roles.
        cast: the dtype to which the shard is converted before it is gathered, None to leave it.
        consumers: the matmuls, in the order of the graph.
        used: arrangements of the gathered tensor that something else needs; all made from `root`.
    """

    site: GatherSite
    root: Node
    dim: int
    cast: torch.dtype | None
    consumers: tuple[Consumer, ...]
    used: tuple[Whole, ...]

    @property
    def dtype(self) -> torch.dtype:
        return self.cast or tensor(self.site.x).dtype

    @property
    def operands(self) -> list[Node]:
        """All weights and biases."""
        return [operand for one in self.consumers for operand in one.operands]


def pair_of(site: GatherSite, dependencies: Dependencies) -> GatherPair | Reason:
    """The pair that can be fused, or why there is none."""
    draft = _Draft(site, dependencies)
    for narrow in (
        draft.drop_dependent,
        draft.keep_one_root,
        draft.keep_one_cast,
        draft.keep_sizes,
        draft.drop_unavailable,
    ):
        reason = narrow()
        if reason is not None:
            return reason
    first = draft.consumers[0].lhs
    cast = first.casts[0] if first.casts else None
    dim = row_index(site.roles, first.dim)
    return GatherPair(site, first.root, dim, cast, tuple(draft.consumers), tuple(site.used.values()))


class _Draft:
    """Narrows the consumers of a site down to those that one op can serve."""

    def __init__(self, site: GatherSite, dependencies: Dependencies) -> None:
        self.site = site
        self.dependencies = dependencies
        self.consumers = sorted(site.consumers, key=lambda one: dependencies.position(one.matmul.node))

    def _drop(self, dropped: list[Consumer]) -> None:
        """These multiply the gathered tensor that the op returns."""
        self.consumers = [one for one in self.consumers if one not in dropped]
        self.site.used.update({one.lhs.node: one.lhs for one in dropped})

    def drop_dependent(self) -> Reason | None:
        gather = self.site.collective.node
        dependent = [
            one
            for one in self.consumers
            if any(self.dependencies.depends(operand, gather) for operand in one.operands)
        ]
        for one in dependent:
            text = f"the weight or bias of {one.matmul.node.name} is made from the gathered tensor itself"
            self.site.blocked.append(Reason("operand-order", text))
        self._drop(dependent)
        if self.consumers:
            return None
        if self.site.blocked:
            return self.site.blocked[0]
        return Reason("no-matmul", f"no matmul takes the rows of {self.site.wait.name}")

    def keep_one_root(self) -> Reason | None:
        """The op gives one arrangement; the raw one, along dim 0, can be made into any other."""
        roots = {one.lhs.root for one in self.consumers}
        if len(roots | {whole.root for whole in self.site.used.values()}) == 1:
            return None
        if self.site.wait not in roots:
            text = f"{self.site.wait.name} is needed along dim 0 as well as along another dim of the shard"
            return Reason("layouts", text)
        self.consumers = [one for one in self.consumers if one.lhs.root is self.site.wait]
        self.site.used[self.site.wait] = Whole(self.site.wait, 0, self.site.roles)
        return None

    def keep_one_cast(self) -> Reason | None:
        """A cast moves before the gather if everybody wants it and it makes no more to transfer."""
        before = tensor(self.site.x).dtype
        if any(not one.lhs.casts for one in self.consumers):
            self._drop([one for one in self.consumers if one.lhs.casts])
            return None
        wanted = {whole.casts for whole in (*(one.lhs for one in self.consumers), *self.site.used.values())}
        names = " and ".join(sorted({dtype_text((before, *casts)[-1]) for casts in wanted}))
        casts = self.consumers[0].lhs.casts
        if len(wanted) > 1 or len(casts) > 1:
            text = f"the {dtype_text(before)} gathered tensor is needed as {names}: no cast can go before it"
            return Reason("cast", text)
        if casts[0].itemsize > before.itemsize:
            text = f"cast to {names} before it, the {dtype_text(before)} gather would have more to move"
            return Reason("cast", text)
        return None

    def keep_sizes(self) -> None:
        """Products tell the sizes on their way; those of other arrangements need the gathered tensor."""
        passed = {one.lhs.root for one in self.consumers}
        passed |= {step.node for one in self.consumers for step in one.lhs.steps}
        self.site.used.update({one.node: one for one in self.site.sizes.values() if one.node not in passed})

    def drop_unavailable(self) -> Reason | None:
        """See Dependencies. An op that stands later for more matmuls is better, but not behind another op."""
        gather = self.site.collective.node
        dropped = [one for one in self.consumers if self.dependencies.crosses(one.operands, gather)]
        if len(dropped) == len(self.consumers):
            dropped = []
        self.consumers = [one for one in self.consumers if one not in dropped]
        while self.consumers:
            operands = [operand for one in self.consumers for operand in one.operands]
            if self.dependencies.admits(gather, operands):
                self._drop(dropped)
                return None
            last = max(self.consumers, key=lambda one: self.dependencies.latest(one.operands))
            dropped.append(last)
            self.consumers = [one for one in self.consumers if one is not last]
        name = dropped[-1].matmul.node.name
        text = (
            f"the weight of {name} depends on a later collective, and what comes before that one depends on "
            "the gathered tensor"
        )
        return Reason("operand-order", text)
