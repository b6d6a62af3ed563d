"""The roster of a round."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.errors import CorruptError, UsageError
from atoll.wire.roster import (
    MAX_ENTRIES,
    Roster,
    RosterEntry,
    Verdict,
    pack_roster,
    roster_bytes,
    unpack_roster,
)
from tests.wire.samples import an_entry

THREE = Roster(
    (
        an_entry(island="akureyri"),
        an_entry(island="tokyo-1", verdict=Verdict.LATE, digest=b"", weight=0),
        an_entry(island="ålesund", verdict=Verdict.REFUSED, reason="norm 91 above 10"),
    )
)

NAMES = st.text(
    st.characters(exclude_categories=("Cc", "Cf", "Cs", "Zl", "Zp"), codec="utf-8"),
    min_size=1,
    max_size=20,
).filter(lambda name: "/" not in name and name not in (".", ".."))
U64 = st.integers(0, 2**64 - 1)
U32 = st.integers(0, 2**32 - 1)


@st.composite
def entries(draw: st.DrawFn) -> RosterEntry:
    """Draw an entry that obeys every rule."""
    verdict = draw(st.sampled_from(Verdict))
    counted = verdict is Verdict.COUNTED
    return RosterEntry(
        island=draw(NAMES),
        incarnation=draw(U64),
        digest=draw(st.sampled_from([bytes(32)] if counted else [b"", b"d" * 32])),
        weight=draw(st.integers(int(counted), 2**64 - 1)),
        verdict=verdict,
        reason="norm" if verdict is Verdict.REFUSED else "",
        inner_steps=draw(U64),
        tokens=draw(U64),
        age=draw(U32),
        window=draw(U32),
        spans=draw(st.binary(max_size=40)),
    )


ROSTERS = st.lists(entries(), max_size=6, unique_by=lambda entry: entry.island).map(
    lambda drawn: Roster(tuple(sorted(drawn, key=lambda entry: entry.island)))
)


@settings(deadline=None)
@given(roster=ROSTERS)
def test_a_roster_survives_the_wire(roster: Roster) -> None:
    """What is unpacked equals what was packed."""
    assert unpack_roster(pack_roster(roster)) == roster


def test_the_order_of_a_roster_is_that_of_utf8_bytes() -> None:
    """Names sort by their bytes, so every island sums in the same order."""
    names = ["z", "Z", "\u00e5", "\uffee", "\U00010400"]
    by_bytes = sorted(names, key=str.encode)

    # U+10400 sorts after U+FFEE in UTF-8, though not in UTF-16.
    assert by_bytes == ["Z", "z", "\u00e5", "\uffee", "\U00010400"]
    assert Roster(tuple(an_entry(island=name) for name in by_bytes))


def test_an_entry_is_found_by_its_name() -> None:
    """`entry` gives what the roster says of an island, and None for a stranger."""
    assert [THREE.entry(e.island) for e in THREE.entries] == list(THREE.entries)
    assert THREE.entry("tokyo-2") is None
    assert Roster(()).entry("tokyo-1") is None


def test_counted_lists_only_what_is_in_the_mean() -> None:
    """Late and refused islands are in the roster, but not in its sum."""
    assert [entry.island for entry in THREE.counted] == ["akureyri"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"island": ""}, "island must be a name of 1 to 128 bytes, but is empty"),
        ({"island": "a/b"}, "island='a/b' must not contain '/'"),
        ({"island": ".."}, "must not contain '/' nor be '.' or '..'"),
        ({"island": "å" * 65}, "island has 130 bytes of UTF-8, above the limit of 128"),
        ({"island": "a\x1b[2J"}, r"contains '\\x1b', which is not printable"),
        ({"island": "a\u202eb"}, r"contains '\\u202e', which is not printable"),
        ({"island": "\ud800"}, "contains a surrogate"),
        ({"reason": "r" * 513}, "reason has 513 bytes of UTF-8, above the limit"),
        ({"digest": b"short"}, "has 5 bytes; it must have 0 or 32"),
        ({"weight": 2**64}, "weight=18446744073709551616 of roster entry 'tokyo-1'"),
        ({"tokens": -1}, "tokens=-1 of roster entry 'tokyo-1' must be from 0"),
        ({"weight": 0}, "verdict counted of roster entry 'tokyo-1' needs a digest"),
        ({"digest": b""}, "verdict counted of roster entry 'tokyo-1' needs a digest"),
        ({"age": 2**32}, "age=4294967296 of roster entry 'tokyo-1' must be from 0"),
        ({"window": -1}, "window=-1 of roster entry 'tokyo-1' must be from 0 to"),
        ({"spans": bytes(4097)}, "spans of roster entry .* have 4097 bytes, above"),
        ({"verdict": Verdict.REFUSED}, "verdict refused .* must come with a reason"),
    ],
)
def test_a_wrong_entry_cannot_be_built(
    changes: dict[str, object], message: str
) -> None:
    """Each rule of an entry names the value and the limit."""
    with pytest.raises(UsageError, match=message):
        an_entry(**changes)


@pytest.mark.parametrize("names", [("b", "a"), ("a", "a")])
def test_a_roster_lists_each_island_once_in_order(names: tuple[str, ...]) -> None:
    """A name out of order or a second time is refused."""
    with pytest.raises(UsageError, match=f"island 'a' follows '{names[0]}'"):
        Roster(tuple(an_entry(island=name) for name in names))


def test_a_roster_of_the_largest_size_survives_the_wire() -> None:
    """The largest roster is read in one pass; one entry more cannot be built."""
    many = tuple(an_entry(island=f"{number:05}") for number in range(MAX_ENTRIES))

    assert unpack_roster(pack_roster(Roster(many))) == Roster(many)
    with pytest.raises(UsageError, match="65537 entries is above the limit of 65536"):
        Roster((*many, an_entry(island="99999")))


def test_a_promise_of_many_entries_is_judged_before_any_is_read() -> None:
    """A count beyond the limit, or beyond the bytes there are, is refused at once."""
    with pytest.raises(CorruptError, match="65537 entries, above the limit of 65536"):
        unpack_roster(struct.pack("<I", MAX_ENTRIES + 1) + bytes(100))
    # 4 bytes of count and 65536 entries of at least 40 bytes.
    with pytest.raises(CorruptError, match="104 bytes ends before byte 2621444"):
        unpack_roster(struct.pack("<I", MAX_ENTRIES) + bytes(100))


def test_a_roster_out_of_order_is_corrupt() -> None:
    """Bytes are judged by the same rules, and are corrupt rather than misused."""
    first, second = (
        pack_roster(Roster((an_entry(island=name),)))[4:] for name in ("a", "b")
    )
    with pytest.raises(CorruptError, match="island 'a' follows 'b'"):
        unpack_roster(struct.pack("<I", 2) + second + first)


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (32, 4, "verdict 4 is not one of 1 to 3"),
        (35, 8, "tails=8 at 4 of a roster must be from 0 to 7"),
        (35, 1, "a roster of 83 bytes ends before byte 87"),
        (35, 4, "a roster of 83 bytes ends before byte 85"),
        (38, 1, "reserved bytes at 4 of a roster are not zero"),
        (40, 0xFF, "island is not UTF-8 at its byte 0"),
        (34, 31, "digest of roster entry 'tokyo-1' has 31 bytes"),
        (36, 1, "a roster of 83 bytes ends before byte 84"),
    ],
)
def test_a_wrong_entry_in_bytes_is_corrupt(at: int, value: int, message: str) -> None:
    """Each field of an entry is checked: the offsets are those of the page."""
    data = bytearray(pack_roster(Roster((an_entry(),))))
    data[4 + at] = value
    with pytest.raises(CorruptError, match=message):
        unpack_roster(bytes(data))


@pytest.mark.parametrize(
    ("tail", "more", "message"),
    [
        (struct.pack("<I", 0), 1, "age at 83 of a roster is 0, and must not be"),
        (struct.pack("<I", 0), 2, "window at 83 of a roster is 0, and must not be"),
        (struct.pack("<H", 0), 4, "spans at 83 of a roster is 0, and must not be"),
        (struct.pack("<H", 3) + b"ab", 4, "of 87 bytes ends before byte 88"),
        (struct.pack("<H4097s", 4097, b""), 4, "have 4097 bytes, above 4096"),
    ],
)
def test_a_wrong_tail_is_corrupt(tail: bytes, more: int, message: str) -> None:
    """A tail is written only with a value, and lies within its bounds."""
    data = bytearray(pack_roster(Roster((an_entry(),)))) + tail
    data[4 + 35] = more
    with pytest.raises(CorruptError, match=message):
        unpack_roster(bytes(data))


def test_an_entry_without_tails_keeps_its_bytes() -> None:
    """Each tail adds its own bytes, and an entry with none has 40 and its texts."""
    plain = len(pack_roster(Roster((an_entry(),))))
    # 4 bytes each for age and window, 2 + 3 for the spans.
    roster = Roster((an_entry(age=1, window=7, spans=b"abc"),))

    assert plain == 83
    assert len(pack_roster(roster)) == plain + 4 + 4 + 5 == roster_bytes(roster)


def test_nothing_follows_the_last_entry() -> None:
    """A trailing byte is refused."""
    with pytest.raises(CorruptError, match=r"bytes \d+ to \d+ follow the last entry"):
        unpack_roster(pack_roster(THREE) + b"\0")


@settings(deadline=None)
@given(data=st.binary(max_size=300))
def test_random_bytes_are_corrupt_or_canonical(data: bytes) -> None:
    """No bytes raise anything but CorruptError, and none have two readings."""
    try:
        roster = unpack_roster(data)
    except CorruptError:
        return
    assert pack_roster(roster) == data
