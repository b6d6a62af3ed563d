"""An island that dies, or stands still, costs the others neither round nor work."""

from __future__ import annotations

import signal
import time
from functools import partial

import pytest

from atoll.testing import Link
from tests.e2e.rounds_again import ended_well
from tests.e2e.stage import Stage, settings_for, until

KILLED_S = 10.0
"""From a closed connection to the next commit: one second, and a busy machine."""


def next_commit_s(stage: Stage, begun_s: float) -> float:
    """Return how long after a moment both fragments have committed once more."""
    last = stage.committed()
    until("the next commit", lambda: stage.committed() > last)
    return time.monotonic() - begun_s


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_killed_island_holds_nobody_up(stage: Stage, when: str) -> None:
    """It dies before or after its upload; the others commit; it comes back at once.

    b is the slowest, so that what c has staged waits for b.
    """
    stage.settings = settings_for(3, 15)
    stage.serve()
    paces = {"a": 0.02, "b": 0.04, "c": 0.02}
    a, b, c = (stage.island(name, step_s=step_s) for name, step_s in paces.items())
    stage.until_committed(3)
    if when == "after":
        staged = stage.until_event("update_staged", island="c", round=5)
    c.kill()
    took_s = next_commit_s(stage, time.monotonic())
    again_c = stage.island("c", step_s=0.02)
    stage.until_event("island_joined", island="c", incarnation=2)
    ended_well(stage, a, b, again_c)

    stage.tell(f"SIGKILL {when} the upload to the others' next commit: {took_s:.2f} s")
    assert took_s < KILLED_S
    if when == "after":
        where = {"fragment": staged["fragment"], "round": 5}
        assert stage.until_event("round_committed", **where)["counted"] == 3
    assert stage.events("island_silent", island="a") == []


def test_an_island_killed_in_the_middle_of_its_upload_holds_nobody_up(
    stage: Stage,
) -> None:
    """Half of 400 KB is there when it dies; nothing of that counts."""
    stage.settings = settings_for(3, 6)
    stage.serve()
    with Link(("127.0.0.1", stage.port), rate_bytes_per_s=(200_000.0, None)) as link:
        island = partial(stage.island, elements=100_000, step_s=0.02)
        a = island("a")
        stage.until_event("run_founded")
        b = island("b")
        c = island("c", url=stage.url_at(link.address))
        stage.until_event("island_joined", island="c")
        assert link.wait_carried(link.bytes_up + 200_000)
        assert stage.events("update_staged", island="c") == []
        c.kill()
        took_s = next_commit_s(stage, time.monotonic())
        again_c = island("c")
        ended_well(stage, a, b, again_c)

    stage.tell(f"SIGKILL during the upload to the others' next commit: {took_s:.2f} s")
    assert took_s < KILLED_S


def test_an_island_that_was_stopped_beyond_its_lease_carries_its_work(
    stage: Stage,
) -> None:
    """The others go on without it after 15 s; then its work counts, once."""
    stage.settings = settings_for(3, 1000)
    stage.serve()
    a, b, c = (stage.island(name, step_s=0.1) for name in "abc")
    stage.until_committed(2)
    c.signal(signal.SIGSTOP)
    stopped_s = time.monotonic()
    stage.until_event("island_silent", island="c")
    silent_s = time.monotonic() - stopped_s
    next_commit_s(stage, stopped_s)
    c.signal(signal.SIGCONT)
    stage.until_event("island_returned", island="c")
    after = stage.committed() + 2
    stage.until_committed(after)
    stage.ask("POST", "/control/stop", {})
    ended_well(stage, a, b, c)

    stage.tell(f"SIGSTOP to silence: {silent_s:.1f} s")
    assert stage.events("island_joined", island="c", incarnation=2) == []


def test_an_island_without_a_processor_for_five_seconds_is_not_evicted(
    stage: Stage,
) -> None:
    """Its lease outlives that; the others miss it for one round at most."""
    stage.settings = settings_for(2, 1000)
    stage.serve()
    a, c = (stage.island(name, step_s=0.02) for name in "ac")
    stage.until_committed(6)
    c.signal(signal.SIGSTOP)
    begun_s, before = time.monotonic(), stage.committed()
    took_s = next_commit_s(stage, begun_s)
    until("five seconds", lambda: time.monotonic() - begun_s > 5.0)
    missed = stage.committed() - before
    c.signal(signal.SIGCONT)
    stage.until_committed(stage.committed() + 3)
    stage.ask("POST", "/control/stop", {})
    ended_well(stage, a, c)

    stage.tell(
        f"SIGSTOP to the other's next commit, its pace being known: {took_s:.2f} s"
    )
    assert missed <= 2
    assert stage.events("island_silent") == []
    assert stage.events("island_joined", incarnation=2) == []
