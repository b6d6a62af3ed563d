"""Records: one encoding each, and nothing else is read."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import CorruptError, UsageError
from atoll.journal import (
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
    Recovered,
    Staged,
)
from atoll.journal.encoding import LAYOUT, decode, encode
from atoll.journal.records import Agreed, Place, Record
from atoll.protocol import ModelSpec, TensorSpec
from atoll.weights import FragmentState
from atoll.wire import pack
from tests.journal.runs import a_created, an_agreed

STATE = FragmentState.found(np.zeros(3, np.float32), "nesterov")
AGREED = Agreed(pack(an_agreed(STATE, 2, islands=3)[0]))
VOID = Agreed(pack(an_agreed(STATE, 2, is_void=True)[0]))
MODEL = ModelSpec(
    (
        TensorSpec(name="wörd", shape=(3, 0, 7), dtype="bfloat16", role="parameter"),
        TensorSpec(name="n", shape=(), dtype="int64", role="constant", digest="ab"),
    )
)
RECORDS: list[Record] = [
    a_created(),
    Founded(model=MODEL, digests=(bytes(16), bytes(range(16)))),
    Joined(island="tokyo-1", incarnation=3, slot=7, key_digest=b"k" * 32, nonce=b"n"),
    Left(island="an island with a name", incarnation=2**64 - 1, reason="lease"),
    EpochSet(number=1, values={"outer.lr": 0.1, "run.end_rounds": None}),
    ConstantKept(digest=bytes(range(32)), size=2**64 - 1),
    PauseSet(is_paused=True),
    MoveSet(target="s3://lagoon/run", nonce="ab", is_over=True),
    Staged(fragment=2**32 - 1, round=9, island="é", digest=bytes(32)),
    Committed(agreed=AGREED, digest_after=bytes(16), epoch=4, place=Place()),
    Committed(
        agreed=AGREED, digest_after=bytes(16), epoch=0, place=Place(file=3, first=99)
    ),
    Committed(agreed=VOID, digest_after=bytes(16), epoch=0, place=None),
    Recovered(fragment=2, round=8, digest=bytes(16), outcomes=(AGREED, VOID)),
    Arrived(model=MODEL, rounds=(0, 2**64 - 1), digests=(bytes(16), bytes(range(16)))),
    Passed(
        fragment=2,
        bases=(bytes(16), bytes(range(16))),
        outcomes=(AGREED, VOID),
        places=(Place(file=3, first=99), None),
    ),
    CountedSet(fragment=1, island="é", round=9, inner_steps=2**64 - 1, tokens=7),
    Ended(reason="end_rounds"),
]
EACH = pytest.mark.parametrize("record", RECORDS, ids=lambda r: type(r).__name__)


@EACH
def test_a_record_comes_back(record: Record) -> None:
    """What is encoded is decoded, and encoded again to the same bytes."""
    payload = encode(record)

    assert decode(payload) == record
    assert encode(decode(payload)) == payload


def test_every_type_has_an_example_here() -> None:
    """No type of record is left out of these tests."""
    assert {kind for kind, _ in LAYOUT.values()} == {type(r) for r in RECORDS}


@EACH
def test_a_record_cut_short_or_long_is_corrupt(record: Record) -> None:
    """Every shorter payload is refused, and so is a longer one."""
    payload = encode(record)

    for size in range(len(payload)):
        with pytest.raises(CorruptError):
            decode(payload[:size])
    with pytest.raises(CorruptError, match="say nothing"):
        decode(payload + b"\0")


@given(
    number=st.integers(0, 255),
    noise=st.binary(max_size=300),
)
def test_noise_is_corrupt_or_canonical(number: int, noise: bytes) -> None:
    """Nothing but CorruptError is raised, and what is read is written the same."""
    payload = bytes([number]) + noise
    try:
        record = decode(payload)
    except CorruptError:
        return
    assert encode(record) == payload


@given(data=st.data())
def test_a_flipped_byte_is_corrupt_or_canonical(data: st.DataObject) -> None:
    """A flip that the checksum missed would still not give a record two encodings."""
    payload = bytearray(encode(data.draw(st.sampled_from(RECORDS))))
    payload[data.draw(st.integers(0, len(payload) - 1))] ^= data.draw(
        st.integers(1, 255)
    )
    try:
        record = decode(bytes(payload))
    except CorruptError:
        return
    assert encode(record) == payload


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1}',
        '{"b":1,"a":2}',
        '{"a":1,"a":1}',
        '{"a":1.0e0}',
        '{"a":NaN}',
        '{"a":"\\u0061"}',
        "[1]",
        "{",
        "[" * 100_000,
        '{"a":' + "9" * 5000 + "}",
        "\ufeff{}",
    ],
    ids=lambda text: text[:12],
)
def test_json_has_one_form(text: str) -> None:
    """Spaces, order, repeats, other digits, depth and bulk are all refused."""
    data = text.encode()
    payload = bytes([5]) + bytes(8) + len(data).to_bytes(4, "little") + data

    with pytest.raises(CorruptError, match="JSON in the journal"):
        decode(payload)


@pytest.mark.parametrize(
    "rows",
    [
        {},
        [1],
        [["w", [1], "float32", "parameter"]],
        [["w", [-1], "float32", "parameter", ""]],
        [["w", [True], "float32", "parameter", ""]],
        [["w", 1, "float32", "parameter", ""]],
        [["w", [1], "float32", "weight", ""]],
        [[None, [1], "float32", "parameter", ""]],
        [["w", [1], "float32", [], ""]],
    ],
)
def test_a_model_is_rows_of_five(rows: object) -> None:
    """A model that no encoder writes is refused."""
    data = json.dumps(rows, sort_keys=True, separators=(",", ":")).encode()
    digests = (1).to_bytes(4, "little") + bytes(16)
    payload = bytes([2]) + digests + len(data).to_bytes(4, "little") + data

    with pytest.raises(CorruptError, match=r"no tensor|no list of tensors"):
        decode(payload)


def test_an_unknown_type_names_the_remedy() -> None:
    """A record of a later release is not skipped."""
    with pytest.raises(CorruptError, match=r"type 77 is unknown; .* Use the release"):
        decode(bytes([77]))


@pytest.mark.parametrize(
    ("kind", "values", "match"),
    [
        (
            Created,
            {"run": "a/b", "settings": {}, "fingerprint": ""},
            "must not contain",
        ),
        (Founded, {"model": MODEL, "digests": ()}, "0 fragments must be from 1"),
        (Founded, {"model": MODEL, "digests": (b"x",)}, "1 bytes; it must have 16"),
        (Joined, {"island": "", "incarnation": 1, "slot": 0}, "must be a name"),
        (Joined, {"island": "a", "incarnation": -1, "slot": 0}, "incarnation=-1 must"),
        (
            Joined,
            {"island": "a", "incarnation": 1, "slot": 0, "nonce": bytes(65)},
            "nonce has 65 bytes, above the limit of 64",
        ),
        (Left, {"island": "a", "incarnation": 1, "reason": "\n"}, "not printable"),
        (EpochSet, {"number": 2**64, "values": {}}, "number=18446744073709551616 must"),
        (
            Staged,
            {"fragment": 2**32, "round": 1, "island": "a", "digest": bytes(32)},
            "fragment=4294967296 must",
        ),
        (
            Committed,
            {"agreed": VOID, "digest_after": bytes(16), "epoch": 0, "place": Place()},
            "unless it is void",
        ),
        (Agreed, {"packed": b"short"}, "a header of 5 bytes must have 160"),
        (
            Recovered,
            {"fragment": 0, "round": 1, "digest": bytes(16), "outcomes": (VOID,) * 3},
            "3 outcomes must be at most 2",
        ),
        (
            Arrived,
            {"model": MODEL, "rounds": (1,), "digests": (bytes(16),) * 2},
            "1 rounds are not those of 2 fragments",
        ),
        (Arrived, {"model": MODEL, "rounds": (), "digests": ()}, "0 fragments must be"),
        (
            Passed,
            {"fragment": 0, "bases": (bytes(16),) * 1025},
            "1025 bases must be at most 1024",
        ),
        (
            Passed,
            {"fragment": 0, "bases": (), "outcomes": (VOID,) * 3},
            "3 outcomes must be at most 2",
        ),
        (
            Passed,
            {"fragment": 0, "bases": (), "outcomes": (VOID,), "places": (Place(),)},
            "unless it is void",
        ),
        (
            CountedSet,
            {"fragment": 0, "island": "", "round": 1, "inner_steps": 1, "tokens": 1},
            "must be a name",
        ),
    ],
)
def test_a_wrong_record_cannot_be_made(
    kind: Callable[..., object], values: dict[str, object], match: str
) -> None:
    """What could not be read back is refused before it is written."""
    with pytest.raises(UsageError, match=match):
        kind(**values)


def test_what_json_cannot_say_is_refused() -> None:
    """A value that JSON has no form for is a usage error, with the value."""
    with pytest.raises(UsageError, match="cannot be written as JSON"):
        encode(EpochSet(number=1, values={"outer.lr": float("nan")}))
