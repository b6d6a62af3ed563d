"""Frames: what is packed is unpacked, and what is wrong cannot be built."""

from __future__ import annotations

import re
import struct
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.errors import CorruptError, UsageError
from atoll.wire.codecs import codec
from atoll.wire.digests import PIECE_ELEMENTS, piece_digests
from atoll.wire.files import read_frame, read_header
from atoll.wire.frame import (
    FIXED,
    PREFIX,
    PREFIX_BYTES,
    FixedFields,
    FramePrefix,
    frame_bytes,
    header_length,
    pack,
    unpack,
    update_digest,
    verify_body,
    verify_piece,
    with_body,
)
from atoll.wire.header import FrameKind, Header, OuterValues, TrainingProgress
from atoll.wire.roster import Roster, Verdict, as_reason, reason_fault
from tests.wire.samples import (
    NESTEROV,
    a_gathered,
    a_state,
    an_agreed,
    an_entry,
    an_update,
    body_of,
    sealed,
)
from tests.wire.test_roster import NAMES, ROSTERS, U64

PAGE = Path(__file__).parents[2] / "docs" / "wire-format.md"
FP32 = st.floats(0.0, 2.0**20, width=32).filter(lambda x: str(x) != "-0.0")
SHARES = st.floats(2.0**-40, 1.0, width=32)
ASYNC: dict[str, Any] = {"share": 0.5, "buffer": 4}
NORMS = st.floats(0.0, allow_infinity=False).filter(lambda x: str(x) != "-0.0")
CODECS = st.sampled_from(["fp32", "bf16", "int8", "e3m0", "topk-2bit"])


@st.composite
def updates(draw: st.DrawFn) -> Header:
    """Draw a sealed update, departing or refused or neither."""
    is_refused = draw(st.booleans())
    return sealed(
        Header(
            kind=draw(st.sampled_from([FrameKind.UPDATE, FrameKind.DEPARTING])),
            run=draw(NAMES),
            fragment=draw(st.integers(0, 2**32 - 1)),
            round=draw(U64),
            island=draw(NAMES),
            incarnation=draw(U64),
            epoch=draw(U64),
            base=draw(st.binary(min_size=16, max_size=16)),
            codec=draw(CODECS),
            seed=draw(U64),
            elements=0 if is_refused else draw(st.integers(1, 9000)),
            weight=draw(st.integers(0 if is_refused else 1, 2**64 - 1)),
            norm=draw(NORMS),
            progress=TrainingProgress(
                inner_steps=draw(U64), tokens=draw(U64), cursor=draw(st.binary())
            ),
            refused="not finite" if is_refused else "",
        )
    )


@st.composite
def agreed_frames(draw: st.DrawFn) -> Header:
    """Draw a sealed agreed frame, void when nobody counted."""
    roster = draw(ROSTERS)
    optimizer = draw(st.sampled_from(["nesterov", "heavy_ball", "sgd", "adam"]))
    is_async = bool(roster.counted) and optimizer in ("nesterov", "sgd")
    buffer = draw(st.integers(0, 2**16)) if is_async else 0
    return sealed(
        an_agreed(
            codec=draw(CODECS),
            elements=draw(st.integers(1, 9000)) if roster.counted else 0,
            outer=OuterValues(
                optimizer=optimizer,
                lr=draw(FP32),
                momentum=0.0 if optimizer == "sgd" else draw(FP32),
                share=draw(SHARES) if buffer else 0.0,
                buffer=buffer,
            ),
            roster=roster,
        )
    )


@settings(deadline=None)
@given(header=updates() | agreed_frames())
def test_a_header_survives_the_wire(header: Header) -> None:
    """What is unpacked equals what was packed, and packs to the same bytes."""
    data = pack(header)

    assert unpack(data) == header
    assert pack(unpack(data)) == data
    assert header_length(data[:PREFIX_BYTES]) == len(data)


@pytest.mark.parametrize(
    ("optimizer", "arrays"),
    [("sgd", 1), ("nesterov", 2), ("heavy_ball", 2), ("adam", 3)],
)
def test_a_state_holds_the_anchor_and_its_moments(optimizer: str, arrays: int) -> None:
    """A state has one array for the anchor and one for each moment, all alike."""
    outer = OuterValues(optimizer=optimizer, lr=0.5, momentum=0.0, count=4)
    header = sealed(a_state(outer=outer, elements=7 * arrays))

    assert unpack(pack(header)) == header
    if arrays > 1:
        with pytest.raises(
            UsageError, match=f"must be a positive multiple of {arrays}"
        ):
            a_state(outer=outer, elements=7 * arrays + 1)


