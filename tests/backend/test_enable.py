"""enable() and disable(), for frameworks that call torch.compile themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._inductor import config

import flux_inductor
from flux_inductor.backend import flux_inductor as backend
from tests.backend.programs import fake_ranks, inputs, mlp
from tests.backend.test_frozen import CountingPass

HOOK = "post_grad_custom_post_pass"


@pytest.fixture(params=["none", "pass"])
def users(request: pytest.FixtureRequest) -> Iterator[CountingPass | None]:
    """What Inductor's hook held before: nothing, or a pass of the user's own."""
    value = CountingPass() if request.param == "pass" else None
    with config.patch({HOOK: value}):
        yield value


def _new_records(compiler: Any) -> list[bool]:
    before = len(flux_inductor.report().records)
    torch._dynamo.reset()
    torch.compile(mlp, backend=compiler)(*inputs())
    return [record.fused for record in flux_inductor.report().records[before:]]


def test_inductor_itself_fuses_while_enabled(users: CountingPass | None) -> None:
    with fake_ranks(2):
        assert _new_records("inductor") == []
        flux_inductor.enable(strategy="always")
        assert _new_records("inductor") == [True, True]
        flux_inductor.disable()
        assert _new_records("inductor") == []
    assert users is None or users.graphs == 3


def test_enabling_twice_runs_every_pass_once_and_takes_the_last_options(users: CountingPass | None) -> None:
    flux_inductor.enable(strategy="always")
    flux_inductor.enable(strategy="never")
    with fake_ranks(2):
        assert _new_records("inductor") == [False, False]
    assert users is None or users.graphs == 1


def test_the_backend_beside_enable_runs_every_pass_once(users: CountingPass | None) -> None:
    flux_inductor.enable(strategy="never")
    with fake_ranks(2), flux_inductor.options(strategy="always"):
        assert _new_records(backend) == [True, True]
    assert users is None or users.graphs == 1


def test_disable_restores_what_was_there(users: CountingPass | None) -> None:
    flux_inductor.disable()
    assert getattr(config, HOOK) is users
    flux_inductor.enable()
    flux_inductor.enable(strict=True)
    flux_inductor.disable()
    assert getattr(config, HOOK) is users
    flux_inductor.disable()
    assert getattr(config, HOOK) is users


def test_disable_leaves_a_pass_that_was_set_meanwhile() -> None:
    with config.patch({HOOK: None}):
        flux_inductor.enable()
        users = CountingPass()
        setattr(config, HOOK, users)
        flux_inductor.disable()
        assert getattr(config, HOOK) is users


@pytest.mark.parametrize(
    ("name", "message"), [("stratgy", "did you mean strategy"), ("max_autotune", "no option of Inductor")]
)
def test_wrong_options_change_nothing(name: str, message: str) -> None:
    before = getattr(config, HOOK)
    with pytest.raises(ValueError, match=message):
        flux_inductor.enable(**{name: True})
    assert getattr(config, HOOK) is before
