"""Islands that leave again and again, or as the run ends: nothing goes in silence."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from atoll import RunSettings
from atoll.errors import AtollWarning
from atoll.island import Host
from atoll.simulate.islands import PlannedDeparture
from atoll.testing import (
    FaultPlan,
    VectorView,
    VirtualIsland,
    VirtualRun,
    simulate,
    vector_model,
    virtual_run,
)

Stop = Callable[[Host, int], bool]
SLOW = FaultPlan().slow("i0", factor=6.0)
"""The round stays open while the other island comes and goes."""


def settings(**run: object) -> RunSettings:
    """Return the settings of a run whose anchor moves by minus the mean."""
    return RunSettings.from_dict(
        {
            "run": {"start_islands": 2, **run},
            "sync": {"sync_every": 4, "overlap_steps": 3},
            "wire": {"up": "fp32", "down": "fp32"},
            "outer": {"optimizer": "sgd", "lr": 1.0},
        }
    )


def lives(run: RunSettings, *stops: Stop) -> VirtualRun:
    """Let i1 live once for each stop, making steps of -1; i0 makes none, and stays."""

    def live(island: VirtualIsland, stop: Stop) -> Host:
        weights = VectorView()
        host = island.join(vector_model({"w": (3,)}), weights)
        steps = 0
        while not host.has_ended and not stop(host, steps):
            island.work(0.5)
            if island.name == "i1":
                weights.local[0] -= np.float32(1.0)
            host.stepped()
            steps += 1
        host.leave()
        island.incarnation += 1
        return host

    def loop(island: VirtualIsland) -> float:
        ends: tuple[Stop, ...] = (lambda host, steps: False,)
        for stop in stops if island.name == "i1" else ends:
            host = live(island, stop)
        return float(host.slots[0].state.anchor[0])

    result = virtual_run(loop, run, islands=2, faults=SLOW, limit_s=600.0)
    assert result.failures == {}
    return result


def test_a_life_may_leave_after_another_that_spoke_for_two_rounds() -> None:
    """No round takes any more of it, and that is said."""
    with pytest.warns(AtollWarning, match="1 inner steps are lost"):
        lives(
            settings(end_rounds=3, quorum=2),
            lambda host, steps: steps == 6,
            lambda host, steps: steps == 1,
        )


def test_a_flight_for_a_round_that_an_earlier_life_spoke_for_is_not_lost() -> None:
    """Six steps of the first life and nine of the second are in the anchor, halved."""

    def has_sealed_round_2(host: Host, steps: int) -> bool:
        sealed = host.slots[0].sealed
        return sealed is not None and sealed.round == 2 and sealed.frame is not None

    run = lives(
        settings(end_rounds=4, quorum=1),
        lambda host, steps: steps == 6,
        has_sealed_round_2,
    )

    assert run.returned["i0"] == -7.5


def test_a_fragment_that_has_ended_does_not_keep_another_from_departing() -> None:
    """Round 1 of fragment 0 is the last and over; that of fragment 1 takes the rest."""
    two = RunSettings.from_dict(
        {
            "run": {"start_islands": 2, "end_rounds": 1, "quorum": 1},
            "sync": {"sync_every": 12, "num_fragments": 2, "overlap_steps": 1},
            "wire": {"up": "fp32", "down": "fp32"},
            "limits": {"deadline_max_s": 60.0},
        }
    )
    plan = FaultPlan().slow("i0", factor=4.0).freeze("i1", at_s=1.8, for_s=19.0)
    leaving = {"i1": PlannedDeparture(after_steps=4)}
    with pytest.warns(AtollWarning, match="no round took its work"):
        result = simulate(two, islands=2, faults=plan, departures=leaving)

    assert (result.violations, result.failures) == ([], {})
    assert result.rounds == (1, 1)
    assert result.tokens["departed"] < sum(result.tokens.values()) / 4