def test_the_page_and_the_layout_agree() -> None:
    """Names, offsets and sizes in docs/wire-format.md are those of the code."""
    page = PAGE.read_text().split("## The fixed part")[1].split("##")[0]
    said = re.findall(r"^ {4}(\d+) +(\d+) +(\w+)", page, flags=re.MULTILINE)
    formats = re.findall(r"\d*[a-zA-Z]", PREFIX.format + FIXED.format)
    built, at = [], 0
    for name, form in zip(
        FramePrefix._fields + FixedFields._fields, formats, strict=True
    ):
        size = struct.calcsize("<" + form)
        built.append((str(at), str(size), name.removesuffix("_too")))
        at += size

    assert said == built


def test_a_frame_without_its_body_cannot_be_packed() -> None:
    """A header that was never sealed is refused, and says what is missing."""
    message = (
        r"update frame of island 'tokyo-1' \(fragment 2, round 7\) has no body yet"
    )
    for header in (an_update(), an_update(elements=0)):
        with pytest.raises(UsageError, match=message):
            pack(header)
        with pytest.raises(UsageError, match="only a sealed update has"):
            update_digest(header)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"run": ""}, "run must be a name of 1 to 128 bytes, but is empty"),
        ({"run": "a/b"}, "run='a/b' must not contain '/'"),
        ({"island": ""}, "an update must name its island"),
        ({"island": "a\nb"}, r"island='a\\nb' contains '\\n', which is not printable"),
        ({"fragment": 2**32}, "fragment=4294967296 must be from 0 to 4294967295"),
        ({"fragment": -1}, "fragment=-1 must be from 0"),
        ({"round": 2**64}, "round=18446744073709551616 must be from 0"),
        ({"incarnation": -1}, "incarnation=-1 must be from 0"),
        ({"epoch": -1}, "epoch=-1 must be from 0"),
        ({"seed": 2**64}, "seed=18446744073709551616 must be from 0"),
        ({"elements": -1}, "elements=-1 must be from 0"),
        ({"base": b"short"}, "base has 5 bytes; it must have 16"),
        ({"codec": "zip"}, "zip"),
        ({"weight": 0}, "weight=0 must be at least 1 in an update that is not refused"),
        ({"norm": float("nan")}, "norm=nan must be finite and not negative"),
        ({"norm": float("inf")}, "norm=inf must be finite and not negative"),
        ({"norm": -1.0}, "norm=-1.0 must be finite and not negative"),
        ({"norm": -0.0}, "norm=-0.0 must be finite and not negative"),
        ({"refused": "norm"}, "elements=5 must be 0 in an update that is refused"),
        ({"refused": "r" * 513}, "refused has 513 bytes of UTF-8, above the limit"),
        ({"outer": NESTEROV}, "an update must carry neither outer values nor a roster"),
        ({"roster": Roster(())}, "an update must carry neither outer values nor a"),
        ({"body_bytes": 9}, "body_bytes=9, but 5 elements in bf16 must take 10"),
        ({"body_bytes": 10}, "0 pieces are listed, but 5 elements must have 1"),
        ({"body_bytes": 10, "pieces": (b"x",)}, "each piece digest must have 32 bytes"),
    ],
)
def test_a_wrong_update_cannot_be_built(
    changes: dict[str, object], message: str
) -> None:
    """Each rule of an update names the value and the limit."""
    with pytest.raises(UsageError, match=message):
        an_update(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"roster": None}, "the agreed frame must carry its roster"),
        ({"outer": None}, "the agreed frame must carry its outer values"),
        ({"outer": replace(NESTEROV, count=3)}, "count=3 must be 0 in the agreed"),
        ({"island": "a"}, "island='a' and incarnation=0 must be empty in the agreed"),
        ({"incarnation": 1}, "incarnation=1 must be empty in the agreed"),
        (
            {"progress": TrainingProgress(tokens=1)},
            "progress and refused must be empty in the",
        ),
        ({"refused": "norm"}, "progress and refused must be empty in the agreed"),
        ({"elements": 0}, "elements=0 with 1 counted islands"),
        ({"roster": Roster(())}, "elements=5 with 0 counted islands"),
        (
            {"outer": OuterValues(**ASYNC, optimizer="adam", lr=1.0, momentum=0.5)},
            "buffer=4 must be 0 with adam",
        ),
        (
            {
                "outer": replace(NESTEROV, **ASYNC),
                "elements": 0,
                "roster": Roster(()),
            },
            "buffer=4 must be 0 in a void round, which has no mean",
        ),
    ],
)
def test_a_wrong_agreed_frame_cannot_be_built(
    changes: dict[str, object], message: str
) -> None:
    """Each rule of an agreed frame names the value and the limit."""
    with pytest.raises(UsageError, match=message):
        an_agreed(**changes)


