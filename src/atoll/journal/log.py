"""The log: records in order; a record in it happened. Its sync is the commit point.

Rule 1: a record is appended behind the last good one, and counts once `sync` returned.
Rule 2: bytes that may be broken are never appended to. After a failed append or sync,
        and for a tail that a crash left, the next segment is written in one piece: it
        names how much of the segment before counts, and repeats the records that were
        not yet durable.
Rule 3: a promised record that does not verify is an error; a record that was not
        promised and does not verify was never there.

The segments form a chain: each names the one before it. A segment that the chain leaves
out was given up, and `sweep` removes it.

Torn or damaged: both leave an end that does not verify, and only other durable data
shows which. Every record has a copy beside it, synced with it: damage to one of the two
loses nothing, and is reported. After the sync, `seal` writes into a second file how far
the log is durable; every later record has that in it, too. A record that one of these
proves, and of which neither copy verifies, was damaged: opening the log raises
CorruptError. Without a proof the bytes are cut, and `cut` reports it. The proof comes
after the promise, because one sync for both could leave a proof without its record.
Until `seal`, a log that was cut at exactly the end of a record is therefore taken for
an earlier one.

The second file is `log/<segment>.end`.
Rule 4: an entry of it is written after the sync of the record it names has returned. So
        a record that an entry names and that does not verify was damaged, not torn.
Rule 5: the last entry that verifies counts. An entry that does not verify is passed
        over: an append that a crash interrupted, or damage that the log itself will
        show.

    entry, 48 bytes, little-endian
    0   4  mark a7 45 4e 44
    4   4  reserved, zero
    8   8  number of the segment
    16  8  bytes of the segment that are durable
    24  8  sequence number of the last record among them
    32  8  XXH3-64 of that record; zero if the segment has none
    40  8  XXH3-64 of the 40 bytes before
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import xxhash

from atoll.disk import Disk
from atoll.errors import CorruptError, NoSuchFile, UsageError
from atoll.journal import encoding

FOLDER = "log/"


class RecordPosition(NamedTuple):
    """Where a record stands."""

    segment: int
    first: int
    last: int


class CutTail(NamedTuple):
    """Bytes at the end of a segment that do not count."""

    name: str
    first: int
    size: int

    def __str__(self) -> str:
        return (
            f"{self.size} bytes at the end of {self.name}, from byte {self.first} on, "
            "do not verify and were left out, as an append that a crash interrupted. "
            "Nothing proves that they were durable."
        )


class RecordLog:
    """Payloads in order, on a disk. Get one by `create` or `open`."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._chain: list[encoding.SegmentHead] = []
        self._size = self._durable_bytes = 0
        self._durable = 0
        self._checksum = 0
        """Of the last record in the segment; 0 if it has none."""

        self._pending: list[bytes] = []
        """Payloads appended since the last that is durable."""

        self._is_torn = False
        self._numbers_used = 0
        self._end: LogEnd | None = None
        """How far the log is durable."""

        self._sealed: LogEnd | None = None
        self._sealing = threading.Lock()
        self.cut: CutTail | None = None
        """The tail of the log that did not verify when it was opened."""

        self.was_first_version = False
        """Whether a release that wrote no copies has written the log until now."""

        self.damage: list[str] = []
        """Damaged records that were read from their copies, in sentences."""

    @classmethod
    def create(cls, disk: Disk, payload: bytes) -> RecordLog:
        """Return a log of one record, which is durable.

        Raises:
            UsageError: there is a log.
        """
        if _numbers(disk):
            raise UsageError(
                "There is a journal on this disk already. Open it, or choose another "
                "directory for a new run."
            )
        log = cls(disk)
        log._begin([payload])
        return log

    @classmethod
    def open(cls, disk: Disk) -> RecordLog:
        """Return the log on a disk; all that `read_back` will give is durable.

        Raises:
            UsageError: there is none.
            CorruptError: a segment is missing, or something promised is damaged.
        """
        log = cls(disk)
        log._chain = _chain(disk)
        log._numbers_used = log._chain[-1].number
        log._take_tail()
        return log

    @property
    def sequence(self) -> int:
        """The number of the last record."""
        return self._durable + len(self._pending)

    def append(self, payload: bytes) -> RecordPosition:
        """Put a record at the end; it is durable after `sync`.

        On an error this log does not have the record. A crash may still bring it back,
        until the next append or sync has succeeded.
        """
        self.heal()
        record = encoding.pack_record(self.sequence + 1, payload, durable=self._durable)
        position = RecordPosition(self._number, self._size, self._size + len(record))
        try:
            self._disk.append(_name(self._number), record)
        except BaseException:
            self._is_torn = True
            raise
        self._pending.append(payload)
        self._size, self._checksum = position.last, encoding.checksum_in(record)
        return position

    def sync(self) -> None:
        """Return when every record is durable. Safe to repeat after an error."""
        self.heal()
        if not self._pending:
            return
        try:
            self._disk.sync(_name(self._number))
        except BaseException:
            self._is_torn = True
            raise
        self._durable = self.sequence
        self._durable_bytes = self._size
        self._pending.clear()
        self._note_end()

    def seal(self) -> None:
        """Write down in a second place how far the log is durable. Safe to repeat.

        May run beside all other calls, in any thread.

        Raises:
            DiskError: nothing has changed; safe to repeat.
        """
        with self._sealing:
            end = self._end
            if end is None or end == self._sealed:
                return
            name = _end_name(end.segment)
            if self._sealed is None or self._sealed.segment != end.segment:
                self._disk.remove(name)
                self._disk.write_new(name, [pack_end(end)])
            else:
                self._disk.append(name, pack_end(end))
                self._disk.sync(name)
            self._sealed = end

    def withdraw(self, sequence: int) -> None:
        """Forget the records after `sequence`, none of which is known to be durable."""
        assert sequence >= self._durable
        del self._pending[sequence - self._durable :]
        self._is_torn = True

    def heal(self) -> None:
        """Return with an end that can be appended to, and nothing withdrawn behind it.

        On an error nothing has changed; safe to repeat.
        """
        if self._is_torn:
            self._begin(self._pending)

    def read(self, position: RecordPosition) -> bytes:
        """Return the payload of a record, verified again."""
        name, version = _name(position.segment), self._version_of(position.segment)
        for entry in encoding.entries(
            self._disk, name, position.first, position.last, version=version
        ):
            return entry.payload
        raise _damage(name, position.first)

    def read_back(self) -> Iterator[tuple[RecordPosition, bytes]]:
        """Yield every payload in order, with its place.

        Raises:
            CorruptError: naming the segment and the byte that do not verify.
        """
        sequence = 0
        limits = [head.previous_bytes for head in self._chain[1:]] + [self._size]
        for head, limit in zip(self._chain, limits, strict=True):
            name, end = _name(head.number), encoding.HEAD_BYTES
            if head.after != sequence:
                raise CorruptError(
                    f"{name} follows record {head.after}, but the log before it "
                    f"ends with {sequence}. {encoding.RESTORE}"
                )
            records = encoding.entries(
                self._disk, name, encoding.HEAD_BYTES, limit, version=head.version
            )
            broken: list[int] = []
            for entry in records:
                if entry.sequence != sequence + 1:
                    break
                sequence, end = entry.sequence, entry.last
                if not entry.is_whole:
                    broken.append(entry.first)
                yield RecordPosition(head.number, entry.first, end), entry.payload
            if end != limit:
                raise _damage(name, end)
            if broken:
                self._report(name, broken)

    def sweep(self) -> None:
        """Remove the segments that were given up."""
        numbers = {head.number for head in self._chain}
        for number in set(_numbers(self._disk)) - numbers:
            self._disk.remove(_name(number))

    def _version_of(self, segment: int) -> int:
        heads = (head for head in self._chain if head.number == segment)
        return next((head.version for head in heads), encoding.VERSION)

    def _report(self, name: str, broken: list[int]) -> None:
        text = (
            f"{name} is damaged at byte {broken[0]}: {len(broken)} of its records or "
            "their copies do not verify, and the other of the two is used. Copy the "
            "journal to a sound disk."
        )
        if text not in self.damage:
            self.damage.append(text)

    def _note_end(self) -> None:
        self._end = LogEnd(
            self._number, self._durable_bytes, self._durable, self._checksum
        )

    @property
    def _number(self) -> int:
        return self._chain[-1].number

    def _begin(self, payloads: Iterable[bytes], count: int | None = None) -> None:
        """Start a new segment, which repeats `payloads` after the durable records."""
        if count is None:
            payloads = list(payloads)
            count = len(payloads)
        self._numbers_used += 1  # a name is not used again, even if its file is gone
        head = encoding.SegmentHead(
            number=self._numbers_used,
            previous=self._number if self._chain else 0,
            previous_bytes=self._durable_bytes,
            after=self._durable,
            through=self._durable + count,
        )
        written = _Written()
        self._disk.write_new(_name(head.number), _segment(head, payloads, written))
        self._chain.append(head)
        self._durable = head.through
        self._size = self._durable_bytes = written.size
        self._checksum = written.checksum
        self._pending, self._is_torn = [], False
        self._note_end()

    def _take_tail(self) -> None:
        """Find what of the last segment counts, and make sure that it is durable."""
        head = self._chain[-1]
        name = _name(head.number)
        end = self._read_end(head)
        self.was_first_version = head.version == encoding.WITHOUT_COPIES
        tail = _tail(self._disk, name, head, end)
        promised, size = encoding.search(self._disk, name, tail.verified)
        if max(tail.durable, promised) > tail.sequence:
            raise _damage(name, tail.last)
        self._durable, self._durable_bytes = tail.durable, tail.durable_bytes
        self._size, self._checksum = tail.last, tail.checksum
        self._sealed = end
        if size > tail.verified:
            self.cut = CutTail(name, tail.verified, size - tail.verified)
        if tail.from_copies:
            self._report(name, tail.from_copies)
        if size != tail.durable_bytes or head.version != encoding.VERSION:
            unsynced = encoding.entries(
                self._disk,
                name,
                tail.durable_bytes,
                tail.last,
                version=head.version,
            )
            count = tail.sequence - tail.durable
            self._begin((entry.payload for entry in unsynced), count)
        else:  # its writer may have got an error
            self._disk.sync(name)
            self._note_end()

    def _read_end(self, head: encoding.SegmentHead) -> LogEnd | None:
        """Return how far the last segment was durable, as the second place has it.

        Raises:
            CorruptError: it names a segment that is not in the chain.
        """
        numbers = {head.number for head in self._chain}
        for name in self._disk.names(FOLDER):
            number = _ended_segment(name)
            if not number:
                continue
            if read_end(self._disk, name, number) is None:
                self.damage.append(
                    f"{name} is damaged: nothing in it verifies. It only repeats where "
                    "the log ended."
                )
            elif number not in numbers:
                raise _missing(number)
        return read_end(self._disk, _end_name(head.number), head.number)


