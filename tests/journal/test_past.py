"""Rounds that are over: every anchor that the journal leads to, bit for bit."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from atoll.disk import SystemDisk
from atoll.errors import CorruptError, UsageError
from atoll.simulate.world import SimDisk
from atoll.wire import PIECE_ELEMENTS, OuterValues
from tests.journal.runs import LARGE, NESTEROV, SMALL, Run

PIECES = 2 * PIECE_ELEMENTS + 4097
ADAM = OuterValues(optimizer="adam", lr=2.0**-7, momentum=0.875)


def anchor(run: Run, fragment: int, round: int) -> bytes:
    """Return an anchor as the journal gives it."""
    pieces = list(run.journal.past.anchor(fragment, round))
    assert all(len(piece) <= PIECE_ELEMENTS for piece in pieces)
    return b"".join(piece.tobytes() for piece in pieces)


def commit(run: Run, rounds: int, *, fragment: int = 0) -> None:
    for number in range(rounds):
        run.commit(fragment, value=2.0 ** -(20 + number % 3), down="bf16")


def damage(disk: SimDisk, name: str) -> None:
    """Change one bit of the last byte of a file."""
    data = bytearray(disk.read(name))
    data[-1] ^= 1
    disk.remove(name)
    disk.write_new(name, [data])


@pytest.mark.parametrize("size", [1, SMALL, LARGE, PIECES])
@pytest.mark.parametrize("outer", [NESTEROV, ADAM], ids=lambda each: each.optimizer)
def test_every_round_since_the_older_state_can_be_had(
    size: int, outer: OuterValues
) -> None:
    """States, rounds between and after them, and void ones: the bits of that time."""
    run = Run(SimDisk(), sizes=(size,), outer=outer).start()
    for _ in range(3):  # states are kept of rounds 4 and 6, and means from 5 on
        commit(run, 1)
        run.commit(0, is_void=True)
        run.journal.compact(0)
    commit(run, 2)

    assert run.journal.past.rounds() == [4, 5, 6, 7, 8]
    for round in run.journal.past.rounds():
        assert anchor(run, 0, round) == run.after[0, round][1], round


def test_before_any_compaction_every_round_is_there() -> None:
    """From the founding on; after a restart too."""
    run = Run(SimDisk()).start()
    commit(run, 3)
    commit(run, 2, fragment=1)
    run.reopen()

    assert run.journal.past.rounds_of(0) == [0, 1, 2, 3]
    assert run.journal.past.rounds() == [0, 1, 2]
    for fragment, round in ((0, 0), (0, 3), (1, 1)):
        assert anchor(run, fragment, round) == run.after[fragment, round][1]


def test_a_round_that_is_not_kept_is_refused_by_name() -> None:
    """The message has the rounds that are there."""
    run = Run(SimDisk(), sizes=(SMALL,)).start()
    for _ in range(2):
        commit(run, 3)
        run.journal.compact(0)

    with pytest.raises(UsageError, match=r"Round 2 of .* Kept are \[3, 4, 5, 6\]"):
        anchor(run, 0, 2)
    with pytest.raises(UsageError, match="Round 7 of fragment 0"):
        anchor(run, 0, 7)


def test_a_damaged_state_is_done_without() -> None:
    """While an older one leads to the round; if none does, nothing is given."""
    disk = SimDisk()
    run = Run(disk, sizes=(LARGE,)).start()
    for _ in range(2):
        commit(run, 2)
        run.journal.compact(0)
    damage(disk, "states/0/4")

    assert anchor(run, 0, 4) == run.after[0, 4][1]
    damage(disk, "states/0/2")
    given: list[np.ndarray] = []
    with pytest.raises(CorruptError, match="states/0/2 is damaged"):
        given.extend(run.journal.past.anchor(0, 4))
    assert given == []


def test_a_mean_that_was_changed_gives_nothing() -> None:
    """Its bytes are verified before the first piece of the anchor is given."""
    disk = SimDisk()
    run = Run(disk, sizes=(LARGE,)).start()
    run.commit(0)
    run.commit(0)
    damage(disk, "means/0/1")
    given: list[np.ndarray] = []

    with pytest.raises(CorruptError, match="means/0/1 is damaged"):
        given.extend(run.journal.past.anchor(0, 2))
    assert given == []


def test_memory_holds_a_few_pieces(tmp_path: Path) -> None:
    """However large the state is: 32 MB of it take less than 16 MB, and change it not.

    A piece of anchor, velocity and mean is 3 MB; a few of them are alive at once.
    """
    disk = SystemDisk(tmp_path)
    run = Run(disk, sizes=(16 * PIECE_ELEMENTS,)).start()
    commit(run, 3)
    names = {name: len(disk.read(name)) for name in disk.names("")}
    tracemalloc.start()
    for _ in run.journal.past.anchor(0, 2):
        pass
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    after = {name: len(disk.read(name)) for name in disk.names("")}
    disk.close()

    assert peak < 16e6
    assert after == names