@pytest.mark.parametrize("name", ["fp32", "bf16", "int8", "e3m0", "topk-2bit"])
@pytest.mark.parametrize("elements", [2**18 + 65, 2**19])
def test_a_gathered_outcome_has_the_pieces_of_its_updates(
    name: str, elements: int
) -> None:
    """Each body has its own pieces, and a damaged one is found in its place."""
    values = np.arange(elements, dtype=np.float32)
    bodies = []
    for factor in (1, 2) if name != "fp32" else (1,):
        body = body_of(name, elements)
        codec(name).encode(values * np.float32(factor), body)
        bodies.append(body)
    entries = [an_entry(island=f"i{number}") for number in range(len(bodies))]
    header = with_body(
        an_agreed(
            codec=name,
            elements=elements,
            gathered="trimmed",
            roster=Roster(tuple(entries)),
        ),
        *bodies,
    )
    whole = np.concatenate(bodies)
    again = unpack(pack(header))

    assert again == header
    assert header.pieces == tuple(
        piece for body in bodies for piece in piece_digests(codec(name), elements, body)
    )
    assert [
        header.piece_range(0)[0],
        header.piece_range(len(header.pieces) - 1)[1],
    ] == [
        0,
        len(whole),
    ]
    verify_body(again, whole)
    for index in range(len(header.pieces)):
        start, end = header.piece_range(index)
        verify_piece(header, index, whole[start:end])
    whole[-1] ^= 1
    with pytest.raises(CorruptError, match=f"piece {len(header.pieces) - 1} of the"):
        verify_body(again, whole)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gathered": "sum"}, "gathered='sum' must be one of mean, radial, trimmed"),
        ({"roster": None}, "gathered='mean' must be empty in the agreed frame: only"),
        ({"roster": Roster(())}, "0 updates of 5 elements in bf16 must not be gath"),
        ({"codec": "fp32"}, "2 updates of 5 elements in fp32 must not be gathered: "),
        (
            # 2^40 elements have 2^22 pieces each.
            {"codec": "topk-2bit", "elements": 2**40},
            "together they must take at most .*, and have at most 1048576 pieces",
        ),
        ({"body_bytes": 10}, "body_bytes=10, but 2 times 5 elements in bf16 must"),
        ({"body_bytes": 20}, "0 pieces are listed, but 2 times 5 elements must have 2"),
    ],
)
def test_a_wrong_gathered_outcome_cannot_be_built(
    changes: dict[str, object], message: str
) -> None:
    """Each rule of gathered bodies names the values and the limits."""
    with pytest.raises(UsageError, match=message):
        a_gathered(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"roster": Roster(())}, "the state frame must carry no roster"),
        ({"outer": None}, "the state frame must carry its outer values"),
        ({"outer": replace(NESTEROV, **ASYNC)}, "buffer=4 must be 0 in the state"),
        ({"codec": "bf16"}, "codec='bf16' must be 'fp32' in the state frame"),
        ({"elements": 0}, "elements=0 must be a positive multiple of 2"),
        ({"incarnation": 1}, "incarnation=1 must be 0 without an island"),
        (
            {"progress": TrainingProgress(cursor=b"c")},
            "must be empty in the state frame",
        ),
    ],
)
def test_a_wrong_state_cannot_be_built(
    changes: dict[str, object], message: str
) -> None:
    """Each rule of a state names the value and the limit."""
    with pytest.raises(UsageError, match=message):
        a_state(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer": "lion"}, "'lion' is unknown to frames. Known are adam, heavy_"),
        ({"lr": 0.1}, "lr=0.1 must be finite, not negative and exact in fp32"),
        ({"lr": -0.5}, "lr=-0.5 must be finite, not negative and exact in fp32"),
        ({"momentum": 1e300}, r"momentum=1e\+300 must be finite"),
        ({"momentum": float("nan")}, "momentum=nan must be finite"),
        ({"count": -1}, "count=-1 must be from 0"),
        ({"optimizer": "sgd"}, "momentum=0.875 must be 0 with sgd"),
        ({"buffer": 65537, "share": 1.0}, "buffer=65537 must be from 0 to 65536"),
        ({"buffer": 1, "share": 1.5}, "share=1.5 must be from 0 to 1 and exact in"),
        ({"buffer": 1, "share": 0.1}, "share=0.1 must be from 0 to 1 and exact in"),
        ({"buffer": 1}, "share=0.0 with buffer=1: both are 0 in a synchronous run"),
        ({"share": 0.5}, "share=0.5 with buffer=0: both are 0 in a synchronous run"),
    ],
)
def test_wrong_outer_values_cannot_be_built(
    changes: dict[str, object], message: str
) -> None:
    """The outer step's values are those of fp32, so that all apply the same."""
    with pytest.raises(UsageError, match=message):
        replace(NESTEROV, **changes)  # type: ignore[arg-type]