class _Tail(NamedTuple):
    sequence: int
    last: int
    checksum: int
    durable: int
    durable_bytes: int
    verified: int
    """Where the last bytes end that verify: the last record may have no whole copy."""

    from_copies: list[int]
    """Offsets of records that were not durable, and of which only a copy exists."""


def _tail(
    disk: Disk, name: str, head: encoding.SegmentHead, end: LogEnd | None
) -> _Tail:
    """Read the last segment, which was durable as far as `end` says."""
    durable, ends, checksum = head.through, [encoding.HEAD_BYTES], 0
    from_copies: dict[int, int] = {}
    verified = encoding.HEAD_BYTES
    if end:
        durable = max(durable, end.sequence)
    for entry in encoding.entries(
        disk, name, encoding.HEAD_BYTES, version=head.version
    ):
        if entry.sequence != head.after + len(ends):
            raise _damage(name, entry.first)
        durable = max(durable, entry.durable)
        ends.append(entry.last)
        checksum, verified = entry.checksum, entry.last
        if not (entry.is_whole or entry.is_copy):
            verified -= encoding.RECORD_BYTES + len(entry.payload)
        if entry.is_copy:
            from_copies[entry.sequence] = entry.first
        if end and entry.sequence == end.sequence:
            _require_same(name, entry, end)
    sequence = head.after + len(ends) - 1
    return _Tail(
        sequence,
        ends[-1],
        checksum,
        durable,
        durable_bytes=ends[min(durable, sequence) - head.after],
        verified=verified,
        from_copies=[
            first for number, first in from_copies.items() if number > durable
        ],
    )


