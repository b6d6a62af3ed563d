"""Work that an island drops after missed rounds is reported, not only counted."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from atoll.exchange import CoordinatorExchange
from atoll.protocol import Heartbeat, Stats
from atoll.telemetry import render_status
from atoll.testing.fixtures import enter, plain_settings
from tests.coordinator.serving import line_to, serving
from tests.island.scripted import ISLAND, ScriptedRun
from tests.torch.runs import Weights, join_exchange, settings_of, sgd, train


def test_a_coordinator_shows_the_steps_that_an_island_dropped(tmp_path: Path) -> None:
    """An event for each loss, the total in status, and a line for people."""
    with (
        serving(tmp_path / "run", plain_settings()) as coordinator,
        line_to(coordinator) as line,
    ):
        exchange = CoordinatorExchange(line, key=b"key", nonce=b"nonce")
        joined = enter(exchange, "a")
        beat = Heartbeat(island="a", incarnation=joined.incarnation, step=0)
        for steps in (6, 10, 10):
            exchange.stats = lambda steps=steps: Stats(dropped_steps=steps)
            exchange.heartbeat(beat, at_once=True)
        events = [
            event.as_dict()
            for event in coordinator.events.after(0)
            if event.name == "work_dropped"
        ]
        status = coordinator.status()

    assert [(e["steps"], e["total_steps"]) for e in events] == [(6, 6), (4, 10)]
    assert status["islands"][0]["dropped_steps"] == 10
    page = render_status(status, width=100, is_colour=False)
    assert "a missed rounds and dropped 10 inner steps" in page


def test_an_island_says_what_it_dropped_when_it_happens_and_when_it_leaves(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its log names the round and the steps; its summary has the total."""
    run = ScriptedRun(settings_of(every=2), iter(["missed", "missed", "missed"]))
    model = Weights(16.0)
    optimizer = sgd(model)
    with (
        caplog.at_level(logging.INFO, logger="atoll"),
        join_exchange(model, optimizer, run, island=ISLAND),
    ):
        train(model, optimizer, steps=6)

    assert "missed round 3 of fragment 0, after 2 others in a row: 6" in caplog.text
    assert "6 dropped after missed rounds" in caplog.text


def test_what_counted_before_rounds_passed_is_not_dropped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Only the steps after a seal are lost when its update counted three rounds ago.

    Four steps are sealed and counted; two more are made before the outcome is taken.
    """
    settings = settings_of(every=4, sync={"overlap_steps": 2})
    run = ScriptedRun(settings, iter(["passed thrice", "counted"]))
    model = Weights(16.0)
    optimizer = sgd(model)
    with (
        caplog.at_level(logging.INFO, logger="atoll"),
        join_exchange(model, optimizer, run, island=ISLAND),
    ):
        train(model, optimizer, steps=6)

    assert "1 counted" in caplog.text
    assert "2 dropped after missed rounds" in caplog.text