def test_wrong_progress_cannot_be_built() -> None:
    """Counters fit in 64 bits, and a cursor in 4096 bytes."""
    with pytest.raises(UsageError, match="tokens=-1 must be from 0"):
        TrainingProgress(tokens=-1)
    with pytest.raises(UsageError, match="4097 bytes is above the limit of 4096"):
        TrainingProgress(cursor=bytes(4097))


@settings(deadline=None)
@given(text=st.text(max_size=700))
def test_any_text_can_be_made_a_reason(text: str) -> None:
    """`as_reason` gives what a frame can carry, whatever an error said."""
    assert reason_fault(as_reason(text), field="reason") is None
    assert as_reason("norm 91 above 10") == "norm 91 above 10"


def test_a_body_is_verified_piece_by_piece() -> None:
    """A wrong byte is found in its own piece, which is named; the others pass."""
    elements = 2 * PIECE_ELEMENTS + 5
    body = body_of("bf16", elements)
    header = with_body(an_update(elements=elements), body)
    verify_body(header, body)
    body[2 * PIECE_ELEMENTS] = 1  # bf16 has two bytes per element: piece 1 starts here

    verify_piece(header, 0, body[: 2 * PIECE_ELEMENTS])
    verify_piece(header, 2, body[4 * PIECE_ELEMENTS :])
    message = (
        r"piece 1 of the update frame of island 'tokyo-1' \(fragment 2, round 7\), "
        "bytes 524288 to 1048576 of the body, does not match its digest"
    )
    with pytest.raises(CorruptError, match=message):
        verify_body(header, body)


def test_a_body_of_another_length_does_not_verify() -> None:
    """A body or piece that is too short is refused with both lengths."""
    header = sealed(an_update())
    with pytest.raises(CorruptError, match="has 9 bytes instead of 10"):
        verify_body(header, bytes(9))
    with pytest.raises(CorruptError, match=r"piece 0 .* has 11 bytes instead of 10"):
        verify_piece(header, 0, bytes(11))
    with pytest.raises(
        UsageError, match="index=1 must be from 0 to below 1, the number"
    ):
        verify_piece(header, 1, b"")


def test_an_update_digest_is_the_one_of_the_page() -> None:
    """The digest built by hand from docs/wire-format.md is the one we compute."""
    by_hand = blake3(
        b"atoll update v1\0"
        + struct.pack("<IQ", 2, 7)
        + bytes(range(16))
        + struct.pack("<QQQ", 9, 700, 5000)
        + struct.pack("<BQQd", 2, 5, 0, 1.25)
        + b"\x06\0lagoon"
        + b"\x07\0tokyo-1"
        + b"\x06\0row 12"
        + b"\0\0"
        + b"\x01\0\0\0"
        + blake3(bytes(10)).digest()
    )
    assert update_digest(sealed(an_update())) == by_hand.digest()


def test_a_header_that_is_sealed_again_forgets_the_first_body() -> None:
    """What was worked out for one body is not believed of another."""
    once = sealed(an_update())
    first = update_digest(once), frame_bytes(once)

    again = with_body(once, np.ones(10, np.uint8))

    assert update_digest(again) != first[0]
    assert frame_bytes(again) == first[1]
    assert again == replace(once, pieces=again.pieces)
    with pytest.raises(UsageError, match="10 bytes cannot hold 6 elements"):
        with_body(an_update(elements=6), bytes(10))