def _require_same(name: str, entry: encoding.SegmentEntry, end: LogEnd) -> None:
    """Return if a record is the one that was durable."""
    if (entry.last, entry.checksum) != (end.size, end.checksum):
        raise CorruptError(
            f"{name} is damaged at byte {entry.first}: record {entry.sequence} is not "
            f"the one that {_end_name(end.segment)} has. {encoding.RESTORE}"
        )


class _Written:
    """The content of a segment that is being written."""

    size = encoding.HEAD_BYTES
    checksum = 0


def _segment(
    head: encoding.SegmentHead, payloads: Iterable[bytes], written: _Written
) -> Iterator[bytes]:
    """Yield the parts of a segment, and record them."""
    yield encoding.pack_head(head)
    sequence = head.after
    for payload in payloads:
        sequence += 1
        record = encoding.pack_record(sequence, payload, durable=head.after)
        written.size += len(record)
        written.checksum = encoding.checksum_in(record)
        yield record
    if sequence != head.through:
        raise CorruptError(f"the log changed while {_name(head.number)} was written.")


def _chain(disk: Disk) -> list[encoding.SegmentHead]:
    """Return the heads of the segments that count, oldest first."""
    numbers = _numbers(disk)
    if not numbers:
        if disk.names(FOLDER):
            raise CorruptError(
                f"Every segment in {FOLDER} is missing. {encoding.RESTORE}"
            )
        raise UsageError("There is no journal on this disk. Create one for a new run.")
    chain, number = [], max(numbers)
    while number:
        name = _name(number)
        try:
            head = encoding.read_head(disk, name)
        except NoSuchFile as exc:
            raise CorruptError(f"{name} is missing. {encoding.RESTORE}") from exc
        is_right = (
            head.number == number
            and head.previous < number
            and head.after <= head.through
        )
        if not is_right:
            raise CorruptError(
                f"{name} contradicts its own head: {head}. {encoding.RESTORE}"
            )
        chain.append(head)
        number = head.previous
    return chain[::-1]


