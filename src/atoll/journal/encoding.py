"""The bytes of the log: records, and the segments that hold them.

A record has one encoding, little-endian and bounded: the number of its type, then the
fields that `LAYOUT` lists for it. JSON is canonical: keys sorted, no spaces, ASCII. A
model's tensors are JSON: a row each of name, shape, dtype, role, digest. Bytes that
`encode` would not write are refused.

A segment of the log has a head, then records behind each other, little-endian.

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

import json
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, NoReturn, get_args

import xxhash

from atoll.data.ledger import KEPT_CLAIMS
from atoll.disk import Disk
from atoll.errors import CorruptError, UsageError
from atoll.journal import records
from atoll.protocol import ModelSpec, TensorSpec
from atoll.protocol.model import Role
from atoll.wire import MAX_HEADER_BYTES
from atoll.wire.roster import decode_text

ROLES: tuple[Role, ...] = get_args(Role)


def model_to_json(model: ModelSpec) -> object:
    """Return what JSON can hold of a model's tensors, which is all of it."""
    return [
        [tensor.name, list(tensor.shape), tensor.dtype, tensor.role, tensor.digest]
        for tensor in model.tensors
    ]


def spec_from_json(value: object) -> ModelSpec:
    """Return the model that `value` describes, or raise CorruptError."""
    if not isinstance(value, list):
        raise CorruptError("the journal's model is no list of tensors.")
    return ModelSpec(tuple(_tensor(row) for row in value))


def _tensor(row: object) -> TensorSpec:
    match row:
        case [str(name), list(shape), str(dtype), role, str(digest)] if role in ROLES:
            sizes = tuple(size for size in shape if type(size) is int and size >= 0)
            if len(sizes) == len(shape):
                return TensorSpec(
                    name=name, shape=sizes, dtype=dtype, role=role, digest=digest
                )
    raise CorruptError(f"{row!r:.200} in the journal describes no tensor.")


MAX_JSON_BYTES = 2**26
MAX_PAYLOAD_BYTES = 2 * MAX_HEADER_BYTES + 2**16
"""Two headers of the largest size and the fields around them."""

_U16, _U32, _U64 = struct.Struct("<H"), struct.Struct("<I"), struct.Struct("<Q")
_NOWHERE, _OWN_FILE, _SHARED_FILE = 0, 1, 2


def encode(record: records.Record) -> bytes:
    """Return the one encoding of a record.

    Raises:
        UsageError: it holds more than a journal takes.
    """
    number = _NUMBER_OF[type(record)]
    _, fields = LAYOUT[number]
    parts = (field.write(getattr(record, name)) for name, field in fields.items())
    payload = bytes([number]) + b"".join(parts)
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise UsageError(
            f"a record of {len(payload)} bytes is above the limit of "
            f"{MAX_PAYLOAD_BYTES}. Use more fragments."
        )
    return payload


def decode(payload: bytes) -> records.Record:
    """Return the record that `payload` encodes, or raise CorruptError; nothing else."""
    cursor = RecordCursor(payload)
    number = cursor.take(1)[0]
    if number not in LAYOUT:
        raise CorruptError(
            f"a record of type {number} is unknown; known are 1 to {len(LAYOUT)}. "
            "Use the release of Atoll that wrote the journal."
        )
    kind, fields = LAYOUT[number]
    values = {name: field.read(cursor) for name, field in fields.items()}
    cursor.finish()
    try:
        return kind(**values)
    except UsageError as exc:
        raise CorruptError(f"{exc}") from exc


class RecordCursor:
    """Reads a payload from its start, and never beyond its end."""

    def __init__(self, payload: bytes) -> None:
        self._payload, self._position = payload, 0

    def take(self, size: int) -> bytes:
        start, self._position = self._position, self._position + size
        if self._position > len(self._payload):
            raise CorruptError(
                f"a record of {len(self._payload)} bytes ends before byte "
                f"{self._position}."
            )
        return self._payload[start : self._position]

    def number(self, kind: struct.Struct) -> int:
        (value,) = kind.unpack(self.take(kind.size))
        return int(value)

    def finish(self) -> None:
        if self._position != len(self._payload):
            raise CorruptError(
                f"bytes {self._position} to {len(self._payload)} of a record are "
                "unused."
            )


