"""Plan "auto": chosen once for what it depends on, and anew when any of that changes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

import flux_inductor
from flux_inductor import auto_plan
from flux_inductor.planning import strategy
from flux_inductor.planning.strategy import Decision
from flux_inductor.runtime import bound
from flux_inductor.runtime.groups import name_of


def make_group(world: int) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)


@pytest.fixture(autouse=True)
def _group() -> Iterator[None]:
    make_group(2)
    yield
    dist.destroy_process_group()


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """(kind and ranks of the problem, plan) of every choice."""
    made: list[tuple[str, str]] = []
    choose = strategy.choose

    def noted(*arguments: Any, **named: Any) -> Decision:
        decision = choose(*arguments, **named)
        made.append((f"{arguments[0].op} {arguments[0].world}", str(decision.plan)))
        return decision

    monkeypatch.setattr(auto_plan, "choose", noted)
    return made


def operands(rows: int = 4) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 16), torch.randn(16, 8)


def gather(x: Tensor, weight: Tensor, dim: int = 0, kept: bool = False) -> object:
    return flux_inductor.all_gather_matmul(x, weight, gather_dim=dim, return_gathered=kept)


def scatter(x: Tensor, weight: Tensor, addend: Tensor | None = None, dim: int = 0) -> Tensor:
    return flux_inductor.matmul_reduce_scatter(x, weight, addend=addend, scatter_dim=dim)


def test_equal_calls_choose_once(chosen: list[tuple[str, str]]) -> None:
    for _ in range(3):
        gather(*operands())
        scatter(*operands())
    assert [kind for kind, _ in chosen] == ["all_gather_matmul 2", "matmul_reduce_scatter 2"]


def test_a_gather_chooses_for_each_size_dim_layout_and_dtype(chosen: list[tuple[str, str]]) -> None:
    x, weight = operands()
    deep, twice = torch.randn(2, 4, 16), [weight, weight]
    for count in (6, 6):
        gather(x, weight)
        gather(torch.randn(6, 16), weight)
        gather(x, torch.randn(8, 16).t())
        gather(x, weight, kept=True)
        gather(x.bfloat16(), weight.bfloat16())
        flux_inductor.all_gather_matmul(x, twice)
        assert len(chosen) == count
    gather(deep, weight)
    gather(deep, weight, dim=1)
    assert len(chosen) == 8


def test_a_scatter_chooses_for_each_size_dim_layout_and_addend(chosen: list[tuple[str, str]]) -> None:
    x, weight = operands()
    for count in (5, 5):
        scatter(x, weight)
        scatter(torch.randn(6, 16), weight)
        scatter(x, torch.randn(8, 16).t())
        scatter(x, weight, torch.randn(4, 8))
        scatter(x, weight, dim=1)
        assert len(chosen) == count


def test_gradients_remember_their_plans_too(chosen: list[tuple[str, str]]) -> None:
    for _ in range(2):
        x, weight = (value.requires_grad_() for value in operands())
        part = flux_inductor.matmul_reduce_scatter(x, weight)
        product = flux_inductor.all_gather_matmul(part, torch.randn(8, 6))
        assert isinstance(product, Tensor)
        product.sum().backward()
    assert len(chosen) == 4


def test_options_are_noticed_at_the_next_call(
    chosen: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight = operands()
    monkeypatch.setenv("FLUX_INDUCTOR_STRATEGY", "always")
    scatter(x, weight)
    monkeypatch.setenv("FLUX_INDUCTOR_STRATEGY", "never")
    scatter(x, weight)
    with flux_inductor.options(strategy="always", topology="cpu ranks=2 nodes=2 link=shm"):
        scatter(x, weight)
    with flux_inductor.options(strategy="always"):
        scatter(x, weight)  # as the first one: remembered
    plans = [plan for _, plan in chosen]
    assert [plan.startswith("mesh") for plan in plans] == [True, False, False]
    monkeypatch.setenv("FLUX_INDUCTOR_STRATEGY", "often")
    with pytest.raises(ValueError, match="strategy='often' is unknown"):
        scatter(x, weight)


def test_a_group_made_anew_under_the_same_name_is_noticed(chosen: list[tuple[str, str]]) -> None:
    names = []
    for world in (2, 4, 2):
        dist.destroy_process_group()
        make_group(world)
        names.append(name_of(None))
        gather(*operands())
    assert len(set(names)) == 1
    assert [kind for kind, _ in chosen] == [f"all_gather_matmul {world}" for world in (2, 4, 2)]


def test_plans_are_forgotten_when_there_are_many(
    chosen: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bound, "REMEMBERED", 2)
    for rows in (4, 6, 8, 8, 4):
        gather(*operands(rows))
    assert len(chosen) == 4


def test_tensors_without_memory_have_shapes_and_need_no_plan(
    chosen: list[tuple[str, str]], capfd: pytest.CaptureFixture[str]
) -> None:
    fake = FakeTensorMode()
    for x, weight in (map(fake.from_tensor, operands()), (value.to("meta") for value in operands())):
        product = flux_inductor.all_gather_matmul(x, weight)
        part = flux_inductor.matmul_reduce_scatter(x, weight)
        assert isinstance(product, Tensor)
        assert (tuple(product.shape), tuple(part.shape)) == ((8, 8), (2, 8))
    assert not chosen
    assert "data pointer" not in capfd.readouterr().err


def test_compiled_code_sees_options_change(
    chosen: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(gather, backend="eager")
    for mode in ("always", "never", "always"):
        monkeypatch.setenv("FLUX_INDUCTOR_STRATEGY", mode)
        compiled(*operands())
    # The third run is as the first: remembered.
    assert [plan.startswith("mesh") for _, plan in chosen] == [True, False]


BAD = [
    ("all_gather_matmul", {"gather_dim": 1}, r"gather_dim is 1; .* must be in \[0, 0\] or \[-2, -2\]"),
    ("all_gather_matmul", {"gather_dim": -1}, r"gather_dim is -1; .* must be in \[0, 0\] or \[-2, -2\]"),
    ("all_gather_matmul", {"gather_dim": -3}, r"gather_dim is -3; .* must be in \[0, 0\] or \[-2, -2\]"),
    ("all_gather_matmul", {"biases": [None, None]}, "2 biases for 1 weights"),
    ("all_gather_matmul", {"biases": torch.randn(7)}, r"bias of shape \(7,\) does not fit"),
    ("matmul_reduce_scatter", {"scatter_dim": 2}, r"scatter_dim is 2; .* must be in \[-2, 1\]"),
    ("matmul_reduce_scatter", {"scatter_dim": -3}, r"scatter_dim is -3; .* must be in \[-2, 1\]"),
    ("matmul_reduce_scatter", {"reduce_op": "max"}, "reduce_op is 'max'"),
    ("matmul_reduce_scatter", {"bias": torch.randn(7)}, r"bias of shape \(7,\) does not fit"),
    ("matmul_reduce_scatter", {"addend": torch.randn(4, 7)}, r"addend has shape \(4, 7\)"),
    ("matmul_reduce_scatter", {"bias": torch.randn(8).double()}, "a bias is torch.float64"),
    ("matmul_reduce_scatter", {"group": "nowhere"}, "no process group 'nowhere'"),
]


@pytest.mark.parametrize("grads", [False, True])
@pytest.mark.parametrize("plan", [None, "unfused"])
@pytest.mark.parametrize("seen", [False, True])
@pytest.mark.parametrize(("function", "bad", "message"), BAD)
def test_bad_arguments_are_named_whatever_is_remembered(
    function: str, bad: dict[str, Any], message: str, seen: bool, plan: str | None, grads: bool
) -> None:
    x, weight = operands()
    x.requires_grad_(grads)
    call = getattr(flux_inductor, function)
    if seen:
        call(x, weight, plan=plan)
    with pytest.raises(ValueError, match=message):
        call(x, weight, plan=plan, **bad)


def test_bad_operands_are_named_before_a_plan_is_sought(chosen: list[tuple[str, str]]) -> None:
    x, weight = operands()
    for bad, message in [
        ((x[0], weight), "at least two dims"),
        ((x, weight[:5]), "does not multiply"),
        ((x.double(), weight.double()), "torch.float64; fused ops take"),
        ((x, weight.bfloat16()), "a weight is torch.bfloat16 on cpu"),
    ]:
        for function in (gather, scatter):
            with pytest.raises(ValueError, match=message):
                function(*bad)
    with pytest.raises(ValueError, match="no weight was given"):
        flux_inductor.all_gather_matmul(x, [])
    with pytest.raises(ValueError, match="1 biases for 2 weights"):
        flux_inductor.all_gather_matmul(x, [weight, weight], biases=[torch.randn(8)])
    with pytest.raises(ValueError, match=r"dim 0 of the product \(3, 8\) does not divide by the 2 ranks"):
        scatter(x[:3], weight)
    assert not chosen
