"""An island that leaves publishes the work that no round has counted."""

from __future__ import annotations

import numpy as np
import pytest

from atoll import RunSettings
from atoll.errors import AtollWarning
from atoll.island import Host
from atoll.protocol import JoinRequest
from atoll.testing import VectorView, vector_model
from atoll.wire import FrameKind
from tests.island.scripted import ISLAND, ScriptedRun

SETTINGS = RunSettings.from_dict(
    {
        "sync": {"sync_every": 4, "overlap_steps": 3},
        "wire": {"up": "fp32", "down": "fp32"},
        "outer": {"optimizer": "sgd", "lr": 1.0},
    }
)


ENDS = SETTINGS.with_values({"run.end_rounds": 1})
"""Round 1 is the last: the work after its seal is in no round."""


def island_of(
    settings: RunSettings, fates: list[str], view: VectorView | None = None
) -> tuple[Host, VectorView, ScriptedRun]:
    """Return an island that has joined a run with this script."""
    run, view = ScriptedRun(settings, iter(fates)), view or VectorView()
    request = JoinRequest(model=vector_model({"w": (3,)}), island=ISLAND)
    return Host(run, view, request), view, run


def train(host: Host, view: VectorView, *, steps: int) -> None:
    """Make steps of -1 each, on ten tokens."""
    for _ in range(steps):
        view.local[0] -= np.float32(1.0)
        host.counters.tokens += 10
        host.stepped()


def leaves(fates: list[str], *, steps: int) -> tuple[list[int], float]:
    """Train `steps` steps of -1 each and leave.

    Return the rounds that were published for, and the anchor that comes of them.
    """
    host, view, run = island_of(SETTINGS, fates)
    train(host, view, steps=steps)
    host.leave()
    rounds = [frame.header.round for frame in run.published]
    return rounds, float(run.fragments[0].state.anchor[0])


def test_the_rest_finds_the_round_that_is_open() -> None:
    """Its round closed without it while it was in flight: the next one takes it."""
    assert leaves(["missed", "counted"], steps=2) == ([1, 2], -2.0)


def test_work_that_no_round_takes_is_reported() -> None:
    """Two rounds later it is dropped, as an island's that stays would be."""
    with pytest.warns(AtollWarning, match="2 inner steps are lost"):
        left = leaves(["missed"] * 3, steps=2)

    assert left == ([1, 2, 3], 0.0)


def test_a_flight_that_missed_its_round_goes_with_the_rest() -> None:
    """Sealed after four steps and missed, one more made since: five in one update."""
    assert leaves(["missed", "counted"], steps=5) == ([1, 2], -5.0)


def test_a_flight_that_counted_leaves_only_the_rest() -> None:
    """Four steps have counted: the departing update holds the fifth."""
    assert leaves(["counted", "counted"], steps=5) == ([1, 2], -5.0)


def test_steps_after_the_last_seal_of_a_run_are_lost_by_name() -> None:
    """Six steps, four of them in the last round: two are shown, with their tokens."""
    host, view, run = island_of(ENDS, ["counted"])
    train(host, view, steps=6)
    with pytest.warns(AtollWarning, match="2 inner steps are lost, with 20 tokens"):
        host.leave()

    assert [frame.header.round for frame in run.published] == [1]
    assert host.counters.metrics()["atoll/not_counted_steps"] == 2


def test_a_last_round_that_missed_its_update_loses_all_of_it_by_name() -> None:
    """Nothing of the five steps is in any round, and none is to come."""
    host, view, _ = island_of(ENDS, ["missed"])
    train(host, view, steps=5)
    with pytest.warns(AtollWarning, match="5 inner steps are lost, with 50 tokens"):
        host.leave()

    assert host.counters.not_counted_steps == 5


def test_an_island_that_departs_with_nothing_loses_nothing() -> None:
    """All its steps are in the last round."""
    host, view, _ = island_of(ENDS, ["counted"])
    train(host, view, steps=4)
    host.leave()

    assert host.counters.not_counted_steps == 0


def test_what_an_error_keeps_from_departing_is_shown() -> None:
    """One step was made after the seal, and is not trusted."""
    host, view, run = island_of(SETTINGS, ["counted"])
    train(host, view, steps=5)
    host.leave(depart=False)

    assert len(run.published) == 1
    assert host.counters.not_counted_steps == 1


class Interrupted(VectorView):
    """Weights whose first reading after `armed` is ended by a key."""

    armed = False

    def read(self, fragment: int, out: np.ndarray) -> None:
        if self.armed:
            self.armed = False
            raise KeyboardInterrupt
        super().read(fragment, out)


def test_a_seal_for_the_last_round_that_was_interrupted_departs() -> None:
    """The round is open still: it takes all four steps when the island leaves."""
    view = Interrupted()
    host, _, run = island_of(ENDS, ["counted"], view)
    train(host, view, steps=3)
    view.armed = True
    with pytest.raises(KeyboardInterrupt):
        train(host, view, steps=1)
    host.leave()

    assert [frame.header.kind for frame in run.published] == [FrameKind.DEPARTING]
    assert float(run.fragments[0].state.anchor[0]) == -4.0
    assert host.counters.not_counted_steps == 0
