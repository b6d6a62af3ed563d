"""The log: whole records in order, and an honest answer to every broken byte."""

from __future__ import annotations

import random
import struct

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.disk import Disk
from atoll.errors import CorruptError, DiskFull, UsageError
from atoll.journal.encoding import HEAD_BYTES, MARK, RECORD_BYTES
from atoll.journal.log import RecordLog
from atoll.simulate.world import SimDisk
from tests.journal.stories import NoRoom

FIRST = "log/00000001"


def a_log(*batches: list[bytes], is_sealed: bool = False) -> SimDisk:
    """Return a disk with a log: its first record, then batches, each synced."""
    disk = SimDisk()
    log = RecordLog.create(disk, b"first")
    for batch in batches:
        for payload in batch:
            log.append(payload)
        log.sync()
    if is_sealed:
        log.seal()
    return disk


def said(disk: Disk) -> list[bytes]:
    """Return what a new owner reads in a log."""
    return [payload for _, payload in RecordLog.open(disk).read_back()]


def with_file(name: str, data: bytes, disk: SimDisk | None = None) -> SimDisk:
    """Return a copy of a disk with one file that differs."""
    copy = SimDisk()
    copy.write_new(name, [data])
    for other in disk.names("") if disk else []:
        if other != name:
            copy.write_new(other, [disk.read(other)] if disk else [])
    return copy


def test_what_was_appended_is_read_in_order() -> None:
    """A log says its records in order, to its owner and to the next."""
    disk = a_log([b"a", b"", b"c" * 3_000_000], [b"d"])

    assert said(disk) == [b"first", b"a", b"", b"c" * 3_000_000, b"d"]
    assert said(disk) == [b"first", b"a", b"", b"c" * 3_000_000, b"d"]


def test_a_log_is_made_once_and_opened_when_there_is_one() -> None:
    """Making a second log, or opening none, is a usage error."""
    with pytest.raises(UsageError, match="There is no journal on this disk"):
        RecordLog.open(SimDisk())
    with pytest.raises(UsageError, match="There is a journal on this disk already"):
        RecordLog.create(a_log(), b"second")


def test_a_record_can_be_read_again_by_its_place() -> None:
    """The place that append and replay give leads back to the payload."""
    disk = a_log()
    log = RecordLog.open(disk)
    where = log.append(b"find me")
    log.append(b"not me")
    log.sync()

    assert log.read(where) == b"find me"
    places = {payload: place for place, payload in RecordLog.open(disk).read_back()}
    assert RecordLog.open(disk).read(places[b"find me"]) == b"find me"


