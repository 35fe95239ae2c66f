"""The differentiable functions against one process that plays all ranks, in float64."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.ranks import run_ranks

Leaves = list[Tensor]
Outputs = list[Tensor]


def _random(rank: int, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def _with_gradients(
    inputs: Sequence[list[Tensor]],
    cotangents: Sequence[list[Tensor]],
    ranks: Callable[[list[Leaves]], list[Outputs]],
    rank: int,
    dtype: torch.dtype,
) -> list[Tensor]:
    """Outputs and input gradients of `rank`, when one process computes what all ranks do."""
    leaves = [[value.to(dtype).requires_grad_(True) for value in values] for values in inputs]
    outputs = ranks(leaves)
    flat = [output for mine in outputs for output in mine]
    grads = [cotangent.to(dtype) for mine in cotangents for cotangent in mine]
    return [*outputs[rank], *torch.autograd.grad(flat, leaves[rank], grads[: len(flat)])]


def _compare(fused: Sequence[Tensor], eager: Sequence[Tensor], exact: Sequence[Tensor]) -> None:
    """Errors of at most twice those of plain operations in the same dtype."""

    def error(value: Tensor, reference: Tensor) -> float:
        assert value.shape == reference.shape
        return float((value.double() - reference).norm() / reference.norm().clamp_min(1e-30))

    for ours, plain, reference in zip(fused, eager, exact, strict=True):
        assert error(ours, reference) <= max(2 * error(plain, reference), 1e-6)


def _gather(rank: int, world: int, dim: int, returned: bool) -> None:
    import flux_inductor

    lead = (4 * world, 6) if dim == 0 else (4, 6 * world)
    columns = (8, 12, 16) if returned else (8, 12)
    inputs = [_random(r, [(4, 6, 16), (16, 8), (16, 12), (8,)]) for r in range(world)]
    cotangents = [_random(100 + r, [(*lead, n) for n in columns]) for r in range(world)]

    def all_ranks(leaves: list[Leaves]) -> list[Outputs]:
        whole = torch.cat([mine[0] for mine in leaves], dim)
        outputs = [[whole @ w1 + b, whole @ w2, whole] for _, w1, w2, b in leaves]
        return [mine[: len(columns)] for mine in outputs]

    exact = _with_gradients(inputs, cotangents, all_ranks, rank, torch.float64)
    plain = _with_gradients(inputs, cotangents, all_ranks, rank, torch.float32)
    x, w1, w2, b = mine = [value.requires_grad_(True) for value in inputs[rank]]
    outputs: Any = flux_inductor.all_gather_matmul(
        x, [w1, w2], biases=[b, None], gather_dim=dim, return_gathered=returned, plan="mesh push chunk=3"
    )
    gradients = torch.autograd.grad(list(outputs), mine, cotangents[rank])
    _compare([*outputs, *gradients], plain, exact)


@pytest.mark.parametrize(("dim", "returned"), [(0, True), (1, False)])
def test_all_gather_matmul_gradients(dim: int, returned: bool) -> None:
    run_ranks(_gather, 2, dim, returned)


def _scatter(rank: int, world: int, dim: int, reduce_op: str) -> None:
    import flux_inductor

    inputs = [_random(r, [(4, 6, 16), (16, 8), (8,), (4, 6, 8)]) for r in range(world)]
    shape = [4, 6, 8]
    shape[dim] //= world
    cotangents = [_random(100 + r, [(shape[0], shape[1], shape[2])]) for r in range(world)]

    def all_ranks(leaves: list[Leaves]) -> list[Outputs]:
        total = torch.stack([0.5 * (x @ w) + b + c for x, w, b, c in leaves]).sum(0)
        if reduce_op == "avg":
            total = total / world
        return [[part] for part in total.chunk(world, dim)]

    exact = _with_gradients(inputs, cotangents, all_ranks, rank, torch.float64)
    plain = _with_gradients(inputs, cotangents, all_ranks, rank, torch.float32)
    x, w, b, c = mine = [value.requires_grad_(True) for value in inputs[rank]]
    output = flux_inductor.matmul_reduce_scatter(
        x, w, bias=b, addend=c, scatter_dim=dim, reduce_op=reduce_op, scale=0.5, plan="mesh pull chunk=2"
    )
    _compare([output, *torch.autograd.grad(output, mine, cotangents[rank])], plain, exact)


@pytest.mark.parametrize(("dim", "reduce_op"), [(0, "sum"), (1, "avg"), (2, "sum")])
def test_matmul_reduce_scatter_gradients(dim: int, reduce_op: str) -> None:
    run_ranks(_scatter, 2, dim, reduce_op)


def _apply_nothing(*arguments: object) -> None:
    raise AssertionError("autograd need not see this call")


def _results(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    import flux_inductor

    gathered = flux_inductor.all_gather_matmul(x, [weight, weight], "0", biases=[None, torch.ones(8)])
    assert isinstance(gathered, tuple)
    return (*gathered, flux_inductor.matmul_reduce_scatter(x, weight, "0"))


@pytest.fixture
def fake_group() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize(
    ("needed", "surroundings"),
    [(False, contextlib.nullcontext), (True, torch.no_grad), (True, torch.inference_mode)],
)
def test_calls_without_gradients_are_not_shown_to_autograd(
    needed: bool, surroundings: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from flux_inductor import autograd

    x, weight = torch.randn(4, 16), torch.nn.Parameter(torch.randn(16, 8), requires_grad=needed)
    monkeypatch.setattr(autograd._AllGatherMatmul, "apply", _apply_nothing)
    monkeypatch.setattr(autograd._MatmulReduceScatter, "apply", _apply_nothing)
    with surroundings():
        assert not any(result.requires_grad for result in _results(x, weight))


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize("which", ["x", "weight", "bias", "addend"])
def test_one_operand_that_requires_a_gradient_gets_it(which: str) -> None:
    import flux_inductor

    values = {"x": torch.randn(4, 16), "weight": torch.randn(16, 8), "bias": torch.randn(8)}
    values["addend"] = torch.randn(4, 8)
    leaf = values[which].requires_grad_()
    results = [
        flux_inductor.matmul_reduce_scatter(
            values["x"], values["weight"], bias=values["bias"], addend=values["addend"]
        )
    ]
    if which != "addend":
        product = flux_inductor.all_gather_matmul(values["x"], values["weight"], biases=values["bias"])
        assert isinstance(product, Tensor)
        results.append(product)
    for result in results:
        (gradient,) = torch.autograd.grad(result, leaf, torch.ones_like(result))
        assert gradient.shape == leaf.shape


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize("grads", [True, False])
def test_forward_mode_derivatives_are_refused_not_dropped(grads: bool) -> None:
    import flux_inductor

    x, weight = torch.randn(4, 16), torch.randn(16, 8)
    with forward_ad.dual_level(), torch.set_grad_enabled(grads):
        dual = forward_ad.make_dual(x, x)
        with pytest.raises(NotImplementedError, match="jvp"):
            flux_inductor.all_gather_matmul(dual, weight)
        with pytest.raises(NotImplementedError, match="jvp"):
            flux_inductor.matmul_reduce_scatter(dual, weight)


@pytest.mark.usefixtures("fake_group")
def test_dispatch_modes_see_the_op() -> None:
    seen: list[str] = []

    class Look(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    x, weight = torch.randn(4, 16), torch.randn(16, 8)
    for needed in (False, True):
        x.requires_grad_(needed)
        _results(x, weight)
        with Look():  # type: ignore[no-untyped-call]
            _results(x, weight)
        assert "flux_inductor.all_gather_matmul.default" in seen
        assert "flux_inductor.matmul_reduce_scatter.default" in seen
        seen.clear()


def _strategy_chooses(rank: int, world: int) -> None:
    import flux_inductor

    inputs = [_random(r, [(64, 32), (32, 48)]) for r in range(world)]
    x, weight = inputs[rank]
    fused = flux_inductor.all_gather_matmul(x, weight)
    assert isinstance(fused, Tensor)
    torch.testing.assert_close(fused, torch.cat([mine[0] for mine in inputs]) @ inputs[rank][1])


def test_without_a_plan_the_strategy_chooses() -> None:
    run_ranks(_strategy_chooses, 2)


def _not_differentiable(rank: int, world: int) -> None:
    """Refused on all ranks before anything begins; the group lives on."""
    import flux_inductor
    import flux_inductor.ops

    plan = "mesh push chunk=32"
    for needed in ("x", "weight", "both"):
        x = torch.randn(8, 16).requires_grad_(needed != "weight")
        weight = torch.randn(16, 8).requires_grad_(needed != "x")

        fused = torch.ops.flux_inductor
        gather = partial(fused.all_gather_matmul, x, [weight], [], "0", plan, 0, False)
        scatter = partial(fused.matmul_reduce_scatter, x, weight, None, None, "0", plan, 0, "sum", 1.0)
        for raw in (gather, scatter):
            with pytest.raises(ValueError, match="not differentiable; call flux_inductor"):
                raw()
            with torch.no_grad():
                raw()
        functions: list[Callable[..., Any]] = [
            partial(flux_inductor.all_gather_matmul, plan=plan),
            partial(flux_inductor.matmul_reduce_scatter, plan=plan),
            partial(flux_inductor.matmul_reduce_scatter, plan=plan, scatter_dim=-1),
        ]
        leaves = [leaf for leaf in (x, weight) if leaf.requires_grad]
        for function in functions:
            with pytest.raises(ValueError, match="gradients of gradients are not supported"):
                torch.autograd.grad(function(x, weight).square().sum(), leaves, create_graph=True)
            torch.autograd.grad(function(x, weight).square().sum(), leaves)


def test_gradients_that_cannot_be_are_refused_and_the_group_lives() -> None:
    run_ranks(_not_differentiable, 2)
