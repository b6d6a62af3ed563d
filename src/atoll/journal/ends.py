"""Where the log is known to end, in a second place: `log/<segment>.end`.

Rule 1: an entry is written after the sync of the record it names has returned. So a
        record that an entry names and that does not verify was damaged, not torn.
Rule 2: the last entry that verifies counts. What does not verify is passed over: an
        append that a crash interrupted, or damage that the log itself will show.

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
from typing import NamedTuple

import xxhash

from atoll.disk import Disk
from atoll.errors import NoSuchFile

MARK = b"\xa7END"
SUFFIX = ".end"

_ENTRY = struct.Struct("<4sIQQQQ")
_SUM = struct.Struct("<Q")
ENTRY_BYTES = _ENTRY.size + _SUM.size


class End(NamedTuple):
    """How far a segment is durable."""

    segment: int
    size: int
    sequence: int
    checksum: int


def pack_end(end: End) -> bytes:
    """Return the bytes of an entry."""
    data = _ENTRY.pack(MARK, 0, *end)
    return data + _SUM.pack(xxhash.xxh3_64_intdigest(data))


def read_end(disk: Disk, name: str, segment: int) -> End | None:
    """Return the last entry for a segment that a file has; None if there is none."""
    try:
        data = disk.read(name)
    except NoSuchFile:
        return None
    at = len(data)
    while (at := data.rfind(MARK, 0, at)) >= 0:
        end = _unpack(data[at : at + ENTRY_BYTES])
        if end is not None and end.segment == segment:
            return end
    return None


def _unpack(data: bytes) -> End | None:
    if len(data) < ENTRY_BYTES:
        return None
    checksum = _SUM.pack(xxhash.xxh3_64_intdigest(data[: _ENTRY.size]))
    _, reserved, *numbers = _ENTRY.unpack_from(data)
    if checksum != data[_ENTRY.size :] or reserved:
        return None
    return End(*numbers)