def test_every_torn_tail_is_cut_at_a_whole_record() -> None:
    """However much of an interrupted append is there, whole records stay."""
    disk = a_log([b"promised"])
    log = RecordLog.open(disk)
    name = max(disk.names("log/"))
    before = len(disk.read(name))
    log.append(b"one")
    log.append(b"two")
    data = disk.read(name)

    for size in range(before, len(data) + 1):
        torn = with_file(name, data[:size], disk)
        # A record of three bytes takes 32 more, and its copy as many.
        expected = [b"one", b"two"][: (size - before + 35) // 70]
        assert said(torn) == [b"first", b"promised", *expected]
        assert said(torn) == [b"first", b"promised", *expected]
        log = RecordLog.open(torn)
        assert log.cut is None
        assert log.damage == []


def test_what_is_cut_is_reported_with_its_place() -> None:
    """The bytes that an interrupted append left are told to who opens the log."""
    disk = a_log([b"promised"])
    size = len(disk.read(FIRST))
    disk.append(FIRST, b"\0" * 10)

    cut = RecordLog.open(disk).cut

    assert cut == (FIRST, size, 10)
    assert f"10 bytes at the end of {FIRST}, from byte {size} on" in str(cut)


@settings(max_examples=200)
@given(lost=st.sets(st.integers(0, 40)), is_sealed=st.booleans(), size=st.integers(0))
def test_an_append_may_lose_any_of_its_sectors(
    lost: set[int], is_sealed: bool, size: int
) -> None:
    """A crash leaves sectors in any order: the record is whole, or was never there."""
    disk = a_log([b"promised"], is_sealed=is_sealed)
    log = RecordLog.open(disk)
    name = max(each for each in disk.names("log/") if not each.endswith(".end"))
    before = len(disk.read(name))
    log.append(b"x" * 9000)
    data = bytearray(disk.read(name))
    for sector in lost:
        first = max(before, 512 * sector)
        data[first : 512 * (sector + 1)] = bytes(
            max(0, min(len(data), 512 * (sector + 1)) - first)
        )
    del data[max(before, size % (2 * len(data))) :]

    found = said(with_file(name, bytes(data), disk))

    assert found[:2] == [b"first", b"promised"]
    assert found[2:] in ([], [b"x" * 9000])


def test_a_torn_copy_is_reported_as_cut() -> None:
    """A record stays without its copy; that more may have followed is told."""
    disk = a_log([b"one"])
    data = disk.read(FIRST)

    log = RecordLog.open(with_file(FIRST, data[:-10]))

    assert [payload for _, payload in log.read_back()] == [b"first", b"one"]
    assert log.cut == (FIRST, len(data) - 35, 25)


def test_a_sealed_log_with_a_torn_copy_is_not_appended_to() -> None:
    """What is written on is found again behind what a reader takes for the end."""
    disk = a_log([b"one"], is_sealed=True)
    torn = with_file(FIRST, disk.read(FIRST)[:-10], disk)
    log = RecordLog.open(torn)
    log.append(b"two")
    log.sync()

    assert torn.names("log/")[-1] == "log/00000002"
    assert said(torn) == [b"first", b"one", b"two"]


def test_a_segment_of_number_0_is_none() -> None:
    """Segments count from 1: a file of that name does not end in a crash."""
    disk = SimDisk()
    disk.write_new("log/00000000", [a_log().read(FIRST)])

    with pytest.raises(CorruptError, match="Every segment in log/ is missing"):
        RecordLog.open(disk)


def test_an_unsynced_record_that_is_lost_takes_the_later_ones_with_it() -> None:
    """A disk may lose a record and keep a later one: neither was promised."""
    disk = a_log([b"promised"], [b"promised too"])
    log = RecordLog.open(disk)
    log.append(b"one")
    name = max(disk.names("log/"))
    end = len(disk.read(name))
    log.append(b"two")
    data = disk.read(name)

    holed = with_file(name, data[: end - 70] + bytes(70) + data[end:], disk)

    assert said(holed) == [b"first", b"promised", b"promised too"]


@pytest.mark.parametrize("is_sealed", [True, False], ids=["sealed", "killed"])
def test_any_flipped_bit_is_an_error_or_corrected(is_sealed: bool) -> None:
    """No flip in the log loses a record, also in the last one before a kill."""
    disk = a_log([b"a", b"bb"], [b"ccc"], [b"dddd", b"e"], is_sealed=is_sealed)
    written = [b"first", b"a", b"bb", b"ccc", b"dddd", b"e"]
    corrected = 0
    for name in disk.names("log/"):
        whole = disk.read(name)
        for bit in range(8 * len(whole)):
            flipped = bytearray(whole)
            flipped[bit // 8] ^= 1 << bit % 8
            try:
                log = RecordLog.open(with_file(name, bytes(flipped), disk))
                found = [payload for _, payload in log.read_back()]
            except CorruptError:
                assert bit < 8 * HEAD_BYTES
                continue
            assert found == written
            corrected += bool(log.damage)

    # Everything but the head: 32 + 3 more bytes on average, and a copy, of 6 records;
    # a torn copy in the last batch is not told apart, and nothing of it is lost.
    assert corrected > 8 * 6 * 35


@pytest.mark.parametrize("batch", [[b"d"], [b"dd", b"e"]], ids=["one", "two"])
def test_a_sealed_log_cannot_lose_its_end(batch: list[bytes]) -> None:
    """However short a sealed log was cut, it is an error that names the byte."""
    disk = a_log([b"a"], batch, is_sealed=True)
    data = disk.read(FIRST)
    # Half of it is the copy of the last record, which may go.
    size = len(data) - RECORD_BYTES - len(batch[-1])

    assert said(with_file(FIRST, data[:size], disk))[-1] == batch[-1]
    for left in range(HEAD_BYTES, size):
        with pytest.raises(CorruptError, match=rf"{FIRST} is damaged at byte \d+: "):
            RecordLog.open(with_file(FIRST, data[:left], disk))


def test_an_end_that_is_not_sealed_is_proved_by_the_next_record() -> None:
    """A record that was durable when another was written cannot be torn."""
    disk = a_log([b"a"], [b"b"])
    data = bytearray(disk.read(FIRST))
    first = data.index(b"a")
    second = data.index(b"a", first + 1)
    data[first] ^= 1
    data[second] ^= 1
    # The head, and the first record of 32 + 5 bytes with its copy.
    at = HEAD_BYTES + 2 * 37

    with pytest.raises(CorruptError, match=f"{FIRST} is damaged at byte {at}"):
        RecordLog.open(with_file(FIRST, bytes(data)))


def test_a_record_that_only_its_copy_has_is_kept_and_reported() -> None:
    """Pages of one append may be lost in any order: either copy is the record."""
    disk = a_log([b"a" * 5000])
    data = bytearray(disk.read(FIRST))
    at = HEAD_BYTES + 2 * 37
    data[at : at + 4096] = bytes(4096)

    log = RecordLog.open(with_file(FIRST, bytes(data)))

    assert [payload for _, payload in log.read_back()] == [b"first", b"a" * 5000]
    (report,) = log.damage
    assert f"{FIRST} is damaged at byte {at}: 1 of its records or their" in report


def test_an_end_that_is_damaged_leaves_the_log_as_it_is() -> None:
    """What proves the end is not needed while the log is whole; it is reported."""
    disk = a_log([b"a"], is_sealed=True)
    name = f"{FIRST}.end"
    for change in (lambda data: data[:-1], lambda data: b"", lambda data: data[::-1]):
        log = RecordLog.open(with_file(name, change(disk.read(name)), disk))
        assert [payload for _, payload in log.read_back()] == [b"first", b"a"]
        assert log.damage == [
            f"{name} is damaged: nothing in it verifies. It only repeats where the log "
            "ended."
        ]
        log.seal()


def test_noise_behind_an_end_does_not_hide_the_next() -> None:
    """An entry behind one that a crash interrupted counts."""
    disk = a_log([b"a"], is_sealed=True)
    name = f"{FIRST}.end"
    disk.append(name, disk.read(name)[:20])
    log = RecordLog.open(disk)
    log.append(b"b")
    log.sync()
    log.seal()
    data = disk.read(FIRST)

    assert disk.names("log/") == [FIRST, name]
    with pytest.raises(CorruptError, match=f"{FIRST} is damaged at byte"):
        RecordLog.open(with_file(FIRST, data[: len(data) - 66], disk))


def test_another_record_than_the_durable_one_is_damage() -> None:
    """A log that was put back to a copy and went on is not taken for the first."""
    disk, other = a_log([b"a"], is_sealed=True), a_log([b"b"])
    at = HEAD_BYTES + 2 * 37

    with pytest.raises(
        CorruptError, match=rf"{FIRST} is damaged at byte {at}: record 2 is not the"
    ):
        RecordLog.open(with_file(FIRST, other.read(FIRST), disk))


def test_a_clean_end_is_gone_on_with() -> None:
    """A sealed log goes on in its segment; one that is not, in the next."""
    sealed, killed = a_log([b"a"], is_sealed=True), a_log([b"a"])
    RecordLog.open(sealed)
    RecordLog.open(killed)

    assert sealed.names("log/") == [FIRST, f"{FIRST}.end"]
    assert killed.names("log/") == [FIRST, "log/00000002"]


@pytest.mark.parametrize("gone", [FIRST, "log/00000002"])
def test_a_missing_segment_whose_end_is_known_is_named(gone: str) -> None:
    """Also the last one, and the only one."""
    disk = a_log([b"a"])
    if gone != FIRST:
        log = RecordLog.open(disk)
        log.append(b"b")
        log.sync()
        log.seal()
    else:
        RecordLog.open(disk).seal()
    disk.remove(gone)

    with pytest.raises(CorruptError, match=f"{gone} is missing"):
        RecordLog.open(disk)


def test_a_log_without_segments_is_no_new_one() -> None:
    """What is left of a log that was removed is damage."""
    disk = a_log([b"a"], is_sealed=True)
    disk.remove(FIRST)

    with pytest.raises(CorruptError, match="Every segment in log/ is missing"):
        RecordLog.open(disk)


def test_damage_before_the_tail_names_segment_and_byte() -> None:
    """What was promised and is broken is an error with the place and the way out."""
    disk = a_log([b"a" * 100], [b"b"], [b"c"])
    data = bytearray(disk.read(FIRST))
    # The head, and the first record of 32 + 5 bytes, twice.
    at = HEAD_BYTES + 2 * (RECORD_BYTES + 5)
    data[at + 50] ^= 1
    data[at + 50 + RECORD_BYTES + 100] ^= 1

    with pytest.raises(
        CorruptError, match=rf"{FIRST} is damaged at byte {at}: .* Restore the file"
    ):
        RecordLog.open(with_file(FIRST, bytes(data)))


def test_damage_in_an_earlier_segment_is_found() -> None:
    """A segment that another one follows must be whole up to where it counts."""
    disk = a_log([b"a" * 100])
    RecordLog.open(disk).append(b"later")
    disk.sync("log/00000002")
    data = bytearray(disk.read(FIRST))
    data[-1] ^= 1
    log = RecordLog.open(with_file(FIRST, bytes(data), disk))
    # `a` counts in the second segment: the first one ends with its first record.
    assert len(list(log.read_back())) == 3
    assert log.damage == []

    data[HEAD_BYTES + RECORD_BYTES] ^= 1
    log = RecordLog.open(with_file(FIRST, bytes(data), disk))
    assert len(list(log.read_back())) == 3
    assert len(log.damage) == 1

    data[HEAD_BYTES + 37 + RECORD_BYTES] ^= 1
    log = RecordLog.open(with_file(FIRST, bytes(data), disk))
    with pytest.raises(CorruptError, match=f"{FIRST} is damaged at byte {HEAD_BYTES}"):
        list(log.read_back())


@pytest.mark.parametrize("is_last", [True, False], ids=["last", "earlier"])
def test_a_whole_record_in_the_wrong_place_is_damage(is_last: bool) -> None:
    """Records are numbered, so that a copied one is not taken for another."""
    disk = a_log([b"other"], [b"third"])
    if not is_last:
        RecordLog.open(disk)
    data = disk.read(FIRST)
    first, second, third = HEAD_BYTES, HEAD_BYTES + 74, HEAD_BYTES + 148
    copied = data[:second] + data[first:second] + data[third:]

    with pytest.raises(CorruptError, match=f"{FIRST} is damaged at byte {second}"):
        said(with_file(FIRST, copied, disk))


def test_a_missing_segment_is_named() -> None:
    """A hole in the chain is an error, not a shorter recorded."""
    disk = a_log([b"a"])
    RecordLog.open(disk)
    disk.remove(FIRST)

    with pytest.raises(CorruptError, match=f"{FIRST} is missing"):
        RecordLog.open(disk)


def test_a_segment_that_was_given_up_does_not_count() -> None:
    """A segment that was written although that failed is skipped and swept."""
    inner = SimDisk()
    disk = NoRoom(inner, failing=(3, 4), share=1.0)
    log = RecordLog.create(disk, b"first")
    log.append(b"a")
    with pytest.raises(DiskFull):
        log.sync()  # so that the next segment is needed
    with pytest.raises(DiskFull):
        log.sync()  # and this is written, and said to have failed
    log.append(b"b")
    log.sync()

    assert inner.names("log/") == [FIRST, "log/00000002", "log/00000003"]
    reopened = RecordLog.open(inner)
    assert [payload for _, payload in reopened.read_back()] == [b"first", b"a", b"b"]
    reopened.sweep()
    assert "log/00000002" not in inner.names("log/")
    assert said(inner) == [b"first", b"a", b"b"]


def test_what_was_withdrawn_does_not_come_back() -> None:
    """Once something else has been recorded, a withdrawn record is gone for good."""
    disk = a_log()
    log = RecordLog.open(disk)
    log.append(b"kept")
    log.append(b"withdrawn")
    log.withdraw(2)
    log.append(b"next")
    log.sync()

    assert said(disk) == [b"first", b"kept", b"next"]


def test_another_version_is_refused_by_name() -> None:
    """A log of a later format is not guessed at."""
    data = bytearray(a_log().read(FIRST))
    data[4:6] = struct.pack("<H", 3)
    data[48:56] = struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(data[:48])))

    with pytest.raises(
        CorruptError, match=r"version 3 of the log's format.* versions 1 and 2"
    ):
        RecordLog.open(with_file(FIRST, bytes(data)))


