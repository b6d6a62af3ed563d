"""What an island has learnt and no round has counted goes with it when it leaves."""

from __future__ import annotations

import numpy as np
import pytest

from atoll import RunSettings
from atoll.clock import SystemClock
from atoll.errors import AtollWarning
from atoll.island import Host
from atoll.protocol import JoinRequest
from atoll.testing import Vectors, vector_model
from tests.island.scripted import ISLAND, ScriptedRun

SETTINGS = RunSettings.from_dict(
    {
        "sync": {"sync_every": 4, "overlap_steps": 3},
        "wire": {"up": "fp32", "down": "fp32"},
        "outer": {"optimizer": "sgd", "lr": 1.0},
    }
)


def leaves(fates: list[str], *, steps: int) -> tuple[list[int], float]:
    """Train `steps` steps of -1 each and leave.

    Return the rounds that were published for, and the anchor that comes of them.
    """
    run, view = ScriptedRun(SETTINGS, iter(fates)), Vectors()
    request = JoinRequest(model=vector_model({"w": (3,)}), island=ISLAND)
    host = Host(run, view, request, clock=SystemClock())
    for _ in range(steps):
        view.local[0] -= np.float32(1.0)
        host.stepped()
    host.leave()
    rounds = [frame.header.round for frame in run.published]
    return rounds, float(run.fragments[0].state.anchor[0])


def test_the_rest_finds_the_round_that_is_open() -> None:
    """Its round closed without it while it was on its way: the next one takes it."""
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
