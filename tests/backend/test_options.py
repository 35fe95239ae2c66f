"""Where options come from, which wins, and what is refused."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from typing import Any

import pytest
import torch._inductor

import flux_inductor
from flux_inductor.options import STRATEGIES, Options, current, describe_options, resolve


def test_defaults_are_those_of_the_dataclass() -> None:
    assert resolve() == (Options(), {})


def test_options_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Options().strategy = "never"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("given", "context", "environment"), list(itertools.product([None, *STRATEGIES], repeat=3))
)
def test_the_nearest_source_wins(
    given: str | None, context: str | None, environment: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if environment is not None:
        monkeypatch.setenv("FLUX_INDUCTOR_STRATEGY", environment)
    with flux_inductor.options(**({"strategy": context} if context is not None else {})):
        ours, _ = resolve(given={"strategy": given} if given is not None else None)
    assert ours.strategy == (given or context or environment or "auto")


def test_sources_are_merged_option_by_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLUX_INDUCTOR_STRICT", "on")
    with flux_inductor.options(strategy="never", topology="cpu ranks=2 link=shm"):
        ours, _ = resolve(given={"report": True})
    assert ours == Options(strategy="never", strict=True, report=True, topology="cpu ranks=2 link=shm")


def test_contexts_nest_and_end() -> None:
    with flux_inductor.options(strategy="always", strict=True):
        with flux_inductor.options(strategy="never"):
            assert resolve()[0] == Options(strategy="never", strict=True)
        assert resolve()[0] == Options(strategy="always", strict=True)
    assert resolve()[0] == Options()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("strategy", 1),
        ("strict", 1),
        ("strict", "yes"),
        ("report", None),
        ("topology", 2),
        ("strategy", True),
        ("reserve_sms", "8"),
        ("reserve_sms", True),
    ],
)
def test_an_ill_typed_option_names_the_valid_ones(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name}=.*has type {type(value).__name__}") as error:
        resolve(given={name: value})
    assert describe_options() in str(error.value)


def test_an_unknown_strategy_names_the_valid_ones() -> None:
    with pytest.raises(ValueError, match="'sometimes' is unknown; valid: auto, always, never"):
        resolve(given={"strategy": "sometimes"})


@pytest.mark.parametrize(("value", "reserve"), [("auto", None), (0, 0), (8, 8)])
def test_sms_may_be_reserved(value: Any, reserve: int | None) -> None:
    assert resolve(given={"reserve_sms": value})[0].reserve == reserve


@pytest.mark.parametrize(("text", "reserve"), [("auto", None), ("0", 0), ("12", 12)])
def test_a_reserve_in_the_environment(
    text: str, reserve: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLUX_INDUCTOR_RESERVE_SMS", text)
    assert resolve()[0].reserve == reserve


def test_a_bad_reserve_names_what_is_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="reserve_sms=-1 must be 0 or more, or 'auto'"):
        resolve(given={"reserve_sms": -1})
    monkeypatch.setenv("FLUX_INDUCTOR_RESERVE_SMS", "some")
    with pytest.raises(ValueError, match="RESERVE_SMS='some' is neither 'auto' nor a count"):
        resolve()


def test_a_written_topology_is_checked_at_once() -> None:
    with pytest.raises(ValueError, match="'cpus'"):
        resolve(given={"topology": "cpus ranks=2"})


@pytest.mark.parametrize(
    ("key", "near"), [("stratgy", "strategy"), ("max_autotun", "max_autotune"), ("nonsense_of_mine", None)]
)
def test_an_unknown_key_names_ours_in_full_and_near_ones(key: str, near: str | None) -> None:
    with pytest.raises(ValueError, match=f"unknown option '{key}'") as error:
        resolve(given={key: True})
    assert describe_options() in str(error.value)
    assert near is None or f"did you mean {near}" in str(error.value)


@pytest.mark.parametrize("name", ["strategi", "triton.cudagraph"])
def test_the_context_manager_refuses_unknown_options_on_entry(name: str) -> None:
    with pytest.raises(ValueError, match=f"unknown option '{name}'"), flux_inductor.options(**{name: True}):
        pass


def test_inductors_options_pass_through_beside_ours() -> None:
    with flux_inductor.options(max_fusion_size=7, epilogue_fusion=False):
        ours, theirs = resolve(given={"strategy": "always", "max-autotune": False, "epilogue_fusion": True})
    assert ours == Options(strategy="always")
    assert theirs == {"max_autotune": False, "max_fusion_size": 7, "epilogue_fusion": True}


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("max_autotune", "yes", "bool"),
        ("triton.cudagraphs", 1, "bool"),
        ("compile_threads", "many", "int"),
        ("memory_pool", "pool", "intermediates"),
    ],
)
def test_an_ill_typed_option_of_inductor_is_refused(key: str, value: object, expected: str) -> None:
    with pytest.raises(ValueError, match=f"{key}={value!r} of Inductor has type .*{expected}"):
        resolve(given={key: value})


def test_no_option_of_ours_hides_one_of_inductor() -> None:
    assert not {option.name for option in dataclasses.fields(Options)} & set(torch._inductor.list_options())


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune"])
def test_a_mode_stands_for_options_of_inductor(mode: str) -> None:
    assert resolve(mode=mode) == (Options(), torch._inductor.list_mode_options(mode))


def test_an_unknown_mode_names_the_valid_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown mode 'fast'; valid: .*reduce-overhead"):
        resolve(mode="fast")


@pytest.mark.parametrize(
    ("text", "value"), [("1", True), ("on", True), ("TRUE", True), ("0", False), ("no", False)]
)
def test_switches_in_the_environment(text: str, value: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLUX_INDUCTOR_REPORT", text)
    assert resolve()[0].report is value


def test_a_bad_switch_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLUX_INDUCTOR_STRICT", "perhaps")
    with pytest.raises(
        ValueError, match="FLUX_INDUCTOR_STRICT='perhaps' is neither on nor off; valid: 1, true"
    ):
        resolve()


def test_a_misspelt_variable_is_caught_and_others_of_the_prefix_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FLUX_INDUCTOR_ENGINE", "reference")
    assert resolve() == (Options(), {})
    monkeypatch.setenv("FLUX_INDUCTOR_STRATGEY", "always")
    with pytest.raises(ValueError, match="FLUX_INDUCTOR_STRATGEY; did you mean FLUX_INDUCTOR_STRATEGY"):
        resolve()


def test_another_case_of_letters_is_a_misspelt_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLUX_INDUCTOR_strategy", "always")
    with pytest.raises(ValueError, match="FLUX_INDUCTOR_strategy; did you mean FLUX_INDUCTOR_STRATEGY"):
        resolve()


def test_the_current_options_are_remembered_until_a_source_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert current() == resolve()[0]
    assert current() is current()
    monkeypatch.setenv("FLUX_INDUCTOR_STRATEGY", "never")
    assert current() == Options(strategy="never")
    monkeypatch.setenv("FLUX_INDUCTOR_STRATEGY", "always")
    assert current() == Options(strategy="always")
    with flux_inductor.options(strategy="never", strict=True):
        assert current() == Options(strategy="never", strict=True)
        with flux_inductor.options(topology="cpu ranks=2 link=shm"):
            assert current().topology
    assert current() == Options(strategy="always")
    monkeypatch.delenv("FLUX_INDUCTOR_STRATEGY")
    assert current() == Options()


def test_the_current_options_are_those_of_the_thread() -> None:
    found: list[Options] = []
    with flux_inductor.options(strategy="never"):
        assert current().strategy == "never"
        thread = threading.Thread(target=lambda: found.append(current()))
        thread.start()
        thread.join()
        assert current().strategy == "never"
    assert found == [Options()]


def test_what_spoils_the_current_options_is_refused_at_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    assert current() == Options()
    for variable, text in (("FLUX_INDUCTOR_STRATGEY", "always"), ("FLUX_INDUCTOR_STRATEGY", "sometimes")):
        monkeypatch.setenv(variable, text)
        for _ in range(2):
            with pytest.raises(ValueError, match=r"did you mean|'sometimes' is unknown"):
                current()
        monkeypatch.delenv(variable)
        assert current() == Options()
