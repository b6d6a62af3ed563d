"""Departing updates that are written ahead of the record that makes them count."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from atoll.disk import SystemDisk
from atoll.errors import DiskFull, UsageError
from atoll.simulate.world import SimDisk
from tests.journal.runs import LARGE, SMALL, Run, a_departing, an_agreed
from tests.journal.stories import NoRoom


def values(run: Run, island: str = "a") -> list[float]:
    """Return the elements of what is staged for round 1 of the first fragment."""
    return run.journal.staged(0, 1, island)[1].view("f4").tolist()  # type: ignore[no-any-return]


def test_a_draft_is_not_there_before_it_is_staged() -> None:
    """No record names it: the journal says nothing of it, its next owner removes it."""
    disk = SimDisk()
    run = Run(disk).start()
    run.draft(0, "a")
    assert len(disk.names("departing/")) == 1

    assert run.journal.recorded.staged == {}
    with pytest.raises(UsageError, match="No departing update of island 'a'"):
        run.journal.staged(0, 1, "a")
    run.reopen()
    assert run.journal.recorded.staged == {}
    assert disk.names("departing/") == []


def test_what_was_drafted_is_staged_by_its_record_alone() -> None:
    """An append and a sync are left: the file is there, and is not written again."""
    disk = SimDisk()
    run = Run(disk).start()
    run.draft(0, "a")
    run.draft(0, "a")
    calls = disk.calls
    run.stage(0, "a")

    assert disk.calls == calls + 2
    disk.crash(is_power_cut=True)
    assert values(run.reopen()) == [1.0, 1.0, 1.0]


def test_a_draft_gives_way_to_what_is_staged() -> None:
    """Whatever was written ahead, what counts is what the record was written for."""
    disk = SimDisk()
    run = Run(disk).start()
    run.draft(0, "a", value=2.0)
    run.draft(0, "a", value=3.0)
    run.stage(0, "a")

    disk.crash(is_power_cut=True)
    assert values(run.reopen()) == [1.0, 1.0, 1.0]


def test_a_draft_changes_nothing_that_is_staged() -> None:
    """A second update of an island is drafted in vain, in this life and the next."""
    run = Run(SimDisk()).start()
    run.stage(0, "a")
    run.draft(0, "a", value=2.0)
    assert values(run) == [1.0, 1.0, 1.0]

    run.reopen()
    run.draft(0, "a", value=2.0)
    assert values(run) == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("seed", range(24))
def test_a_draft_replaces_nothing_that_a_failed_record_may_name(seed: int) -> None:
    """A record that failed comes back after a power cut with its own file, or never."""
    inner = SimDisk(rng=random.Random(seed))
    disk = NoRoom(inner, share=1.0)
    run = Run(disk).start()
    run.draft(0, "a")
    disk.is_full = True
    with pytest.raises(DiskFull):
        run.stage(0, "a")
    disk.is_full = False
    run.draft(0, "a", value=2.0)

    inner.crash(is_power_cut=True)
    run.reopen()
    if run.journal.recorded.staged:
        assert values(run) == [1.0, 1.0, 1.0]


def test_drafts_go_with_their_round() -> None:
    """One of a round that is over is not made; one made before is collected."""
    disk = SimDisk()
    run = Run(disk).start()
    run.draft(0, "a")
    late = a_departing(0, 1, "b")
    run.commit(0)
    run.journal.draft(*late)
    assert len(disk.names("departing/")) == 1

    run.journal.compact(0)
    assert disk.names("departing/") == []
    # Round 2 is open, and its names are others.
    run.draft(0, "a")
    run.stage(0, "a")
    assert len(disk.names("departing/")) == 1


def test_only_departing_updates_of_the_run_are_drafted() -> None:
    """A frame of another kind, or of a fragment that is not there, is refused."""
    run = Run(SimDisk()).start()

    with pytest.raises(UsageError, match="takes its departing frame"):
        run.journal.draft(*an_agreed(run.states[0], 0))
    with pytest.raises(UsageError, match="7"):
        run.journal.draft(*a_departing(7, 1, "a"))


def test_threads_that_draft_and_stage_one_update_make_one_file(tmp_path: Path) -> None:
    """Whoever comes first writes it; the others find it, and one record names it."""
    disk = SystemDisk(tmp_path)
    run = Run(disk, sizes=(SMALL, LARGE)).start()
    with ThreadPoolExecutor(8) as threads:
        drafts = [threads.submit(run.draft, 0, "a", 1.0 + n % 2) for n in range(16)]
        run.stage(0, "a")
        for each in drafts:
            each.result()

    assert values(run) == [1.0, 1.0, 1.0]
    disk.close()
    run.disk = disk = SystemDisk(tmp_path)
    assert values(run.reopen()) == [1.0, 1.0, 1.0]
    assert len(disk.names("departing/")) == 1
    disk.close()
