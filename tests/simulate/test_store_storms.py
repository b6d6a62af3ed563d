"""Runs in a bucket in virtual time: the same for the same seed, and in any storm."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest

from atoll import RunSettings
from atoll.exchange.bucket.exchange import UpdatePublisher
from atoll.simulate import FaultPlan, simulate
from atoll.simulate.run import PlannedDeparture, Simulated
from atoll.simulate.scheduler import TraceEvent
from atoll.simulate.story import CommitTrace
from atoll.simulate.trials import (
    ASYNC_STORE_ROUNDS,
    ISLANDS,
    NAMES,
    STORE_ROUNDS,
    main,
    store_storm,
    store_trial,
)
from tests.simulate.planted import replaced

SETTINGS = RunSettings.from_dict(
    {
        "run": {"start_islands": 3, "quorum": 2, "end_rounds": 8},
        "sync": {"sync_every": 3, "overlap_steps": 1},
        "wire": {"up": "e3m0", "down": "int8"},
        "limits": {"deadline_max_s": 20.0},
    }
)


def bucket(
    plan: FaultPlan | None = None,
    *,
    islands: int = 4,
    settings: RunSettings = SETTINGS,
    departures: dict[str, PlannedDeparture] | None = None,
) -> Simulated:
    """Return what came of a run in a bucket, in which everything held."""
    result = simulate(
        settings,
        islands=islands,
        faults=plan,
        seed=4,
        departures=departures,
        store=True,
    )
    assert result.violations == []
    return result


def agreed(result: Simulated) -> set[str]:
    """Return the digests that islands held when they saw the end."""
    return {*result.digests.values()}


def test_islands_meet_in_a_bucket_without_a_coordinator() -> None:
    """Every round is closed, everybody counts, and all hold the same bits."""
    result = bucket()

    assert result.rounds == (8,)
    assert len(result.digests) == 4
    assert len(agreed(result)) == 1
    assert set(result.tokens) == {
        *("committed", "refused", "dropped", "departed", "in hand")
    }


def test_an_island_that_dies_is_waited_for_a_lease_and_no_longer() -> None:
    """The others finish its round, and the shards of the mean that were its own."""
    result = bucket(FaultPlan().kill("i2", at_s=20.0))

    assert result.rounds == (8,)
    assert sorted(result.digests) == ["i0", "i1", "i3"]
    assert len(agreed(result)) == 1


def test_an_island_that_comes_back_is_the_next_life() -> None:
    """At once, with the run's weights."""
    result = bucket(FaultPlan().kill("i2", at_s=20.0, back_after_s=1.0))

    assert result.deaths["i2"] == 1
    assert len(result.digests) == 4
    assert len(agreed(result)) == 1


def test_an_island_may_stand_still_for_an_hour() -> None:
    """The others go on without it, and it finds the end of the run."""
    result = bucket(FaultPlan().freeze("i1", at_s=20.0, for_s=3600.0))

    assert result.seconds > 3600.0
    assert len(result.digests) == 4
    assert len(agreed(result)) == 1


def test_the_founder_may_die_before_there_are_weights() -> None:
    """The next in line founds the run, a lease later at most."""
    plan = FaultPlan()
    for name in ("i0", "i1", "i2", "i3"):
        plan = plan.kill(name, at_s=0.5, back_after_s=40.0 if name == "i0" else 1.0)
    result = bucket(plan)

    assert result.rounds == (8,)
    assert len(agreed(result)) == 1


def test_a_store_that_is_gone_for_two_minutes_costs_time_only() -> None:
    """Islands ask until it answers, and no step is lost."""
    plan = FaultPlan().partition(["store"], at_s=20.0, for_s=120.0)
    result = bucket(plan)

    assert result.rounds == (8,)
    assert result.tokens["dropped"] == result.tokens["refused"] == 0
    assert len(result.digests) == 4


@pytest.mark.parametrize("rate", [0.3, 1.0])
def test_a_store_may_fail_before_and_after_it_does_what_is_asked(rate: float) -> None:
    """Whoever was told nothing asks again, and nothing is done twice."""
    result = bucket(FaultPlan().outage("store", rate=rate, at_s=5.0, for_s=40.0))

    assert result.rounds == (8,)
    assert len(agreed(result)) == 1


def test_lists_may_be_late_all_the_time() -> None:
    """Who misses an update looks again; a roster is read by its key."""
    result = bucket(FaultPlan().list_lag("store", by_s=5.0))

    assert result.rounds == (8,)
    assert len(agreed(result)) == 1


@pytest.mark.parametrize("by_s", [3600.0, -3600.0])
def test_a_clock_may_be_an_hour_off(by_s: float) -> None:
    """Nobody reads another's clock; one that jumps gives nobody up unseen."""
    result = bucket(FaultPlan().clock_jump("i1", by_s=by_s, at_s=20.0))

    assert result.rounds == (8,)
    assert len(result.digests) == 4


def test_an_island_may_be_cut_off_from_the_store() -> None:
    """For longer than a lease: the others go on, and it carries or drops its work."""
    result = bucket(FaultPlan().partition(["i3"], at_s=15.0, for_s=60.0))

    assert len(result.digests) == 4
    assert len(agreed(result)) == 1