@pytest.mark.parametrize(
    "changes", [{"kind": FrameKind.DEPARTING}, {"incarnation": 4}, {"epoch": 2}]
)
def test_the_same_work_sent_again_is_the_same_update(
    changes: dict[str, object],
) -> None:
    """Leaving, a restart and a new epoch do not change an update's identity."""
    again = sealed(an_update(**changes))
    assert update_digest(again) == update_digest(sealed(an_update()))


def test_any_other_work_is_another_update() -> None:
    """Every field that an update digest covers changes it."""
    others: list[dict[str, object]] = [
        {},
        {"run": "reef"},
        {"fragment": 3},
        {"round": 8},
        {"island": "tokyo-2"},
        {"base": bytes(16)},
        {"weight": 10},
        {"progress": TrainingProgress(inner_steps=701, tokens=5000, cursor=b"row 12")},
        {"progress": TrainingProgress(inner_steps=700, tokens=5001, cursor=b"row 12")},
        {"progress": TrainingProgress(inner_steps=700, tokens=5000, cursor=b"row 13")},
        {"codec": "bf16-stochastic"},
        {"seed": 1},
        {"elements": 6},
        {"norm": 1.5},
        {"elements": 0, "refused": "not finite"},
        {"elements": 0, "refused": "not finite", "run": "lagoont", "island": "okyo-1"},
    ]
    digests = {update_digest(sealed(an_update(**changes))) for changes in others}
    other_body = np.ones(10, dtype=np.uint8)
    digests.add(update_digest(with_body(an_update(), other_body)))

    assert len(digests) == len(others) + 1


def test_limits_are_judged_by_the_prefix() -> None:
    """A reader's own limits refuse a frame before anything more is read."""
    data = pack(sealed(an_update(elements=1000)))
    prefix = data[:PREFIX_BYTES]

    assert header_length(prefix, max_header_bytes=len(data), max_body_bytes=2000)
    with pytest.raises(
        CorruptError, match=f"header_bytes={len(data)} must be from 193"
    ):
        header_length(prefix, max_header_bytes=len(data) - 1)
    with pytest.raises(
        CorruptError, match="body_bytes=2000 is above the limit of 1999"
    ):
        unpack(data, max_body_bytes=1999)


def test_frame_bytes_are_those_of_header_and_body() -> None:
    """What is counted as sent is what is written."""
    header = sealed(an_update())
    assert frame_bytes(header) == len(pack(header)) + 10


def test_a_frame_is_read_from_a_file_by_pieces() -> None:
    """A body of two pieces is read back whole."""
    elements = PIECE_ELEMENTS + 1
    body = np.arange(codec("bf16").body_bytes(elements), dtype=np.uint32).astype(
        np.uint8
    )
    header = with_body(an_update(elements=elements), body)

    read, read_body = read_frame(BytesIO(pack(header) + bytes(body)))

    assert read == header
    assert np.array_equal(read_body, body)


def test_a_file_that_ends_early_or_late_is_corrupt() -> None:
    """A missing byte and a byte too many are both found."""
    header = sealed(an_update())
    data = pack(header) + bytes(10)

    assert read_header(BytesIO(data)) == header
    with pytest.raises(CorruptError, match=r"piece 0 .* has 9 bytes instead of 10"):
        read_frame(BytesIO(data[:-1]))
    with pytest.raises(CorruptError, match="bytes follow the body of the update frame"):
        read_frame(BytesIO(data + b"\0"))


def test_a_late_and_a_refused_island_make_a_round_void() -> None:
    """An outcome in which nobody counted has a roster, and no body."""
    roster = Roster(
        (
            an_entry(island="a", verdict=Verdict.LATE, digest=b"", weight=0),
            an_entry(island="b", verdict=Verdict.REFUSED, reason="base"),
        )
    )
    void = sealed(an_agreed(elements=0, roster=roster))

    assert void.body_bytes == 0
    assert unpack(pack(void)) == void


@given(header=updates() | agreed_frames())
def test_the_size_of_a_frame_is_known_without_packing_it(header: Header) -> None:
    """As many bytes as are written, for any header."""
    assert frame_bytes(header) == len(pack(header)) + header.body_bytes
