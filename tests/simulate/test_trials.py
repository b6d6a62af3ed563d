"""Trials by storm: drawn from a seed, run in several processes, explained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from atoll.errors import LeaseLost
from atoll.protocol.membership import Members
from atoll.settings import RunSettings
from atoll.simulate import FaultPlan
from atoll.simulate.invariants.rows import ends_with_data
from atoll.simulate.trials import (
    ASYNC_ROUNDS,
    ISLANDS,
    ROUNDS,
    main,
    run_storms,
    storm,
    trial,
)
from tests.simulate.planted import replaced

STALENESS = {"none", "inverse", "inverse_root", "exponential"}
DOWN = {"int8", "bf16", "fp32", "gather"}


def test_the_same_seed_gives_the_same_trial() -> None:
    """Settings, departures, plan and what comes of them."""
    assert trial(5) == trial(5)
    assert storm(5) == storm(5)


def test_trials_differ_in_more_than_their_faults() -> None:
    """Codecs, overlaps, ways to adopt, fragments, quorums and departures are drawn."""
    trials = [trial(seed) for seed in range(300)]
    sync = [each.settings["sync"] for each in trials]

    assert {each.get("adopt", "rebase") for each in sync} == {"rebase", "mix"}
    assert {each["num_fragments"] for each in sync} == {1, 2, 3}
    assert {each["overlap_steps"] for each in sync} == {0, 1, 2}
    assert {each.settings["wire"]["down"] for each in trials} == DOWN
    assert len({str(each.settings["wire"]) for each in trials}) >= 14
    assert {bool(each.conditions.spike_every) for each in trials} == {True, False}
    assert {each.settings["run"]["quorum"] for each in trials} == {1, 2, 3}
    assert {bool(each.departures) for each in trials} == {True, False}


def test_a_third_of_the_trials_is_asynchronous() -> None:
    """With every buffer, grace and staleness, and paces from 1 to 6."""
    trials = [trial(seed) for seed in range(300)]
    stand = [each for each in trials if each.settings["sync"].get("mode") == "async"]
    drawn = [each.settings["async"] for each in stand]
    paces = [pace for each in stand for pace in each.conditions.paces.values()]

    assert 80 <= len(stand) <= 120
    assert {each.get("buffer") for each in drawn} == {None, 1, 2, 5}
    assert {each.get("grace_s") for each in drawn} == {None, 0.0, 0.2, 2.0}
    assert {each["staleness"] for each in drawn} == STALENESS
    assert 1.0 <= min(paces) < 1.1
    assert 5.9 < max(paces) <= 6.0


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_both_modes_have_gathered_outcomes_and_windows_that_change(mode: str) -> None:
    """And weights by tokens."""
    settings = [trial(seed).settings for seed in range(300)]
    drawn = [each for each in settings if each["sync"].get("mode", "sync") == mode]

    assert any(each["wire"]["down"] == "gather" for each in drawn)
    assert any(each["sync"].get("dynamic_local_updates") for each in drawn)
    assert any(each["outer"].get("weight") == "tokens" for each in drawn)


@pytest.mark.filterwarnings("ignore::atoll.errors.AtollWarning")
def test_a_third_of_the_trials_deals_out_rows() -> None:
    """In both modes, and half of them end with their data; some islands are evicted."""
    trials = [each for each in map(trial, range(300)) if "data" in each.settings]
    sections = [each.settings["data"] for each in trials]
    runs = [RunSettings.from_dict(each.settings) for each in trials]

    assert 80 <= len(trials) <= 120
    assert {each["passes"] for each in sections} == {0, 1, 2}
    assert {each["unit_rows"] for each in sections} == {4, 16, 64}
    assert {each.sync.is_async for each in runs} == {True, False}
    assert {each.sync.dynamic_local_updates for each in runs} == {True, False}
    assert 40 <= sum(ends_with_data(each) for each in runs) <= 60
    assert {each.conditions.evicted_after_s for each in trials} == {0.0, 5.0, 30.0}
    assert any(each.departures for each in trials)
    assert all(each.conditions.rows >= 50 for each in trials)


@pytest.mark.filterwarnings("ignore::atoll.errors.AtollWarning")
def test_every_trial_has_five_islands_and_an_end() -> None:
    """20 rounds as the storms that `make test` promises, 40 smaller ones, or data."""
    for seed in range(50):
        settings = RunSettings.from_dict(trial(seed).settings)
        if ends_with_data(settings):
            assert settings.data.passes > 0
        elif not settings.sync.is_async:
            assert settings.run.end_rounds == ROUNDS
        elif settings.run.end_tokens is None:
            assert settings.run.end_rounds == ASYNC_ROUNDS
    assert len(storm(0).deaths) == ISLANDS


def test_a_failed_trial_becomes_a_test_ready_to_paste() -> None:
    """It names the seed, the settings and the smallest plan that still fails."""

    def expelled(real: object, members: Members, island: str, incarnation: int) -> None:
        raise LeaseLost("No member.")

    plan = FaultPlan().kill("i1", at_s=1.0).loss("i2", rate=0.5, for_s=3.0)
    with replaced(Members, "require", expelled):
        smallest = replace(trial(3), plan=plan, departures={}).shrunk()

    assert smallest.plan == FaultPlan()
    pasted: dict[str, Callable[[], None]] = {}
    exec(smallest.as_test(), pasted)
    pasted["test_storm_of_seed_3"]()
    with replaced(Members, "require", expelled), pytest.raises(AssertionError):
        pasted["test_storm_of_seed_3"]()


def test_storms_run_in_processes_and_are_added_up(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The last line says how many storms there were, and that nothing failed."""
    assert main(["--storms", "2", "--first", "1", "--processes", "1"]) == 0

    told = capsys.readouterr().out.splitlines()[-1]
    rounds = sum(sum(storm(seed).rounds) for seed in (1, 2))
    assert f"2 storms, {rounds} rounds" in told
    assert told.endswith("0 violations")


def test_a_violation_is_told_by_its_seed() -> None:
    """With what did not hold."""
    with replaced(Members, "require", lambda *words: words[9]):
        tally = run_storms([4])

    assert list(tally.failures) == [4]
    assert "islands continue" in tally.failures[4]
