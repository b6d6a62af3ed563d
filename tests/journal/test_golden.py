"""A journal that every later version must still read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from atoll.journal import (
    CountedUpdate,
    EndedRecord,
    EpochRecord,
    Journal,
)
from atoll.journal.files import load_receipt_key
from atoll.simulate.world import SimDisk
from atoll.wire import Verdict
from tests.journal.golden import (
    CREATED,
    FILES,
    MOVED_FILES,
    files_of,
    golden_run,
    moved_run,
)
from tests.journal.runs import Run, view


def stored(file: Path) -> SimDisk:
    disk = SimDisk()
    for name, text in json.loads(file.read_text()).items():
        disk.write_new(name, [bytes.fromhex(text)])
    if file not in (FILES[0], MOVED_FILES[0]):
        load_receipt_key(disk)  # which is random
    return disk


@pytest.mark.parametrize("file", FILES, ids=["v1", "v2"])
def test_the_golden_journal_says_what_it_said(file: Path) -> None:
    """Every record and every bit of the stored journal is read as it was written."""
    run = golden_run()
    recorded = Run(stored(file), after=run.after, outcomes=run.outcomes).reopen()
    found = recorded.journal.recorded

    assert view(recorded.journal) == view(run.journal)
    recorded.check()
    assert found.created == CREATED
    assert found.ended == EndedRecord(reason="drained")
    assert found.epochs == [
        EpochRecord(number=1, values={"outer.lr": 0.25, "run.end_rounds": None})
    ]
    assert {m.island: (m.incarnation, m.slot) for m in found.members.values()} == {
        "a": (2, 0),
        "tokyo é": (1, 1),
    }
    assert found.members["tokyo é"].nonce == b"once"
    assert [entry.verdict for entry in found.rosters[0, 2].entries] == [Verdict.LATE]
    # Mean 0.5, 1, 1.5 on 0, 1/8, 1/4: velocity is the mean; lr 0.5, momentum 0.875:
    # the step is 0.5 * 1.875 * mean, so 0 - 0.46875, 0.125 - 0.9375, 0.25 - 1.40625.
    state = Journal.open(stored(file)).state(0)
    assert state.anchor.tolist() == [-0.46875, -0.8125, -1.15625]
    assert state.moments[0].tolist() == [0.5, 1.0, 1.5]


def test_writing_it_again_changes_nothing() -> None:
    """This version writes the bytes that were stored."""
    assert files_of(golden_run()) == json.loads(FILES[-1].read_text())
    assert files_of(moved_run()) == json.loads(MOVED_FILES[-1].read_text())


@pytest.mark.parametrize("file", FILES, ids=["v1", "v2"])
def test_a_golden_journal_goes_on(file: Path) -> None:
    """A journal of any version opens without a report, is written on, and opens."""
    run = Run(stored(file), sizes=(3, 2)).reopen()
    assert run.journal.damage == []
    assert run.journal.cut is None

    run.commit(0)
    run.reopen()

    assert run.states[0].round == 3
    assert run.journal.damage == []


@pytest.mark.parametrize("file", MOVED_FILES, ids=["v1", "v2"])
def test_the_golden_journal_of_a_moved_run_says_what_it_said(file: Path) -> None:
    """Its last outcomes and how far islands had come are read as they were written."""
    run = moved_run()
    recorded = Run(stored(file), after=run.after, outcomes=run.outcomes).reopen()
    found = recorded.journal.recorded

    assert view(recorded.journal) == view(run.journal)
    recorded.check()
    assert found.counted == {(0, "tokyo é"): CountedUpdate(1, 20, 300)}
    assert [(each.round, each.arrived) for each in found.fragments] == [(2, 2), (1, 1)]
    assert found.is_paused
    assert found.move is not None
    assert not found.move.is_over
