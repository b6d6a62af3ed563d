"""The key of a run's receipts, and records that no coordinator can have meant."""

from __future__ import annotations

import pytest

from atoll.errors import CorruptError, UsageError
from atoll.journal import Journal
from atoll.journal.encoding import encode
from atoll.journal.records import (
    RecoveredRecord,
)
from atoll.journal.replay import MAX_LOST_ROUNDS
from atoll.simulate.world import SimDisk
from tests.journal.golden import FILES, golden_run
from tests.journal.test_golden import stored

NAME = "receipts.key"


def test_a_run_keeps_its_key() -> None:
    """Every opening finds the key that the first one has made."""
    run = golden_run()

    assert len(run.journal.receipt_key) == 32
    assert Journal.open(run.disk).receipt_key == run.journal.receipt_key
    assert golden_run().journal.receipt_key != run.journal.receipt_key


def test_a_journal_from_before_there_were_receipts_gets_a_key() -> None:
    """What 0.1.0 has written opens, and has the same key from then on."""
    disk = stored(FILES[0])
    assert NAME not in disk.names("")
    key = Journal.open(disk).receipt_key

    assert Journal.open(disk).receipt_key == key


def test_a_damaged_key_is_named() -> None:
    """Every bit counts, and so does the length: another key would know no receipt."""
    run = golden_run()
    data = run.disk.read(NAME)
    damaged = [data[:-1], data + b"\0", b""]
    damaged += [_flipped(data, bit) for bit in range(0, 8 * len(data), 5)]
    for each in damaged:
        run.disk.remove(NAME)
        run.disk.write_new(NAME, [each])
        with pytest.raises(CorruptError, match=r"receipts\.key is damaged.*Restore"):
            Journal.open(run.disk)


def _flipped(data: bytes, bit: int) -> bytes:
    flipped = bytearray(data)
    flipped[bit // 8] ^= 1 << bit % 8
    return bytes(flipped)


@pytest.mark.parametrize("round", [2**40, 2**64 - 1])
def test_a_recovery_to_a_round_that_cannot_have_been_is_named(round: int) -> None:
    """0.1.0 wrote such a record for any island: it is not counted to, but told."""
    run = golden_run()
    record = RecoveredRecord(fragment=0, round=round, digest=bytes(16))
    with pytest.raises(UsageError, match=f"no run loses more than {MAX_LOST_ROUNDS}"):
        run.journal.recorded.require(record)
    run.journal._log.append(encode(record))
    run.journal._log.sync()

    with pytest.raises(CorruptError, match=rf"to {round}: no run loses.*0\.1\.0"):
        Journal.open(run.disk)


def test_an_empty_disk_has_a_key_before_it_has_a_log() -> None:
    """A crash in between leaves a key, which the run then takes."""
    disk = SimDisk()
    before = golden_run()
    disk.write_new(NAME, [before.disk.read(NAME)])
    created = before.journal.recorded.created
    assert created is not None

    assert Journal.create(disk, created).receipt_key == before.journal.receipt_key