def test_an_island_may_leave_and_come_back() -> None:
    """What it left counts once, or is reported."""
    departures = {"i2": PlannedDeparture(after_steps=7, back_after_s=5.0)}
    result = bucket(departures=departures)

    assert result.rounds == (8,)
    assert len(agreed(result)) == 1


@pytest.mark.parametrize("back_after_s", [None, 12.0])
def test_what_is_left_while_a_roster_is_on_its_way_counts(
    back_after_s: float | None,
) -> None:
    """Others bring it into the next round, or the next life of the island does."""
    # The others publish after 6 s and wait for 10. Their roster lists neither i2, that
    # leaves after 24 s, nor i3, that takes 60 s, and comes after 35 s.
    plan = FaultPlan().roster_lag("store", by_s=18.0, for_s=30.0)
    plan = plan.slow("i2", factor=4.0, for_s=30.0).slow("i3", factor=10.0, for_s=30.0)
    values = {"wire.up": "fp32", "limits.deadline_max_s": 10.0}
    counted: list[str] = []
    result = simulate(
        SETTINGS.with_values(values),
        islands=5,
        faults=plan,
        seed=4,
        departures={"i2": PlannedDeparture(after_steps=3, back_after_s=back_after_s)},
        trace=lambda each: counted.extend(_counted("i2", each)),
        store=True,
    )

    assert result.violations == []
    assert result.tokens["departed"] == 0
    assert counted[:2] == ["late", "counted"]


def _counted(island: str, happening: TraceEvent) -> list[str]:
    """Return how a roster lists an island, if this is one."""
    if happening.action != "commit":
        return []
    return [CommitTrace.parsed(happening.detail).verdicts.get(island, "")]


def test_a_run_in_a_bucket_ends_by_its_tokens() -> None:
    """Whoever closes the round that counts enough of them says which is the last."""
    settings = {**SETTINGS.to_dict(), "run": {"end_tokens": 2_000}}
    result = bucket(settings=RunSettings.from_dict(settings))

    # Four islands make three steps of 60 to 100 tokens per round: 720 to 1200.
    assert 2 <= result.rounds[0] <= 5
    assert len(agreed(result)) == 1


def test_the_same_seed_gives_the_same_trial_and_run() -> None:
    """Settings, departures, plan and what comes of them; other seeds differ."""
    assert store_trial(5) == store_trial(5) != store_trial(6)
    assert store_storm(5) == store_storm(5)
    assert store_storm(6) == store_storm(6)
    assert len(store_storm(5).deaths) == ISLANDS
    assert store_trial(6).settings["run"]["end_rounds"] == STORE_ROUNDS


def test_a_third_of_the_trials_in_a_bucket_is_asynchronous() -> None:
    """With every buffer, grace and staleness, and an end by rounds or by tokens."""
    trials = [store_trial(seed) for seed in range(300)]
    stand = [each for each in trials if each.settings["sync"].get("mode") == "async"]
    drawn = [each.settings["async"] for each in stand]

    assert 80 <= len(stand) <= 120
    assert {each.get("buffer") for each in drawn} == {None, 1, 2, 5}
    assert {each.get("grace_s") for each in drawn} == {None, 0.0, 0.2, 2.0}
    assert len({each["staleness"] for each in drawn}) == 4
    ends = {each.settings["run"].get("end_rounds") for each in stand}
    assert ends == {None, ASYNC_STORE_ROUNDS}
    assert all(set(each.conditions.paces) == set(NAMES) for each in stand)


def test_the_order_of_sets_changes_nothing() -> None:
    """Two interpreters with different string hashes see the same run."""
    code = (
        "import logging; logging.disable(50)\n"
        "from atoll.simulate.trials import store_storm\n"
        "print(store_storm(8))"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "4242")
    }

    assert len(seen) == 1


def test_a_failed_trial_becomes_a_test_ready_to_paste() -> None:
    """It says that the run is in a bucket."""

    def lost(real: object, publishing: UpdatePublisher, *words: object) -> None:
        raise LookupError("nobody publishes")

    plan = FaultPlan().kill("i1", at_s=1.0).outage("store", rate=0.5, for_s=3.0)
    with replaced(UpdatePublisher, "put", lost):
        smallest = replace(store_trial(3), plan=plan, departures={}).shrunk()

    assert smallest.plan == FaultPlan()
    assert "store=True" in smallest.as_test()
    pasted: dict[str, Callable[[], None]] = {}
    exec(smallest.as_test(), pasted)
    with replaced(UpdatePublisher, "put", lost), pytest.raises(AssertionError):
        pasted["test_storm_of_seed_3"]()


def test_storms_over_a_bucket_are_added_up(capsys: pytest.CaptureFixture[str]) -> None:
    """As those over a coordinator, when they are asked for."""
    assert main(["--store", "--storms", "1", "--processes", "1"]) == 0

    assert "1 storms" in capsys.readouterr().out.splitlines()[-1]
