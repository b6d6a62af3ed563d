"""The coordinator may be killed at any instant: nothing is lost, nothing counts twice.

Every test does all rounds of its run again from the rosters in the journal and from
what islands have sent, and compares the anchor to the bit.
"""

from __future__ import annotations

import signal
import time
from functools import partial

import pytest

from atoll.testing import Link
from tests.e2e.rounds_again import ended_well
from tests.e2e.stage import Stage, settings_for

ROUNDS = 42
"""States are written every ten rounds: the last life ends after the fourth time."""

# Where a life of the coordinator ends, one life after the other.
LIVES = {
    "founding": [
        "write_new log/:1:during",
        "write_new log/:1:after",
        "append log/:1:during",
        "write_new states/1:1:during",
        "write_new states/1:1:after",
        "sync log/:1:before",
        "append log/:2:after",
    ],
    "committing": [
        "append bodies/:1:during",
        "sync bodies/:2:before",
        "append log/:4:during",
        "sync log/:3:after",
        "append log/:1:after",
    ],
    "compacting": [
        "write_new states/:3:during",  # the first two are the founder's
        "write_new states/:1:after",
        "remove states/:2:before",  # the state before; the first makes room
        "remove states/:2:after",
    ],
}


@pytest.mark.parametrize("lives", LIVES.values(), ids=list(LIVES))
def test_a_coordinator_that_dies_at_its_disk_loses_nothing(
    stage: Stage, lives: list[str]
) -> None:
    """It dies before, during and after a change, again and again, and goes on."""
    stage.settings = settings_for(2, ROUNDS)
    for point in lives:
        if stage.serve(dies_at=point) and not stage.islands:
            for name in "ab":
                stage.island(name)
        begun_s = time.monotonic()
        stage.died()
        stage.tell(f"{point}: died after {time.monotonic() - begun_s:.1f} s")
    stage.serve()
    again, _ = ended_well(stage)

    assert again.rounds == [ROUNDS, ROUNDS]


def test_a_coordinator_that_dies_during_an_upload_gets_it_again(stage: Stage) -> None:
    """Half of 400 KB is there when it dies, and again in its next life."""
    stage.settings = settings_for(2, 3)
    stage.serve()
    with Link(("127.0.0.1", stage.port), rate_bytes_per_s=(200_000.0, None)) as link:
        island = partial(stage.island, elements=100_000, step_s=0.02)
        island("a")
        stage.until_event("run_founded")
        island("b", url=stage.url_at(link.address))
        stage.until_event("island_joined", island="b")
        for _ in range(2):
            assert link.wait_carried(link.bytes_up + 200_000)
            stage.kill()
            stage.serve()
        again, _ = ended_well(stage)

    assert again.counted == {"a": 6, "b": 6}


def test_an_island_that_leaves_while_the_coordinator_dies_counts_once(
    stage: Stage,
) -> None:
    """Its departing updates are flushed or sent again, whatever happens in between."""
    stage.settings = settings_for(2, 12)
    stage.serve(dies_at="write_new departing/:1:during")
    _, b = stage.island("a", step_s=0.03), stage.island("b", step_s=0.03)
    stage.until_committed(3)
    b.signal(signal.SIGTERM)
    for point in ("write_new departing/:1:after", "sync log/:1:before"):
        stage.died()
        stage.serve(dies_at=point)
    stage.died()
    stage.serve()
    _, reports = ended_well(stage)

    assert reports["b"]["why"] == "terminated"
    assert reports["a"]["why"] == "ended"


def test_a_reply_that_is_lost_after_the_commit_is_one_step(stage: Stage) -> None:
    """Who asks again gets the same outcome; an upload that is repeated is the same."""
    stage.settings = settings_for(2, 12)
    stage.serve()
    with Link(("127.0.0.1", stage.port)) as link:
        stage.island("a", step_s=0.02)
        stage.island("b", url=stage.url_at(link.address), step_s=0.02)
        for round in range(2, 8):
            stage.until_event("round_committed", fragment=round % 2, round=round)
            link.close_after(0, direction="down")
        stage.until_event("update_staged", island="b", round=8)
        link.lose_replies()
        stage.until_event("round_committed", fragment=0, round=8)
        link.mend()
        again, _ = ended_well(stage)

    assert again.counted == {"a": 24, "b": 24}