def _numbers(disk: Disk) -> list[int]:
    numbers = {
        name: int(text)
        for name in disk.names(FOLDER)
        if (text := name.removeprefix(FOLDER)).isdecimal()
    }
    return [
        number for name, number in numbers.items() if number and name == _name(number)
    ]


def _name(number: int) -> str:
    return f"{FOLDER}{number:08d}"


def _end_name(number: int) -> str:
    return f"{_name(number)}{SUFFIX}"


def _ended_segment(name: str) -> int:
    """Return the segment that a file tells the end of; 0 for another file."""
    text = name.removeprefix(FOLDER).removesuffix(SUFFIX)
    is_end = text.isdecimal() and name == _end_name(int(text))
    return int(text) if is_end else 0


def _missing(number: int) -> CorruptError:
    return CorruptError(
        f"{_name(number)} is missing, and {_end_name(number)} says that it was "
        f"durable. {encoding.RESTORE}"
    )


def _damage(name: str, first: int) -> CorruptError:
    return CorruptError(
        f"{name} is damaged at byte {first}: no record verifies there. "
        f"{encoding.RESTORE}"
    )


MARK = b"\xa7END"
SUFFIX = ".end"

_ENTRY = struct.Struct("<4sIQQQQ")
_SUM = struct.Struct("<Q")
ENTRY_BYTES = _ENTRY.size + _SUM.size


class LogEnd(NamedTuple):
    """How far a segment is durable."""

    segment: int
    size: int
    sequence: int
    checksum: int


def pack_end(end: LogEnd) -> bytes:
    """Return the bytes of an entry."""
    data = _ENTRY.pack(MARK, 0, *end)
    return data + _SUM.pack(xxhash.xxh3_64_intdigest(data))


def read_end(disk: Disk, name: str, segment: int) -> LogEnd | None:
    """Return the last entry for a segment that a file has; None if there is none."""
    try:
        data = disk.read(name)
    except NoSuchFile:
        return None
    start = len(data)
    while (start := data.rfind(MARK, 0, start)) >= 0:
        end = _unpack(data[start : start + ENTRY_BYTES])
        if end is not None and end.segment == segment:
            return end
    return None


def _unpack(data: bytes) -> LogEnd | None:
    if len(data) < ENTRY_BYTES:
        return None
    checksum = _SUM.pack(xxhash.xxh3_64_intdigest(data[: _ENTRY.size]))
    _, reserved, *numbers = _ENTRY.unpack_from(data)
    if checksum != data[_ENTRY.size :] or reserved:
        return None
    return LogEnd(*numbers)
