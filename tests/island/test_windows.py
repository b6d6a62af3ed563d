"""An island makes the inner steps of its window, in the schedule of its run."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import settings as tests_of
from hypothesis import strategies as st

from atoll import RunSettings
from atoll.exchange import Exchange, MemoryRun
from atoll.island import Host
from atoll.island.progress import FIRST_STEPS, TIMED_STEPS
from atoll.protocol import JoinRequest
from atoll.runtime import SystemRuntime
from atoll.testing import VectorView, vector_model
from tests.island.scripted import ISLAND, ScriptedRun
from tests.island.windows import WindowRun

EVERY = 10
"""Inner steps per window of the schedule."""


def run_settings(**sync: Any) -> RunSettings:
    """Return settings under which an anchor is the mean of the islands' weights."""
    return RunSettings.from_dict(
        {
            "sync": {"sync_every": EVERY, "dynamic_local_updates": True, **sync},
            "wire": {"up": "fp32", "down": "fp32"},
            "outer": {"optimizer": "sgd", "lr": 1.0},
        }
    )


class StepClock:
    """Time that moves by hand. Implements `Clock`."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now_s(self) -> float:
        return self.seconds


class Trainer:
    """An island whose every inner step adds -1 to every weight."""

    def __init__(
        self, run: Exchange, *, fragments: int = 1, clock: StepClock | None = None
    ) -> None:
        self.view, self.clock = VectorView(), clock or StepClock()
        shapes = {f"layers.{index}.w": (3,) for index in range(fragments)}
        request = JoinRequest(model=vector_model(shapes), island=ISLAND)
        self.host = Host(run, self.view, request, runtime=SystemRuntime(self.clock))

    def train(self, steps: int = 1, *, step_s: float = 1.0) -> None:
        for _ in range(steps):
            for local in self.view.local:
                local -= np.float32(1.0)
            self.clock.seconds += step_s
            self.host.stepped()


def of_windows(*windows: int) -> Callable[[str, int], int]:
    """Return the rule of a run whose round r gives all islands `windows[r - 1]`.

    Rounds beyond the last one repeat it.
    """
    return lambda _, round: windows[min(round, len(windows)) - 1]


def windowed(
    *windows: int, first: int = 0, fragments: int = 1, **sync: Any
) -> tuple[Trainer, WindowRun]:
    """Return an island, alone in a run with these windows."""
    settings = run_settings(num_fragments=fragments, **sync)
    # The run behind the script knows no windows, and would refuse a larger norm.
    settings = settings.with_values({"limits.max_update_norm": 1e6})
    run = WindowRun(MemoryRun(settings), of_windows(*windows), first=first)
    return Trainer(run, fragments=fragments), run


def test_a_roster_sets_the_next_window() -> None:
    """Rounds 1 to 4 say 4, 4, 1 and none: the windows are 10, 4, 4, 1 and 10."""
    island, run = windowed(4, 4, 1, 0)
    island.train(29)

    assert run.sealed_after() == [10, 14, 18, 19, 29]
    assert island.host.run_steps == 50


def test_the_first_window_is_that_of_the_join_reply() -> None:
    """A name that rosters have given 4 steps goes on with 4 in its next incarnation."""
    island, run = windowed(4, first=4)
    island.train(8)

    assert run.sealed_after() == [4, 8]
    assert island.host.run_steps == 20


def test_a_window_lasts_until_the_island_is_listed_again() -> None:
    """The roster of a missed round does not list the island: its window stays."""
    # 4 inner steps reach schedule step 10: round 1 is missed, round 2 counts.
    scripted = ScriptedRun(run_settings(), iter(["missed", "counted"]))
    island = Trainer(WindowRun(scripted, of_windows(0), first=4))
    island.train(4)
    assert island.host.counters.carried == 1
    assert island.host.stride.window == 4

    island.train(4)
    assert island.host.stride.window == EVERY


def test_of_rounds_that_pass_together_the_last_roster_counts() -> None:
    """The first of two outcomes lists the island, the last does not: 4 is the last."""
    scripted = ScriptedRun(run_settings(), iter(["passed", "counted"]))
    island = Trainer(WindowRun(scripted, of_windows(4, 7)))
    island.train(10)

    assert island.host.stride.window == 4
    # Round 2 is over as well, so that the island is at its schedule step.
    assert island.host.run_steps == 20
    assert island.host.wakes_in == 4


def test_an_outcome_is_taken_after_the_same_part_of_a_window() -> None:
    """With 4 of 10 steps and an overlap of 3, a seal after 4 is taken after 6."""
    # floor(10 m / 4) = 12, 15 for m = 5, 6: the outcome is due at schedule step 13.
    island, _ = windowed(4, first=4, overlap_steps=3)
    island.train(5)
    assert island.host.slots[0].sealed is not None
    assert island.host.wakes_in == 1

    island.train(1)
    assert island.host.slots[0].sealed is None


def test_a_window_that_changes_in_flight_moves_no_step() -> None:
    """The island goes on from the schedule step at which it takes the outcome."""
    # Sealed at 10, taken at 13; 7 schedule steps at 4 of 10 are ceil(2.8) = 3.
    island, run = windowed(4, overlap_steps=3)
    island.train(13)
    assert island.host.run_steps == 13
    assert island.host.wakes_in == 3

    island.train(7)
    island.host.leave(depart=False)
    assert run.sealed_after() == [10, 16, 20]


@given(
    every=st.integers(2, 12),
    fragments=st.integers(1, 5),
    overlap=st.integers(0, 11),
    data=st.data(),
)
@tests_of(max_examples=60)
def test_every_window_has_exactly_its_inner_steps(
    every: int, fragments: int, overlap: int, data: st.DataObject
) -> None:
    """Whatever divides what, each fragment is sealed once in so many inner steps."""
    window = data.draw(st.integers(1, every), label="window")
    island, run = windowed(
        window,
        first=window,
        fragments=fragments,
        sync_every=every,
        overlap_steps=min(overlap, every - 1),
    )
    island.train(4 * window)
    island.host.leave(depart=False)

    for fragment in range(fragments):
        sealed = run.sealed_after(fragment)
        assert len(sealed) in (3, 4)
        assert {b - a for a, b in pairwise(sealed)} == {window}


@given(
    windows=st.lists(st.integers(0, EVERY), min_size=1, max_size=8),
    fragments=st.integers(1, 3),
    overlap=st.integers(0, EVERY - 1),
    steps=st.integers(1, 60),
)
@example(windows=[1, 1, 1, 0], fragments=1, overlap=0, steps=33)
@tests_of(max_examples=60)
def test_no_inner_step_is_lost_or_counts_twice(
    windows: list[int], fragments: int, overlap: int, steps: int
) -> None:
    """Whatever the windows, an anchor has the inner steps up to its last seal."""
    island, run = windowed(*windows, fragments=fragments, overlap_steps=overlap)
    island.train(steps)
    island.host.leave()

    for fragment, slot in enumerate(island.host.slots):
        sealed = [0, *run.sealed_after(fragment)]
        taken = slot.state.round
        assert taken >= len(sealed) - 2
        assert np.all(slot.state.anchor == -sealed[taken])
        assert np.all(island.view.local[fragment] == -steps)
        departed = run.state(fragment).body.view(np.float32)
        assert np.all(departed == -steps)


def test_the_window_of_the_schedule_is_no_window() -> None:
    """Rosters that give all inner steps of the schedule change no bit."""
    islands = []
    for window, is_dynamic in ((0, False), (0, True), (EVERY, True)):
        island, run = windowed(
            window, fragments=3, overlap_steps=3, dynamic_local_updates=is_dynamic
        )
        island.train(4 * EVERY + 3)  # the outcome of the last seal is taken
        islands.append((island.host.digest, run.sealed))

    assert islands[0] == islands[1] == islands[2]


@pytest.mark.parametrize("window", [EVERY + 1, 2**32 - 1])
def test_nobody_makes_more_inner_steps_than_the_schedule(window: int) -> None:
    """A roster and a join reply are written elsewhere: their numbers are bounded."""
    island, run = windowed(window, first=window)
    island.train(2 * EVERY)

    assert run.sealed_after() == [EVERY, 2 * EVERY]
    assert island.host.run_steps == 2 * EVERY


def test_a_run_without_the_setting_has_no_windows() -> None:
    """Whoever writes windows into its rosters changes nothing."""
    island, run = windowed(4, dynamic_local_updates=False)
    island.train(2 * EVERY)

    assert run.sealed_after() == [EVERY, 2 * EVERY]


def test_the_pace_is_the_median_of_the_last_inner_steps() -> None:
    """None before four are known; the first cannot be timed, as none ended before."""
    island, run = windowed(0, sync_every=1000)
    island.train(FIRST_STEPS)
    assert run.beats[-1].step_s is None
    island.train(TIMED_STEPS)
    assert run.beats[-1].step_s == 1.0

    island.train(TIMED_STEPS // 2, step_s=3.0)
    assert run.beats[-1].step_s == 2.0  # as many of 1 s as of 3 s
    island.train(1, step_s=3.0)
    assert run.beats[-1].step_s == 3.0


def test_waiting_and_evaluating_are_not_in_the_pace() -> None:
    """A sync that takes 100 s is in no inner step, and one evaluation in no median."""
    island, run = windowed(0)

    def wait() -> None:
        island.clock.seconds += 100.0

    island.host.before_seal(wait)
    island.train(3 * EVERY)
    island.clock.seconds += 500.0
    island.train(EVERY)

    assert len(run.sealed) == 4
    assert run.beats[-1].step_s == 1.0


def test_a_clock_that_stands_gives_no_pace() -> None:
    """A pace of 0 s would be a lie: no heartbeat carries it."""
    island, run = windowed(0)
    island.train(2 * EVERY, step_s=0.0)

    assert run.beats[-1].step_s is None