class RecordField(NamedTuple):
    """How one kind of value is written and read."""

    write: Callable[[Any], bytes]
    read: Callable[[RecordCursor], Any]


def _number(kind: struct.Struct) -> RecordField:
    return RecordField(kind.pack, lambda cursor: cursor.number(kind))


def _exactly(size: int) -> RecordField:
    return RecordField(bytes, lambda cursor: cursor.take(size))


def _behind_its_length(kind: struct.Struct) -> RecordField:
    return RecordField(
        lambda data: kind.pack(len(data)) + data,
        lambda cursor: cursor.take(cursor.number(kind)),
    )


SHORT, LONG = _behind_its_length(_U16), _behind_its_length(_U32)
U32, U64 = _number(_U32), _number(_U64)
STATE_DIGEST, UPDATE_DIGEST, CONSTANT_DIGEST = (
    _exactly(records.STATE_DIGEST_BYTES),
    _exactly(records.UPDATE_DIGEST_BYTES),
    _exactly(records.CONSTANT_DIGEST_BYTES),
)
TEXT = RecordField(
    lambda text: SHORT.write(text.encode()),
    lambda cursor: decode_text(SHORT.read(cursor), field="a text of the journal"),
)
FLAG = RecordField(lambda flag: bytes([flag]), lambda cursor: _flag(cursor.take(1)[0]))
AGREED = RecordField(
    lambda agreed: LONG.write(agreed.packed), lambda cursor: _agreed(LONG.read(cursor))
)


def _flag(byte: int) -> bool:
    if byte > 1:
        raise CorruptError(f"a flag of the journal cannot be {byte}.")
    return bool(byte)


def _agreed(packed: bytes) -> records.AgreedRecord:
    try:
        return records.AgreedRecord(packed)
    except UsageError as exc:
        raise CorruptError(f"{exc}") from exc


def _write_json(value: object) -> bytes:
    data = _canonical(value)
    if len(data) > MAX_JSON_BYTES:
        raise UsageError(
            f"JSON of {len(data)} bytes is above the limit of {MAX_JSON_BYTES}."
        )
    return LONG.write(data)


def _canonical(value: object) -> bytes:
    try:
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as exc:
        raise UsageError(f"{value!r:.200} cannot be written as JSON: {exc}.") from exc
    return text.encode("ascii")


def _read_json(cursor: RecordCursor) -> object:
    data = LONG.read(cursor)
    try:
        value: object = json.loads(data, parse_constant=_no_constant)
        is_canonical = _canonical(value) == data
    except (ValueError, RecursionError) as exc:
        raise CorruptError("JSON in the journal cannot be read.") from exc
    if not is_canonical:
        raise CorruptError("JSON in the journal is not in its canonical form.")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(name)


def _read_table(cursor: RecordCursor) -> Mapping[str, object]:
    value = _read_json(cursor)
    if not isinstance(value, dict):
        raise CorruptError("JSON in the journal is no table.")
    return value


TABLE = RecordField(lambda table: _write_json(dict(table)), _read_table)
MODEL = RecordField(
    lambda model: _write_json(model_to_json(model)),
    lambda cursor: spec_from_json(_read_json(cursor)),
)


def _several(field: RecordField, *, max_items: int) -> RecordField:
    def read(cursor: RecordCursor) -> tuple[Any, ...]:
        count = cursor.number(_U32)
        if count > max_items:
            raise CorruptError(
                f"{count} in a record is above the limit of {max_items}."
            )
        return tuple(field.read(cursor) for _ in range(count))

    return RecordField(
        lambda values: _U32.pack(len(values)) + b"".join(map(field.write, values)), read
    )


def _write_location(location: records.BodyLocation | None) -> bytes:
    if location is None:
        return bytes([_NOWHERE])
    if location.file == 0:
        return bytes([_OWN_FILE])
    return bytes([_SHARED_FILE]) + _U64.pack(location.file) + _U64.pack(location.first)


