"""A segment of the log: a head, then records behind each other, little-endian.

    head, 56 bytes                           record, 32 bytes and its payload
    0   4  magic "ATOJ"                      0   4  mark a7 52 45 43
    4   2  version, 1                        4   4  bytes of the payload
    6   2  reserved, zero                    8   8  sequence number
    8   8  number of the segment             16  8  durable
    16  8  number of the previous, or 0      24  8  XXH3-64 of the 24 bytes before
    24  8  bytes of the previous that count         and the payload
    32  8  after                             32  .  payload
    40  8  through
    48  8  XXH3-64 of the 48 bytes before

Sequence numbers count the records of a journal from 1 without a gap. `after` is the
last one before the segment. Records up to `through` were written with the head, in one
piece, so they are durable if the file is there at all. A record's `durable` is the last
sequence number that was durable when it was written: a reader that finds a later record
whole and an earlier one broken learns from it whether the earlier one was promised.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

import xxhash

from atoll.disk import Disk
from atoll.errors import CorruptError
from atoll.journal.encoding import MAX_PAYLOAD_BYTES

MAGIC, VERSION, MARK = b"ATOJ", 1, b"\xa7REC"
CHUNK_BYTES = 2**20

_HEAD = struct.Struct("<4sHHQQQQQ")
_RECORD = struct.Struct("<4sIQQ")
_SUM = struct.Struct("<Q")
HEAD_BYTES = _HEAD.size + _SUM.size
RECORD_BYTES = _RECORD.size + _SUM.size

_PATIENCE = 64
"""How many times over the bytes of a broken tail are read before giving up."""

RESTORE = (
    "Restore the file from a copy of the journal; without one, the run can only be "
    "recovered from its islands."
)


class Head(NamedTuple):
    """What a segment says of itself."""

    number: int
    previous: int
    previous_bytes: int
    after: int
    through: int


class Entry(NamedTuple):
    """One record where it stands."""

    first: int
    sequence: int
    durable: int
    payload: bytes

    @property
    def last(self) -> int:
        """The byte behind it."""
        return self.first + RECORD_BYTES + len(self.payload)


def pack_head(head: Head) -> bytes:
    """Return the bytes at the start of a segment."""
    data = _HEAD.pack(MAGIC, VERSION, 0, *head)
    return data + _SUM.pack(xxhash.xxh3_64_intdigest(data))


def read_head(disk: Disk, name: str) -> Head:
    """Return what a segment says of itself.

    Raises:
        CorruptError: the file starts with something else, or is not there.
    """
    data = disk.read(name, 0, HEAD_BYTES)
    if len(data) < HEAD_BYTES or data[:4] != MAGIC:
        raise CorruptError(f"{name} does not start as a segment of a log. {RESTORE}")
    _, version, reserved, *numbers = _HEAD.unpack_from(data)
    if _SUM.pack(xxhash.xxh3_64_intdigest(data[: _HEAD.size])) != data[_HEAD.size :]:
        raise CorruptError(f"{name} is damaged at byte 0: its head. {RESTORE}")
    if version != VERSION or reserved:
        raise CorruptError(
            f"{name} is of version {version} of the log's format, and this release "
            f"reads version {VERSION}. Use the release of Atoll that wrote it."
        )
    return Head(*numbers)


def pack_record(sequence: int, payload: bytes, *, durable: int) -> bytes:
    """Return the bytes of one record."""
    head = _RECORD.pack(MARK, len(payload), sequence, durable)
    return head + _SUM.pack(xxhash.xxh3_64_intdigest(head + payload)) + payload


def entries(
    disk: Disk, name: str, first: int, last: int | None = None
) -> Iterator[Entry]:
    """Yield the whole records from byte `first` on, up to the first that is not whole.

    With `last`, bytes from there on do not count.
    """
    window = _Window(disk, name, last)
    while (entry := _entry(window, first)) is not None:
        yield entry
        first = entry.last


def search(disk: Disk, name: str, first: int) -> tuple[int, int]:
    """Look for whole records behind broken bytes at `first`.

    Returns the highest sequence number that any of them says was durable (0 if there is
    none), and the size of the file.

    Raises:
        CorruptError: the bytes are made to look like records again and again.
    """
    window = _Window(disk, name, None)
    durable, start = 0, first
    while True:
        data = disk.read(name, first, CHUNK_BYTES)
        at, behind = 0, 0
        while (at := data.find(MARK, at)) >= 0:
            entry = _entry(window, first + at)
            at = behind = at + 1 if entry is None else entry.last - first
            durable = max(durable, entry.durable if entry else 0)
            if window.served_bytes > _PATIENCE * (first + at - start + CHUNK_BYTES):
                raise CorruptError(f"{name} is no log from byte {start} on. {RESTORE}")
        if len(data) < CHUNK_BYTES:
            return durable, first + len(data)
        first += max(len(data) - len(MARK) + 1, behind)


class _Window:
    """Reads a file from front to back with few calls to the disk."""

    def __init__(self, disk: Disk, name: str, last: int | None) -> None:
        self._disk, self._name, self._last = disk, name, last
        self._first, self._data = 0, b""
        self.served_bytes = 0

    def read(self, first: int, size: int) -> bytes:
        wanted = max(size, CHUNK_BYTES)
        if self._last is not None:
            wanted = max(0, min(wanted, self._last - first))
            size = min(size, wanted)
        start = first - self._first
        if start < 0 or start + size > len(self._data):
            self._first, self._data = first, self._disk.read(self._name, first, wanted)
            start = 0
        found = self._data[start : start + size]
        self.served_bytes += len(found)
        return found


def _entry(window: _Window, first: int) -> Entry | None:
    head = window.read(first, RECORD_BYTES)
    if len(head) < RECORD_BYTES:
        return None
    mark, size, sequence, durable = _RECORD.unpack_from(head)
    if mark != MARK or size > MAX_PAYLOAD_BYTES or durable >= sequence:
        return None
    payload = window.read(first + RECORD_BYTES, size)
    if len(payload) < size:
        return None
    if head[_RECORD.size :] != _SUM.pack(
        xxhash.xxh3_64_intdigest(head[: _RECORD.size] + payload)
    ):
        return None
    return Entry(first, sequence, durable, payload)