def test_a_head_that_contradicts_itself_is_refused() -> None:
    """A chain that leads in a circle, or forward, is damage."""
    data = bytearray(a_log().read(FIRST))
    data[16:24] = struct.pack("<Q", 1)  # the previous segment is itself
    data[48:56] = struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(data[:48])))

    with pytest.raises(CorruptError, match="contradicts its own head"):
        RecordLog.open(with_file(FIRST, bytes(data)))


@given(tail=st.binary(max_size=200), is_marked=st.booleans())
def test_noise_behind_a_log_is_cut(tail: bytes, is_marked: bool) -> None:
    """Whatever stands behind the last record, the log before it is what it was."""
    disk = a_log([b"a"])
    disk.append(FIRST, MARK + tail if is_marked else tail)

    assert said(disk) == [b"first", b"a"]


@given(noise=st.binary(max_size=300))
def test_noise_instead_of_a_log_is_corrupt(noise: bytes) -> None:
    """Bytes that no log wrote are refused, and nothing but CorruptError is raised."""
    with pytest.raises(CorruptError):
        said(with_file(FIRST, noise))


def test_bytes_made_to_look_like_records_do_not_keep_a_reader_busy() -> None:
    """Marks that each promise a long record are given up on after a while."""
    disk = a_log()
    size = 2**20
    # Each mark promises half the file, which is there and does not verify.
    trap = (MARK + struct.pack("<IQQ", size // 2, 9, 1) + bytes(8)) * (size // 32)
    disk.append(FIRST, trap)

    with pytest.raises(CorruptError, match="has no valid record from byte"):
        RecordLog.open(disk)


def test_a_promise_of_a_huge_record_reserves_nothing() -> None:
    """A length beyond the limit is not believed."""
    disk = a_log([b"a"])
    disk.append(FIRST, MARK + struct.pack("<IQQ", 2**32 - 1, 3, 2) + bytes(100))

    assert said(disk) == [b"first", b"a"]


def test_opening_reads_a_log_about_twice() -> None:
    """The cost of opening grows with the log, not with its square."""
    rng = random.Random(0)
    disk = a_log(*([rng.randbytes(200)] for _ in range(3000)))
    tally = ReadTally(disk)
    size = sum(len(disk.read(name)) for name in disk.names("log/"))

    assert len(said(tally)) == 3001

    # Once to find its end and once to replay, in pieces of a MiB that overlap a little.
    assert tally.read_bytes < 2.2 * size
    assert tally.reads < 20


class ReadTally:
    """A disk that counts what is read from it."""

    def __init__(self, inner: SimDisk) -> None:
        self._inner = inner
        self.append, self.sync = inner.append, inner.sync
        self.write_new, self.names = inner.write_new, inner.names
        self.remove, self.free_bytes = inner.remove, inner.free_bytes
        self.reads = self.read_bytes = 0

    def read(self, name: str, first: int = 0, size: int | None = None) -> bytes:
        data = self._inner.read(name, first, size)
        self.reads += 1
        self.read_bytes += len(data)
        return data
