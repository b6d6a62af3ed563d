"""Which part of its time an island trains, in virtual time and worked out by hand."""

from __future__ import annotations

import pytest

from atoll import RunSettings
from atoll.simulate import FaultPlan, Latency
from atoll.simulate.islands import TimeSpent
from atoll.simulate.run import Conditions, Simulated, simulate
from atoll.testing import vector_model

ROUNDS, SYNC_EVERY, STEP_S, DELAY_S = 20, 10, 0.1, 0.05
ELEMENTS = 6400
BYTES_PER_S = 64_000.0


def run(
    *,
    overlap_steps: int = 0,
    bytes_per_s: float = float("inf"),
    faults: FaultPlan | None = None,
) -> Simulated:
    settings = {
        "run": {"start_islands": 2, "end_rounds": ROUNDS},
        "sync": {"sync_every": SYNC_EVERY, "overlap_steps": overlap_steps},
        "wire": {"up": "e3m0", "down": "int8"},
        "limits": {"deadline_max_s": 60.0},
    }
    latency = Latency(base_s=DELAY_S, jitter_s=0.0, bytes_per_s=bytes_per_s)
    result = simulate(
        RunSettings.from_dict(settings),
        islands=2,
        faults=faults,
        conditions=Conditions(
            model=vector_model({"w": (ELEMENTS,)}), step_s=STEP_S, latency=latency
        ),
    )
    assert result.violations == []
    return result


def test_every_outcome_is_waited_for_without_overlap() -> None:
    """A window of 1 s, and four messages of 50 ms: 1 s of 1.2 s is 83.3 %."""
    used = run().utilisation

    # i1 joins when i0 has founded the run, which costs i0 a little at first.
    assert used["i1"] == pytest.approx(1.0 / 1.2, abs=0.005)
    assert 0.80 < used["i0"] <= used["i1"]


def test_a_rate_takes_its_time_too() -> None:
    """At 64 kB/s 100 blocks of 33 bytes take 52 ms up, and 6400 of int8 0.1 s down.

    With heads of some hundred bytes that is 0.17 s more than the delays.
    """
    used = run(bytes_per_s=BYTES_PER_S).utilisation["i1"]

    assert used == pytest.approx(1.0 / 1.38, abs=0.02)


def test_overlap_hides_delay_and_rate() -> None:
    """Five steps, 0.5 s, are more than the 0.38 s that an exchange takes."""
    used = run(bytes_per_s=BYTES_PER_S, overlap_steps=5).utilisation

    assert used["i1"] > 0.98
    assert run(bytes_per_s=BYTES_PER_S, overlap_steps=2).utilisation["i1"] < 0.90


def test_an_island_that_is_dead_or_frozen_does_not_train() -> None:
    """Being dead is no part of its time; standing still is, and is not training."""
    dead = run(overlap_steps=5, faults=FaultPlan().kill("i1", at_s=8, back_after_s=5))
    frozen = run(overlap_steps=5, faults=FaultPlan().freeze("i1", at_s=8, for_s=5))

    assert dead.utilisation["i1"] > 0.95
    assert frozen.utilisation["i1"] < 0.90


def test_hours_are_those_of_all_lives() -> None:
    """4 s and 2 s as a member, 3 s of them in inner steps: a half."""
    hours = TimeSpent()
    assert hours.utilisation(1.0) == 0.0
    hours.begin(1.0)
    hours.training_s += 2.0
    hours.end(5.0)
    hours.end(7.0)  # it had left already
    hours.begin(10.0)
    hours.training_s += 1.0

    assert hours.member_s(12.0) == 6.0
    assert hours.utilisation(12.0) == 0.5
