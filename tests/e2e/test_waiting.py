"""What the run cannot do now it does later: islands wait, and keep their work."""

from __future__ import annotations

import resource
import time

import pytest

from tests.e2e.rounds_again import ended_well
from tests.e2e.stage import Stage, settings_for, until


@pytest.mark.parametrize("has_tls", [False, True], ids=["plain", "tls"])
def test_another_run_at_the_same_address_is_not_joined(
    stage: Stage, has_tls: bool
) -> None:
    """Islands wait for their own run to come back, and then go on with it."""
    stage.settings, stage.has_tls = settings_for(2, 12), has_tls
    stage.serve()
    for name in "ab":
        stage.island(name, step_s=0.02)
    stage.until_committed(3)
    stage.kill()
    other = Stage(stage.folder, name="other", port=stage.port, has_tls=has_tls)
    try:
        other.serve()
        counted = until("calls", lambda: other.status()["bytes_in"] > 20_000 or None)
        assert counted
        members = other.status()["islands"]
    finally:
        other.close()
    stage.serve()
    ended_well(stage)

    assert members == []
    assert stage.events("island_joined", incarnation=2) == []


def test_a_full_disk_makes_the_run_wait(stage: Stage) -> None:
    """No file may grow by a byte; the run goes on when files may."""
    stage.settings = settings_for(2, 12)
    stage.serve()
    for name in "ab":
        stage.island(name, step_s=0.02)
    stage.until_committed(3)
    assert stage.coordinator is not None
    no_room = (0, resource.RLIM_INFINITY)
    before = resource.prlimit(stage.coordinator.pid, resource.RLIMIT_FSIZE, no_room)
    begun_s = time.monotonic()
    until("status says why", lambda: "room" in stage.status()["why"])
    told_s = time.monotonic() - begun_s
    rounds = stage.status()["rounds"]
    until("all stand still", lambda: _stand_still(stage))
    assert stage.status()["rounds"] == rounds
    resource.prlimit(stage.coordinator.pid, resource.RLIMIT_FSIZE, before)
    ended_well(stage)

    stage.tell(f"no room to a status that says so: {told_s:.1f} s")


def _stand_still(stage: Stage) -> bool:
    """Return whether every island waits for an outcome."""
    return all(each["waits_for"] for each in stage.status()["islands"])
