"""Records to bytes and back: one encoding each, little-endian, bounded.

A payload is the number of its type, then the fields that `LAYOUT` lists for it. JSON is
canonical: keys sorted, no spaces, ASCII. A model's tensors are JSON: a row each of
name, shape, dtype, role, digest. Bytes that `encode` would not write are refused.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn, get_args

from atoll.errors import CorruptError, UsageError
from atoll.journal.records import (
    CONSTANT_DIGEST_BYTES,
    MAX_BASES,
    MAX_FRAGMENTS,
    STATE_DIGEST_BYTES,
    UPDATE_DIGEST_BYTES,
    AgreedRecord,
    ArrivedRecord,
    BodyLocation,
    CommittedRecord,
    ConstantRecord,
    CountedRecord,
    CreatedRecord,
    EndedRecord,
    EpochRecord,
    FoundedRecord,
    JoinedRecord,
    LeftRecord,
    MoveRecord,
    PassedRecord,
    PauseRecord,
    Record,
    RecoveredRecord,
    StagedRecord,
)
from atoll.protocol import ModelSpec, TensorSpec
from atoll.protocol.model import Role
from atoll.wire import MAX_HEADER_BYTES
from atoll.wire.text import decode_text

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
    _exactly(STATE_DIGEST_BYTES),
    _exactly(UPDATE_DIGEST_BYTES),
    _exactly(CONSTANT_DIGEST_BYTES),
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


def _agreed(packed: bytes) -> AgreedRecord:
    try:
        return AgreedRecord(packed)
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


def _write_location(location: BodyLocation | None) -> bytes:
    if location is None:
        return bytes([_NOWHERE])
    if location.file == 0:
        return bytes([_OWN_FILE])
    return bytes([_SHARED_FILE]) + _U64.pack(location.file) + _U64.pack(location.first)


def _read_location(cursor: RecordCursor) -> BodyLocation | None:
    kind = cursor.take(1)[0]
    if kind == _NOWHERE:
        return None
    if kind == _OWN_FILE:
        return BodyLocation()
    file = cursor.number(_U64) if kind == _SHARED_FILE else 0
    if not file:
        raise CorruptError(f"a body cannot be at a place of kind {kind}.")
    return BodyLocation(file=file, first=cursor.number(_U64))


LOCATION = RecordField(_write_location, _read_location)

LAYOUT: dict[int, tuple[type[Record], dict[str, RecordField]]] = {
    1: (CreatedRecord, {"run": TEXT, "fingerprint": TEXT, "settings": TABLE}),
    2: (
        FoundedRecord,
        {"digests": _several(STATE_DIGEST, max_items=MAX_FRAGMENTS), "model": MODEL},
    ),
    3: (
        JoinedRecord,
        {
            "island": TEXT,
            "incarnation": U64,
            "slot": U64,
            "key_digest": SHORT,
            "nonce": SHORT,
        },
    ),
    4: (LeftRecord, {"island": TEXT, "incarnation": U64, "reason": TEXT}),
    5: (EpochRecord, {"number": U64, "values": TABLE}),
    6: (
        StagedRecord,
        {"fragment": U32, "round": U64, "island": TEXT, "digest": UPDATE_DIGEST},
    ),
    7: (
        CommittedRecord,
        {
            "digest_after": STATE_DIGEST,
            "epoch": U64,
            "location": LOCATION,
            "agreed": AGREED,
        },
    ),
    8: (
        RecoveredRecord,
        {
            "fragment": U32,
            "round": U64,
            "digest": STATE_DIGEST,
            "outcomes": _several(AGREED, max_items=2),
        },
    ),
    9: (EndedRecord, {"reason": TEXT}),
    10: (PauseRecord, {"is_paused": FLAG}),
    11: (MoveRecord, {"target": TEXT, "nonce": TEXT, "is_over": FLAG}),
    12: (
        ArrivedRecord,
        {
            "rounds": _several(U64, max_items=MAX_FRAGMENTS),
            "digests": _several(STATE_DIGEST, max_items=MAX_FRAGMENTS),
            "model": MODEL,
        },
    ),
    13: (
        PassedRecord,
        {
            "fragment": U32,
            "bases": _several(STATE_DIGEST, max_items=MAX_BASES),
            "locations": _several(LOCATION, max_items=2),
            "outcomes": _several(AGREED, max_items=2),
        },
    ),
    14: (
        CountedRecord,
        {
            "fragment": U32,
            "island": TEXT,
            "round": U64,
            "inner_steps": U64,
            "tokens": U64,
        },
    ),
    15: (ConstantRecord, {"digest": CONSTANT_DIGEST, "size": U64}),
}
_NUMBER_OF = {kind: number for number, (kind, _) in LAYOUT.items()}
