"""Constants on a disk are there whole, or not there, whenever the process dies."""

from __future__ import annotations

import numpy as np
import pytest

from atoll.errors import CorruptError, UsageError
from atoll.journal import Journal
from atoll.journal.constants import name_of
from atoll.simulate import ProcessDead, SimDisk
from atoll.weights import FragmentState
from atoll.wire import blake3_digest
from tests.exchange.constant_samples import BASE, MODEL, SPECS, TABLE, constant
from tests.journal.runs import NESTEROV, RUN, Framed, a_created

BASE_SPEC, TABLE_SPEC, _ = SPECS


def found_frames() -> list[Framed]:
    """Return the first weights of the one fragment."""
    state = FragmentState.found(np.zeros(3, np.float32), "nesterov")
    return [state.to_frame(run=RUN, fragment=0, outer=NESTEROV)]


def test_a_crash_at_any_moment_leaves_a_whole_constant_or_none() -> None:
    """What a record names is whole after every crash; a draft is gone."""
    call = 0
    while True:
        call += 1
        disk = SimDisk()
        journal = Journal.create(disk, a_created())
        disk.crash_at(disk.calls + call)
        try:
            for first in (0, 20, 40):
                journal.constants.take(BASE_SPEC, first, BASE[first : first + 20])
        except ProcessDead:
            disk.crash_at(0)
            disk.crash(is_power_cut=True)
            again = Journal.open(disk).constants
            assert set(disk.names("constants/")) == {name_of(d) for d in again.complete}
            for _ in again.complete:
                assert b"".join(again.parts(BASE_SPEC)) == BASE
            again.store(BASE_SPEC, [BASE])
            assert again.complete == {BASE_SPEC.digest}
            continue
        break
    assert call > 6


def test_a_part_counts_once_and_in_its_place() -> None:
    """Repeated, early or empty ones change nothing; one draft is there at a time."""
    files = Journal.create(SimDisk(), a_created()).constants
    assert files.take(BASE_SPEC, 0, BASE[:16]) == 16
    assert files.take(BASE_SPEC, 0, BASE[:16]) == 16
    assert files.take(BASE_SPEC, 32, BASE[32:]) == 16
    assert files.take(BASE_SPEC, 0, b"") == 16
    assert files.take(TABLE_SPEC, 0, TABLE) == len(TABLE)
    assert files.take(BASE_SPEC, 16, BASE[16:]) == 0  # its draft had to go
    files.store(BASE_SPEC, [BASE[:40], BASE[40:]])

    assert files.take(BASE_SPEC, 7, b"whatever") == len(BASE)
    assert b"".join(files.parts(BASE_SPEC, 44)) == BASE[44:]


def test_what_is_not_the_constant_is_forgotten() -> None:
    """Another digest, too many bytes and too few leave nothing on the disk."""
    disk = SimDisk()
    files = Journal.create(disk, a_created()).constants
    with pytest.raises(CorruptError, match="'base' does not have the digest"):
        files.store(BASE_SPEC, [BASE[::-1]])
    with pytest.raises(UsageError, match="'base' has 48 bytes, and 9 more come"):
        files.store(BASE_SPEC, [BASE[:40], BASE[:9]])
    with pytest.raises(CorruptError, match="40 bytes came of 'base', which has 48"):
        files.store(BASE_SPEC, [BASE[:40]])

    assert disk.names("constants/") == []
    assert files.complete == set()


def test_a_constant_that_is_gone_is_told() -> None:
    """A run that has lost a file says so, and does not say that it keeps it."""
    disk = SimDisk()
    journal = Journal.create(disk, a_created())
    for spec, values in ((BASE_SPEC, BASE), (TABLE_SPEC, TABLE)):
        journal.constants.store(spec, [values])
    journal.found(MODEL, found_frames())
    disk.remove(name_of(BASE_SPEC.digest))
    again = Journal.open(disk)

    assert again.constants.complete == {TABLE_SPEC.digest}
    (said,) = again.damage
    assert said.startswith("The constant 'base' is not in constants/")


def test_what_another_model_brought_goes() -> None:
    """Only the constants of the run's own model stay, and a restart misses none."""
    disk = SimDisk()
    journal = Journal.create(disk, a_created())
    other = constant("other", b"12345678", "int64", 1)
    journal.constants.store(other, [b"12345678"])
    journal.constants.store(BASE_SPEC, [BASE])
    journal.constants.keep_only([BASE_SPEC.digest])
    journal.found(MODEL, found_frames())

    assert disk.names("constants/") == [name_of(BASE_SPEC.digest)]
    assert Journal.open(disk).damage == []
    assert blake3_digest(BASE).hex() == BASE_SPEC.digest
