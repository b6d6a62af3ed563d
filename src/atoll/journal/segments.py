"""A segment of the log: a head, then records behind each other, little-endian.

    head, 56 bytes                           record, 32 bytes and its payload
    0   4  magic "ATOJ"                      0   4  mark a7 52 45 43
    4   2  version, 2                        4   4  bytes of the payload
    6   2  reserved, zero                    8   8  sequence number
    8   8  number of the segment             16  8  durable
    16  8  number of the previous, or 0      24  8  XXH3-64 of the 24 bytes before
    24  8  bytes of the previous that count         and the payload
    32  8  after                             32  .  payload
    40  8  through                               .  the copy: the same bytes again,
    48  8  XXH3-64 of the 48 bytes before           with mark a7 43 4f 50

Sequence numbers count the records of a journal from 1 without a gap. `after` is the
last one before the segment. Records up to `through` were written with the head, in one
piece, so they are durable if the file exists at all. A record's `durable` is the last
sequence number that was durable when it was written: a reader that finds a later record
whole and an earlier one broken learns from it whether the earlier one was promised.

A record and its copy are appended and synced together. Whichever of the two verifies is
the record, so that one damaged byte never loses it. Version 1 has no copies; it is
read, but no longer written.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from typing import NamedTuple

import xxhash

from atoll.disk import Disk
from atoll.errors import CorruptError
from atoll.journal.encoding import MAX_PAYLOAD_BYTES

MAGIC, VERSION, MARK, COPY = b"ATOJ", 2, b"\xa7REC", b"\xa7COP"
WITHOUT_COPIES = 1
"""The version of the format whose records are written once."""

CHUNK_BYTES = 2**20

_HEAD = struct.Struct("<4sHHQQQQQ")
_RECORD = struct.Struct("<4sIQQ")
_SUM = struct.Struct("<Q")
HEAD_BYTES = _HEAD.size + _SUM.size
RECORD_BYTES = _RECORD.size + _SUM.size
_MARKS = re.compile(re.escape(MARK) + b"|" + re.escape(COPY))

_PATIENCE = 64
"""How many times over the bytes of a broken tail are read before giving up."""

RESTORE = (
    "Restore the file from a copy of the journal; without one, the run can only be "
    "recovered from its islands."
)


class SegmentHead(NamedTuple):
    """The head of a segment."""

    number: int
    previous: int
    previous_bytes: int
    after: int
    through: int
    version: int = VERSION


class SegmentEntry(NamedTuple):
    """One record where it stands."""

    first: int
    last: int
    """The byte behind it, and behind its copy if it has one."""

    sequence: int
    durable: int
    payload: bytes
    checksum: int
    is_whole: bool = True
    """Whether both the record and its copy verify."""

    is_copy: bool = False
    """Whether only the copy does."""


def pack_head(head: SegmentHead) -> bytes:
    """Return the bytes at the start of a segment."""
    *numbers, version = head
    data = _HEAD.pack(MAGIC, version, 0, *numbers)
    return data + _SUM.pack(xxhash.xxh3_64_intdigest(data))


def read_head(disk: Disk, name: str) -> SegmentHead:
    """Return the head of a segment.

    Raises:
        CorruptError: the file starts with other bytes, or is missing.
    """
    data = disk.read(name, 0, HEAD_BYTES)
    if len(data) < HEAD_BYTES or data[:4] != MAGIC:
        raise CorruptError(f"{name} does not start as a segment of a log. {RESTORE}")
    _, version, reserved, *numbers = _HEAD.unpack_from(data)
    if _SUM.pack(xxhash.xxh3_64_intdigest(data[: _HEAD.size])) != data[_HEAD.size :]:
        raise CorruptError(f"{name} is damaged at byte 0: its head. {RESTORE}")
    if version not in (WITHOUT_COPIES, VERSION) or reserved:
        raise CorruptError(
            f"{name} is of version {version} of the log's format, and this release "
            f"reads versions {WITHOUT_COPIES} and {VERSION}. Use the release of Atoll "
            "that wrote it."
        )
    return SegmentHead._make((*numbers, version))


def pack_record(sequence: int, payload: bytes, *, durable: int) -> bytes:
    """Return the bytes of one record and of its copy."""
    head = _RECORD.pack(MARK, len(payload), sequence, durable)
    checksum = _SUM.pack(xxhash.xxh3_64_intdigest(head + payload))
    rest = head[len(MARK) :] + checksum + payload
    return b"".join((MARK, rest, COPY, rest))


def checksum_in(record: bytes) -> int:
    """Return the checksum that a packed record has in it."""
    (checksum,) = _SUM.unpack_from(record, _RECORD.size)
    return int(checksum)


def entries(
    disk: Disk, name: str, first: int, last: int | None = None, *, version: int
) -> Iterator[SegmentEntry]:
    """Yield the records from byte `first` on, up to the first that does not verify.

    With `last`, bytes from there on do not count.

    Raises:
        CorruptError: the bytes are made to look like records again and again.
    """
    window = _Window(disk, name, last)
    read = _record if version == WITHOUT_COPIES else _copied_record
    while (entry := read(window, first)) is not None:
        yield entry
        first = entry.last


def search(disk: Disk, name: str, first: int) -> tuple[int, int]:
    """Look for whole records, or copies of them, behind broken bytes at `first`.

    Returns the highest sequence number that any of them says was durable (0 if there is
    none), and the size of the file.

    Raises:
        CorruptError: the bytes are made to look like records again and again.
    """
    window = _Window(disk, name, None)
    durable, patience = 0, _Patience(window, first)
    while True:
        data = disk.read(name, first, CHUNK_BYTES)
        position, behind = 0, 0
        while (match := _MARKS.search(data, position)) is not None:
            position = match.start()
            entry = _record(window, first + position, mark=match[0])
            position = behind = position + 1 if entry is None else entry.last - first
            durable = max(durable, entry.durable if entry else 0)
            patience.require(first + position)
        if len(data) < CHUNK_BYTES:
            return durable, first + len(data)
        first += max(len(data) - len(MARK) + 1, behind)


class _Window:
    """Reads a file from front to back with few calls to the disk."""

    def __init__(self, disk: Disk, name: str, last: int | None) -> None:
        self._disk, self.name, self._last = disk, name, last
        self._first, self._data = 0, b""
        self.served_bytes = 0

    def read(self, first: int, size: int) -> bytes:
        wanted = max(size, CHUNK_BYTES)
        if self._last is not None:
            wanted = max(0, min(wanted, self._last - first))
            size = min(size, wanted)
        start = first - self._first
        if start < 0 or start + size > len(self._data):
            self._first, self._data = first, self._disk.read(self.name, first, wanted)
            start = 0
        data = self._data[start : start + size]
        self.served_bytes += len(data)
        return data


class _Patience:
    """Bounds how much is read in looking for records among broken bytes."""

    def __init__(self, window: _Window, first: int) -> None:
        self._window, self._first = window, first
        self._before = window.served_bytes

    def require(self, position: int) -> None:
        """Return if having looked as far as byte `at` has read a fair amount."""
        read_bytes = self._window.served_bytes - self._before
        if read_bytes > _PATIENCE * (position - self._first + CHUNK_BYTES):
            raise CorruptError(
                f"{self._window.name} has no valid record from byte {self._first} on. "
                f"{RESTORE}"
            )


def _record(window: _Window, first: int, mark: bytes = MARK) -> SegmentEntry | None:
    """Return the record, or with another mark the copy, that begins at a byte."""
    head = window.read(first, RECORD_BYTES)
    if len(head) < RECORD_BYTES:
        return None
    actual_mark, size, sequence, durable = _RECORD.unpack_from(head)
    if actual_mark != mark or size > MAX_PAYLOAD_BYTES or durable >= sequence:
        return None
    payload = window.read(first + RECORD_BYTES, size)
    if len(payload) < size:
        return None
    summed = MARK + head[len(MARK) : _RECORD.size] + payload
    checksum = xxhash.xxh3_64_intdigest(summed)
    if head[_RECORD.size :] != _SUM.pack(checksum):
        return None
    last = first + RECORD_BYTES + size
    return SegmentEntry(first, last, sequence, durable, payload, checksum)


def _copied_record(window: _Window, first: int) -> SegmentEntry | None:
    """Return the record that begins at a byte, from its copy if need be."""
    entry = _record(window, first)
    if entry is None:
        return _from_copy(window, first)
    size = len(entry.payload)
    head = _RECORD.pack(COPY, size, entry.sequence, entry.durable)
    is_whole = (
        window.read(entry.last, RECORD_BYTES) == head + _SUM.pack(entry.checksum)
        and window.read(entry.last + RECORD_BYTES, size) == entry.payload
    )
    last = entry.last + RECORD_BYTES + size
    return entry._replace(last=last, is_whole=is_whole)


def _from_copy(window: _Window, first: int) -> SegmentEntry | None:
    """Return the record that should begin at a byte, by looking for its copy.

    Its length may be damaged, too: the copy is the one that is as long as the distance
    to it.
    """
    position, patience = first, _Patience(window, first)
    while position - first <= RECORD_BYTES + MAX_PAYLOAD_BYTES:
        data = window.read(position, CHUNK_BYTES)
        for match in _MARKS.finditer(data):
            start = position + match.start()
            size = _size_at(window, start) if match[0] == COPY else None
            if size is None or first + RECORD_BYTES + size != start:
                continue
            copy = _record(window, start, COPY)
            if copy is not None:
                return copy._replace(first=first, is_whole=False, is_copy=True)
            patience.require(start)
        if len(data) < CHUNK_BYTES:
            return None
        position += len(data) - len(COPY) + 1
    return None


def _size_at(window: _Window, first: int) -> int | None:
    """Return the payload size that the record at a byte declares."""
    head = window.read(first, RECORD_BYTES)
    return _RECORD.unpack_from(head)[1] if len(head) == RECORD_BYTES else None
