"""Random calls of the fused ops, their fp64 results and those of torch collectives."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from flux_inductor import ops  # noqa: F401  (registers the ops)
from flux_inductor.runtime.torch_private import process_group

fused = torch.ops.flux_inductor


@dataclass(frozen=True)
class Gather:
    """all_gather_matmul of a shard along `dim`, by weights with the given N."""

    shape: tuple[int, ...]
    columns: tuple[int, ...]
    dim: int = 0
    dtype: torch.dtype = torch.bfloat16
    transposed: bool = True
    bias: bool = False
    keep: bool = False
    plan: str = "mesh push chunk=512"


@dataclass(frozen=True)
class Scatter:
    """matmul_reduce_scatter of x along `dim` of the product; the terms may have the result's dtype."""

    shape: tuple[int, ...]
    columns: int
    dim: int = 0
    dtype: torch.dtype = torch.bfloat16
    transposed: bool = True
    bias: bool = False
    addend: bool = False
    mean: bool = False
    scale: float = 1.0
    result: torch.dtype | None = None
    wide_terms: bool = False
    plan: str = "mesh push chunk=512"


def _random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def _weight(k: int, n: int, dtype: torch.dtype, transposed: bool) -> Tensor:
    values: Tensor = (torch.randn(n, k, device="cuda") / k**0.5).to(dtype)
    return values.t() if transposed else values.t().contiguous()


class GatherCall:
    """One rank's operands of a Gather."""

    def __init__(self, case: Gather, group: str) -> None:
        self.case, self.group = case, group
        self.x = _random(*case.shape, dtype=case.dtype)
        depth = case.shape[-1]
        self.weights = [_weight(depth, n, case.dtype, case.transposed) for n in case.columns]
        self.biases = [_random(n, dtype=case.dtype) for n in case.columns] if case.bias else []

    def __call__(self) -> list[Tensor]:
        case = self.case
        return list(
            fused.all_gather_matmul(
                self.x, self.weights, self.biases, self.group, case.plan, case.dim, case.keep
            )
        )

    def gathered(self) -> Tensor:
        world = process_group(self.group).size()
        parts = [torch.empty_like(self.x) for _ in range(world)]
        dist.all_gather(parts, self.x, group=process_group(self.group))
        return torch.cat(parts, self.case.dim)

    def unfused(self) -> list[Tensor]:
        whole = self.gathered()
        results = [whole @ w for w in self.weights]
        if self.biases:
            results = [result + bias for result, bias in zip(results, self.biases, strict=True)]
        return [*results, whole] if self.case.keep else results

    def exact(self) -> list[Tensor]:
        whole = self.gathered().double()
        results = [whole @ w.double() for w in self.weights]
        if self.biases:
            results = [result + bias.double() for result, bias in zip(results, self.biases, strict=True)]
        return [*results, whole] if self.case.keep else results


class ScatterCall:
    """One rank's operands of a Scatter."""

    def __init__(self, case: Scatter, group: str) -> None:
        self.case, self.group = case, group
        self.x = _random(*case.shape, dtype=case.dtype)
        self.weight = _weight(case.shape[-1], case.columns, case.dtype, case.transposed)
        terms = case.result if case.wide_terms and case.result else case.dtype
        self.bias = _random(case.columns, dtype=terms) if case.bias else None
        product = (*case.shape[:-1], case.columns)
        self.addend = _random(*product, dtype=terms) if case.addend else None

    def __call__(self) -> list[Tensor]:
        case = self.case
        reduce = "avg" if case.mean else "sum"
        return [
            fused.matmul_reduce_scatter(
                self.x,
                self.weight,
                self.bias,
                self.addend,
                self.group,
                case.plan,
                case.dim,
                reduce,
                case.scale,
                out_dtype=case.result,
            )
        ]

    def _scattered(self, product: Tensor) -> list[Tensor]:
        group = process_group(self.group)
        parts = [part.contiguous() for part in product.chunk(group.size(), self.case.dim)]
        result = torch.empty_like(parts[0])
        dist.reduce_scatter(result, parts, group=group)
        return [result / group.size() if self.case.mean else result]

    def unfused(self) -> list[Tensor]:
        product = (self.x @ self.weight).to(self.case.result or self.case.dtype) * self.case.scale
        for term in (self.bias, self.addend):
            product = product if term is None else product + term
        return self._scattered(product)

    def exact(self) -> list[Tensor]:
        product = (self.x.double() @ self.weight.double()) * self.case.scale
        for term in (self.bias, self.addend):
            product = product if term is None else product + term.double()
        return self._scattered(product)


Case = Gather | Scatter
Call = GatherCall | ScatterCall


def make(case: Case, group: str) -> Call:
    return GatherCall(case, group) if isinstance(case, Gather) else ScatterCall(case, group)


def error(result: Tensor, exact: Tensor) -> float:
    """Norm of the difference over the norm of the fp64 result; NaN stays NaN."""
    return float((result.double() - exact).norm() / exact.norm())
