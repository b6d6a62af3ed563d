"""Records to bytes and back: one encoding each, little-endian, bounded.

A payload is the number of its type, then the fields that `LAYOUT` lists for it. JSON is
canonical: keys sorted, no spaces, ASCII. Bytes that `encode` would not write are
refused.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn

from atoll.errors import CorruptError, UsageError
from atoll.journal.records import (
    CONSTANT_DIGEST_BYTES,
    MAX_BASES,
    MAX_FRAGMENTS,
    STATE_DIGEST_BYTES,
    UPDATE_DIGEST_BYTES,
    Agreed,
    Arrived,
    Committed,
    ConstantKept,
    CountedSet,
    Created,
    Ended,
    EpochSet,
    Founded,
    Joined,
    Left,
    MoveSet,
    Passed,
    PauseSet,
    Place,
    Record,
    Recovered,
    Staged,
)
from atoll.journal.specs import model_to_json, spec_from_json
from atoll.wire import MAX_HEADER_BYTES
from atoll.wire.text import decode_text

MAX_JSON_BYTES = 2**26
MAX_PAYLOAD_BYTES = 2 * MAX_HEADER_BYTES + 2**16
"""Two headers of the largest size and what stands around them."""

_U16, _U32, _U64 = struct.Struct("<H"), struct.Struct("<I"), struct.Struct("<Q")
_NOWHERE, _OWN_FILE, _SHARED_FILE = 0, 1, 2


def encode(record: Record) -> bytes:
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


def decode(payload: bytes) -> Record:
    """Return the record that `payload` encodes, or raise CorruptError; nothing else."""
    cursor = Cursor(payload)
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


class Cursor:
    """Reads a payload from its start, and never beyond its end."""

    def __init__(self, payload: bytes) -> None:
        self._payload, self._at = payload, 0

    def take(self, size: int) -> bytes:
        start, self._at = self._at, self._at + size
        if self._at > len(self._payload):
            raise CorruptError(
                f"a record of {len(self._payload)} bytes ends before byte {self._at}."
            )
        return self._payload[start : self._at]

    def number(self, kind: struct.Struct) -> int:
        (value,) = kind.unpack(self.take(kind.size))
        return int(value)

    def finish(self) -> None:
        if self._at != len(self._payload):
            raise CorruptError(
                f"bytes {self._at} to {len(self._payload)} of a record say nothing."
            )


class Field(NamedTuple):
    """How one kind of value is written and read."""

    write: Callable[[Any], bytes]
    read: Callable[[Cursor], Any]


def _number(kind: struct.Struct) -> Field:
    return Field(kind.pack, lambda cursor: cursor.number(kind))


def _exactly(size: int) -> Field:
    return Field(bytes, lambda cursor: cursor.take(size))


def _behind_its_length(kind: struct.Struct) -> Field:
    return Field(
        lambda data: kind.pack(len(data)) + data,
        lambda cursor: cursor.take(cursor.number(kind)),
    )


SHORT, LONG = _behind_its_length(_U16), _behind_its_length(_U32)
U32, U64 = _number(_U32), _number(_U64)
STATE_DIGEST, UPDATE_DIGEST, CONSTANT_DIGEST = (
    _exactly(STATE_DIGEST_BYTES),
    _exactly(UPDATE_DIGEST_BYTES),
    _exactly(CONSTANT_DIGEST_BYTES),
)
TEXT = Field(
    lambda text: SHORT.write(text.encode()),
    lambda cursor: decode_text(SHORT.read(cursor), what="a text of the journal"),
)
FLAG = Field(lambda flag: bytes([flag]), lambda cursor: _flag(cursor.take(1)[0]))
AGREED = Field(
    lambda agreed: LONG.write(agreed.packed), lambda cursor: _agreed(LONG.read(cursor))
)


def _flag(byte: int) -> bool:
    if byte > 1:
        raise CorruptError(f"a flag of the journal cannot be {byte}.")
    return bool(byte)


def _agreed(packed: bytes) -> Agreed:
    try:
        return Agreed(packed)
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


def _read_json(cursor: Cursor) -> object:
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


def _read_table(cursor: Cursor) -> Mapping[str, object]:
    value = _read_json(cursor)
    if not isinstance(value, dict):
        raise CorruptError("JSON in the journal is no table.")
    return value


TABLE = Field(lambda table: _write_json(dict(table)), _read_table)
MODEL = Field(
    lambda model: _write_json(model_to_json(model)),
    lambda cursor: spec_from_json(_read_json(cursor)),
)


def _several(field: Field, *, most: int) -> Field:
    def read(cursor: Cursor) -> tuple[Any, ...]:
        count = cursor.number(_U32)
        if count > most:
            raise CorruptError(f"{count} in a record is above the limit of {most}.")
        return tuple(field.read(cursor) for _ in range(count))

    return Field(
        lambda values: _U32.pack(len(values)) + b"".join(map(field.write, values)), read
    )


def _write_place(place: Place | None) -> bytes:
    if place is None:
        return bytes([_NOWHERE])
    if place.file == 0:
        return bytes([_OWN_FILE])
    return bytes([_SHARED_FILE]) + _U64.pack(place.file) + _U64.pack(place.first)


def _read_place(cursor: Cursor) -> Place | None:
    kind = cursor.take(1)[0]
    if kind == _NOWHERE:
        return None
    if kind == _OWN_FILE:
        return Place()
    file = cursor.number(_U64) if kind == _SHARED_FILE else 0
    if not file:
        raise CorruptError(f"a body cannot be at a place of kind {kind}.")
    return Place(file=file, first=cursor.number(_U64))


PLACE = Field(_write_place, _read_place)

LAYOUT: dict[int, tuple[type[Record], dict[str, Field]]] = {
    1: (Created, {"run": TEXT, "fingerprint": TEXT, "settings": TABLE}),
    2: (
        Founded,
        {"digests": _several(STATE_DIGEST, most=MAX_FRAGMENTS), "model": MODEL},
    ),
    3: (
        Joined,
        {
            "island": TEXT,
            "incarnation": U64,
            "slot": U64,
            "key_digest": SHORT,
            "nonce": SHORT,
        },
    ),
    4: (Left, {"island": TEXT, "incarnation": U64, "reason": TEXT}),
    5: (EpochSet, {"number": U64, "values": TABLE}),
    6: (
        Staged,
        {"fragment": U32, "round": U64, "island": TEXT, "digest": UPDATE_DIGEST},
    ),
    7: (
        Committed,
        {
            "digest_after": STATE_DIGEST,
            "epoch": U64,
            "place": PLACE,
            "agreed": AGREED,
        },
    ),
    8: (
        Recovered,
        {
            "fragment": U32,
            "round": U64,
            "digest": STATE_DIGEST,
            "outcomes": _several(AGREED, most=2),
        },
    ),
    9: (Ended, {"reason": TEXT}),
    10: (PauseSet, {"is_paused": FLAG}),
    11: (MoveSet, {"target": TEXT, "nonce": TEXT, "is_over": FLAG}),
    12: (
        Arrived,
        {
            "rounds": _several(U64, most=MAX_FRAGMENTS),
            "digests": _several(STATE_DIGEST, most=MAX_FRAGMENTS),
            "model": MODEL,
        },
    ),
    13: (
        Passed,
        {
            "fragment": U32,
            "bases": _several(STATE_DIGEST, most=MAX_BASES),
            "places": _several(PLACE, most=2),
            "outcomes": _several(AGREED, most=2),
        },
    ),
    14: (
        CountedSet,
        {
            "fragment": U32,
            "island": TEXT,
            "round": U64,
            "inner_steps": U64,
            "tokens": U64,
        },
    ),
    15: (ConstantKept, {"digest": CONSTANT_DIGEST, "size": U64}),
}
_NUMBER_OF = {kind: number for number, (kind, _) in LAYOUT.items()}
