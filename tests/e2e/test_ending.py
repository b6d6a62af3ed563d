"""A loop ends by itself, when an operator says so, and when its machine does."""

from __future__ import annotations

import signal
import subprocess
import time

import pytest

from atoll.island.signals import SAME_SIGNAL_S
from atoll.testing import Link
from tests.e2e.rounds_again import ended_well
from tests.e2e.stage import QUICK, Stage, settings_for, until

BOUND_S = 40.0
"""What an island that leaves may take, and a busy machine."""

WHOLE = {"sync_every": 10, "num_fragments": 1, "overlap_steps": 2}


@pytest.mark.torch
@pytest.mark.parametrize("why", ["end_rounds", "stop", "SIGTERM"])
def test_the_plain_loop_ends_with_status_0(stage: Stage, why: str) -> None:
    """At the last round, by `control stop` and on SIGTERM, and says nothing of it."""
    rounds = 10 if why == "end_rounds" else 100_000
    stage.settings = {**settings_for(1, rounds), "sync": WHOLE}
    stage.serve()
    island = stage.plain_loop("a")
    stage.until_committed(3)
    if why == "stop":
        assert stage.ask("POST", "/control/stop", {}).status == 200
    if why == "SIGTERM":
        island.signal(signal.SIGTERM)
    island.ends_well()
    status = stage.status()
    stage.close_coordinator()

    assert stage.events("island_left", island="a")
    assert (status["state"] == "ended") == (why != "SIGTERM")
    assert island.log.read_text() == ""


def test_who_is_terminated_takes_all_its_work_to_the_run(stage: Stage) -> None:
    """What it learnt since its last seal counts, too; the other goes on alone."""
    stage.settings = settings_for(2, 12)
    stage.serve()
    _, b = (stage.island(name, step_s=0.02) for name in "ab")
    stage.until_committed(3)
    b.signal(signal.SIGTERM)
    begun_s = time.monotonic()
    b.ends_well()
    stage.tell(f"SIGTERM to the exit: {time.monotonic() - begun_s:.2f} s")
    _, reports = ended_well(stage)

    assert [reports[name]["why"] for name in "ab"] == ["ended", "terminated"]


def test_who_is_terminated_while_nobody_answers_goes_within_its_bound(
    stage: Stage,
) -> None:
    """5 s to heed it, 20 s for a farewell: then out, with what the loop has done.

    a is refused every connection; from b's, nothing comes back at all.
    """
    stage.settings = settings_for(2, 1000)
    stage.serve()
    with Link(("127.0.0.1", stage.port)) as link:
        a = stage.island("a", step_s=0.02)
        b = stage.island("b", step_s=0.02, url=stage.url_at(link.address))
        stage.until_committed(2)
        link.cut()
        stage.kill()
        for island in (a, b):
            island.signal(signal.SIGTERM)
        begun_s = time.monotonic()
        for island in (a, b):
            assert island.wait()["why"] == "terminated"
            assert "leaves without telling the run" in island.log.read_text()
        took_s = time.monotonic() - begun_s

    stage.tell(f"SIGTERM to the exit, with nobody to tell: {took_s:.1f} s")
    assert took_s < BOUND_S


def test_a_second_sigterm_ends_it_at_once(stage: Stage) -> None:
    """Whoever asks twice is obeyed, farewell or not."""
    stage.settings = settings_for(1, 1000)
    stage.serve()
    island = stage.island("a", step_s=0.02)
    stage.until_committed(2)
    stage.kill()
    island.signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        island.process.wait(SAME_SIGNAL_S + 1.0)  # it says farewell to nobody
    island.signal(signal.SIGTERM)

    assert island.process.wait(10.0) == -signal.SIGTERM


def test_an_operator_ends_a_run_of_two(stage: Stage) -> None:
    """Both end at the round that was the furthest, with one anchor."""
    stage.settings = {**QUICK, "run": {"name": "stage", "start_islands": 2}}
    stage.serve()
    for name in "ab":
        stage.island(name)
    stage.until_committed(3)
    stage.ask("POST", "/control/stop", {})
    until("the end", lambda: stage.status()["state"] == "ended")
    _, reports = ended_well(stage)

    assert [each["why"] for each in reports.values()] == ["ended", "ended"]
