"""Islands that meet in a store and die at any moment cost the others nothing."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.bucket_stage import BucketStage
from tests.e2e.stage import settings_for, until

ELEMENTS = 600_000
"""Three pieces in each fragment, so that three islands have shards."""


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[BucketStage]:
    stage = BucketStage(tmp_path, str(tmp_path / "bucket"))
    yield stage
    stage.close()


@pytest.mark.parametrize(
    "dies_at",
    [
        pytest.param("before:/up/:13", id="before its update is there"),
        pytest.param("after:/up/:13", id="after its update is there"),
        pytest.param("before:roster:1", id="before it closes a round"),
        pytest.param("after:roster:1", id="after it has closed a round"),
        pytest.param("before:states:1", id="before it writes a state"),
        pytest.param("before:complete:1", id="before a state is complete"),
    ],
)
def test_a_killed_island_holds_nobody_up(stage: BucketStage, dies_at: str) -> None:
    """The others finish the round; a new life comes back at once and takes part.

    It is the first by name, because that one writes the states.
    """
    stage.lease_s = 10.0
    stage.make(settings_for(3, 16))
    a = stage.island("a", dies_at=dies_at)
    b, c = stage.island("b"), stage.island("c")
    until("a to die", lambda: a.process.poll() is not None)
    assert a.process.returncode == -signal.SIGKILL
    again_a = stage.island("a")

    again, reports = stage.ended_well(again_a, b, c)
    assert again.rounds == [16, 16]
    assert reports["a"]["incarnation"] == 2


@pytest.mark.parametrize("dies_at", ["before:/mean/:3", "after:/mean/:3"])
def test_an_island_that_owns_a_shard_may_die(stage: BucketStage, dies_at: str) -> None:
    """Somebody else makes the mean of its shard, and gets the same bytes."""
    stage.lease_s = 10.0
    stage.make(settings_for(4, 8))
    others = [stage.island(name, elements=ELEMENTS) for name in "abd"]
    c = stage.island("c", elements=ELEMENTS, dies_at=dies_at)
    until("c to die", lambda: c.process.poll() is not None)
    assert c.process.returncode == -signal.SIGKILL

    again, _ = stage.ended_well(*others)
    assert again.rounds == [8, 8]


def test_an_island_that_was_stopped_carries_its_work(stage: BucketStage) -> None:
    """The others go on when it is late; what it has learnt counts, once.

    One that was away for more than two rounds may have dropped some, and says so.
    """
    stage.make(settings_for(3, 30))
    a, b, c = (stage.island(name, step_s=0.05) for name in "abc")
    stage.until_closed(7)
    c.signal(signal.SIGSTOP)
    stage.until_closed(9)
    c.signal(signal.SIGCONT)

    again, _ = stage.ended_well(a, b, c, may_drop="c")
    assert again.rounds == [30, 30]
