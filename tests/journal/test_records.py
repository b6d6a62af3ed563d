"""Records: one encoding each, and nothing else is read."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.data import Spans
from atoll.errors import CorruptError, UsageError
from atoll.journal import (
    ArrivedRecord,
    ClaimRecord,
    CommittedRecord,
    ConstantRecord,
    CountedRecord,
    CreatedRecord,
    DataRecord,
    EndedRecord,
    EndSetRecord,
    EpochRecord,
    FoundedRecord,
    HoldingRecord,
    JoinedRecord,
    LedgerRecord,
    LeftRecord,
    MoveRecord,
    PassedRecord,
    PauseRecord,
    RecoveredRecord,
    ReleasedRecord,
    StagedRecord,
    WindowRecord,
)
from atoll.journal.encoding import LAYOUT, decode, encode
from atoll.journal.records import (
    AgreedRecord,
    BodyLocation,
    Record,
)
from atoll.protocol import ModelSpec, TensorSpec
from atoll.weights import FragmentState
from atoll.wire import pack
from tests.journal.runs import a_created, an_agreed

STATE = FragmentState.found(np.zeros(3, np.float32), "nesterov")
AGREED = AgreedRecord(pack(an_agreed(STATE, 2, islands=3)[0]))
VOID = AgreedRecord(pack(an_agreed(STATE, 2, is_void=True)[0]))
MODEL = ModelSpec(
    (
        TensorSpec(name="wörd", shape=(3, 0, 7), dtype="bfloat16", role="parameter"),
        TensorSpec(name="n", shape=(), dtype="int64", role="constant", digest="ab"),
    )
)
RECORDS: list[Record] = [
    a_created(),
    FoundedRecord(model=MODEL, digests=(bytes(16), bytes(range(16)))),
    JoinedRecord(
        island="tokyo-1", incarnation=3, slot=7, key_digest=b"k" * 32, nonce=b"n"
    ),
    LeftRecord(island="an island with a name", incarnation=2**64 - 1, reason="lease"),
    EpochRecord(number=1, values={"outer.lr": 0.1, "run.end_rounds": None}),
    ConstantRecord(digest=bytes(range(32)), size=2**64 - 1),
    PauseRecord(is_paused=True),
    MoveRecord(target="s3://lagoon/run", nonce="ab", is_over=True),
    StagedRecord(fragment=2**32 - 1, round=9, island="é", digest=bytes(32)),
    CommittedRecord(
        agreed=AGREED, digest_after=bytes(16), epoch=4, location=BodyLocation()
    ),
    CommittedRecord(
        agreed=AGREED,
        digest_after=bytes(16),
        epoch=0,
        location=BodyLocation(file=3, first=99),
    ),
    CommittedRecord(agreed=VOID, digest_after=bytes(16), epoch=0, location=None),
    RecoveredRecord(fragment=2, round=8, digest=bytes(16), outcomes=(AGREED, VOID)),
    ArrivedRecord(
        model=MODEL, rounds=(0, 2**64 - 1), digests=(bytes(16), bytes(range(16)))
    ),
    PassedRecord(
        fragment=2,
        bases=(bytes(16), bytes(range(16))),
        outcomes=(AGREED, VOID),
        locations=(BodyLocation(file=3, first=99), None),
    ),
    CountedRecord(fragment=1, island="é", round=9, inner_steps=2**64 - 1, tokens=7),
    WindowRecord(fragment=1, island="é", window=2**31 - 1),
    DataRecord(rows=10**9, fingerprint="c0ffee"),
    ClaimRecord(island="é", number=7, packed=Spans([(0, 1024), (2048, 4096)]).pack()),
    ReleasedRecord(island="é"),
    LedgerRecord(
        is_open=True,
        rows=0,
        fingerprint="c0ffee",
        front=4096,
        free=Spans([(0, 7)]).pack(),
        counted=(Spans([(7, 9)]).pack(), b""),
        refused=(b"", b""),
    ),
    HoldingRecord(
        island="é",
        in_hand=Spans([(9, 4096)]).pack(),
        partly=b"",
        numbers=(3, 4),
        claims=(b"", Spans([(9, 4096)]).pack()),
    ),
    EndSetRecord(rounds=(5, 4)),
    EndSetRecord(),
    EndedRecord(reason="end_rounds"),
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
    with pytest.raises(CorruptError, match="are unused"):
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
            CreatedRecord,
            {"run": "a/b", "settings": {}, "fingerprint": ""},
            "must not contain",
        ),
        (FoundedRecord, {"model": MODEL, "digests": ()}, "0 fragments must be from 1"),
        (
            FoundedRecord,
            {"model": MODEL, "digests": (b"x",)},
            "1 bytes; it must have 16",
        ),
        (JoinedRecord, {"island": "", "incarnation": 1, "slot": 0}, "must be a name"),
        (
            JoinedRecord,
            {"island": "a", "incarnation": -1, "slot": 0},
            "incarnation=-1 must",
        ),
        (
            JoinedRecord,
            {"island": "a", "incarnation": 1, "slot": 0, "nonce": bytes(65)},
            "nonce has 65 bytes, above the limit of 64",
        ),
        (
            LeftRecord,
            {"island": "a", "incarnation": 1, "reason": "\n"},
            "not printable",
        ),
        (
            EpochRecord,
            {"number": 2**64, "values": {}},
            "number=18446744073709551616 must",
        ),
        (
            StagedRecord,
            {"fragment": 2**32, "round": 1, "island": "a", "digest": bytes(32)},
            "fragment=4294967296 must",
        ),
        (
            CommittedRecord,
            {
                "agreed": VOID,
                "digest_after": bytes(16),
                "epoch": 0,
                "location": BodyLocation(),
            },
            "unless it is void",
        ),
        (AgreedRecord, {"packed": b"short"}, "a header of 5 bytes must have 160"),
        (
            RecoveredRecord,
            {"fragment": 0, "round": 1, "digest": bytes(16), "outcomes": (VOID,) * 3},
            "3 outcomes must be at most 2",
        ),
        (
            ArrivedRecord,
            {"model": MODEL, "rounds": (1,), "digests": (bytes(16),) * 2},
            "1 rounds are not those of 2 fragments",
        ),
        (
            ArrivedRecord,
            {"model": MODEL, "rounds": (), "digests": ()},
            "0 fragments must be",
        ),
        (
            PassedRecord,
            {"fragment": 0, "bases": (bytes(16),) * 1025},
            "1025 bases must be at most 1024",
        ),
        (
            PassedRecord,
            {"fragment": 0, "bases": (), "outcomes": (VOID,) * 3},
            "3 outcomes must be at most 2",
        ),
        (
            PassedRecord,
            {
                "fragment": 0,
                "bases": (),
                "outcomes": (VOID,),
                "locations": (BodyLocation(),),
            },
            "unless it is void",
        ),
        (
            CountedRecord,
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
        encode(EpochRecord(number=1, values={"outer.lr": float("nan")}))