def _read_location(cursor: RecordCursor) -> records.BodyLocation | None:
    kind = cursor.take(1)[0]
    if kind == _NOWHERE:
        return None
    if kind == _OWN_FILE:
        return records.BodyLocation()
    file = cursor.number(_U64) if kind == _SHARED_FILE else 0
    if not file:
        raise CorruptError(f"a body cannot be at a place of kind {kind}.")
    return records.BodyLocation(file=file, first=cursor.number(_U64))


LOCATION = RecordField(_write_location, _read_location)

LAYOUT: dict[int, tuple[type[records.Record], dict[str, RecordField]]] = {
    1: (records.CreatedRecord, {"run": TEXT, "fingerprint": TEXT, "settings": TABLE}),
    2: (
        records.FoundedRecord,
        {
            "digests": _several(STATE_DIGEST, max_items=records.MAX_FRAGMENTS),
            "model": MODEL,
        },
    ),
    3: (
        records.JoinedRecord,
        {
            "island": TEXT,
            "incarnation": U64,
            "slot": U64,
            "key_digest": SHORT,
            "nonce": SHORT,
        },
    ),
    4: (records.LeftRecord, {"island": TEXT, "incarnation": U64, "reason": TEXT}),
    5: (records.EpochRecord, {"number": U64, "values": TABLE}),
    6: (
        records.StagedRecord,
        {"fragment": U32, "round": U64, "island": TEXT, "digest": UPDATE_DIGEST},
    ),
    7: (
        records.CommittedRecord,
        {
            "digest_after": STATE_DIGEST,
            "epoch": U64,
            "location": LOCATION,
            "agreed": AGREED,
        },
    ),
    8: (
        records.RecoveredRecord,
        {
            "fragment": U32,
            "round": U64,
            "digest": STATE_DIGEST,
            "outcomes": _several(AGREED, max_items=2),
        },
    ),
    9: (records.EndedRecord, {"reason": TEXT}),
    10: (records.PauseRecord, {"is_paused": FLAG}),
    11: (records.MoveRecord, {"target": TEXT, "nonce": TEXT, "is_over": FLAG}),
    12: (
        records.ArrivedRecord,
        {
            "rounds": _several(U64, max_items=records.MAX_FRAGMENTS),
            "digests": _several(STATE_DIGEST, max_items=records.MAX_FRAGMENTS),
            "model": MODEL,
        },
    ),
    13: (
        records.PassedRecord,
        {
            "fragment": U32,
            "bases": _several(STATE_DIGEST, max_items=records.MAX_BASES),
            "locations": _several(LOCATION, max_items=2),
            "outcomes": _several(AGREED, max_items=2),
        },
    ),
    14: (
        records.CountedRecord,
        {
            "fragment": U32,
            "island": TEXT,
            "round": U64,
            "inner_steps": U64,
            "tokens": U64,
        },
    ),
    15: (records.ConstantRecord, {"digest": CONSTANT_DIGEST, "size": U64}),
    16: (records.WindowRecord, {"fragment": U32, "island": TEXT, "window": U64}),
    17: (records.DataRecord, {"rows": U64, "fingerprint": TEXT}),
    18: (records.ClaimRecord, {"island": TEXT, "number": U64, "packed": LONG}),
    19: (records.ReleasedRecord, {"island": TEXT}),
    20: (
        records.EndSetRecord,
        {"rounds": _several(U64, max_items=records.MAX_FRAGMENTS)},
    ),
    21: (
        records.LedgerRecord,
        {
            "is_open": FLAG,
            "rows": U64,
            "fingerprint": TEXT,
            "front": U64,
            "free": LONG,
            "counted": _several(LONG, max_items=records.MAX_FRAGMENTS),
            "refused": _several(LONG, max_items=records.MAX_FRAGMENTS),
        },
    ),
    22: (
        records.HoldingRecord,
        {
            "island": TEXT,
            "in_hand": LONG,
            "partly": LONG,
            "numbers": _several(U64, max_items=KEPT_CLAIMS),
            "claims": _several(LONG, max_items=KEPT_CLAIMS),
        },
    ),
}
_NUMBER_OF = {kind: number for number, (kind, _) in LAYOUT.items()}


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
