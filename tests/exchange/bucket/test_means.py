"""The mean of a round is a function of bytes that are there: whoever makes it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import CorruptError
from atoll.exchange.bucket import keys
from atoll.exchange.bucket.documents import RosterDocument
from atoll.exchange.bucket.means import (
    OVERFLOWS,
    Mean,
    Pieces,
    Unverified,
    agreed,
    mean_of,
    owners,
    packed_mean,
    parse_mean,
    shards,
)
from atoll.protocol import judge_updates
from atoll.settings import RunSettings
from atoll.testing import vector_model
from atoll.weights import agree, lay_out, terms_of
from atoll.wire import (
    PIECE_ELEMENTS,
    FrameKind,
    Header,
    OuterValues,
    Verdict,
    with_body,
)

ELEMENTS = 2 * PIECE_ELEMENTS + 777
MODEL = vector_model({"w": (ELEMENTS,)})
SETTINGS = RunSettings.from_dict({"wire": {"up": "e3m0", "down": "int8"}})
(LAYOUT,) = lay_out(MODEL, SETTINGS)
TERMS = terms_of(LAYOUT, SETTINGS)
OUTER = OuterValues(optimizer="nesterov", lr=0.5, momentum=0.5)
BASE = b"b" * 16

Updates = dict[str, tuple[Header | None, np.ndarray]]


def update(name: str, seed: int, scale: float = 1e-2) -> tuple[Header, np.ndarray]:
    """Return an update of small random values."""
    values = np.random.default_rng(seed).standard_normal(ELEMENTS, np.float32)
    values *= np.float32(scale)
    body = np.empty(TERMS.up.body_bytes(ELEMENTS), np.uint8)
    TERMS.up.encode(values, body)
    header = Header(
        kind=FrameKind.UPDATE,
        run="run",
        fragment=0,
        round=1,
        island=name,
        incarnation=1,
        base=BASE,
        codec=TERMS.up.name,
        elements=ELEMENTS,
        norm=1.0,
    )
    return with_body(header, body), body


def roster_for(
    updates: dict[str, tuple[Header, np.ndarray]], *shard_owners: str
) -> RosterDocument:
    """Return the roster of a round in which all of them count."""
    roster = judge_updates(
        [header for header, _ in updates.values()],
        round=1,
        base=BASE,
        known_bases=(),
        norms={},
        window_of=lambda _: 1,
        counted=lambda island: None,
        settings=SETTINGS,
    )
    return RosterDocument(
        run="run",
        fragment=0,
        round=1,
        epoch=0,
        base=BASE,
        outer=OUTER,
        shards=shard_owners,
        roster=roster,
    )


def part(updates: dict[str, tuple[Header, np.ndarray]], pieces: Pieces) -> Updates:
    """Return the bytes of some pieces of each update."""
    begin, end = pieces.span(TERMS.up)
    return {name: (header, body[begin:end]) for name, (header, body) in updates.items()}


def all_means(
    document: RosterDocument, updates: dict[str, tuple[Header, np.ndarray]]
) -> list[Mean]:
    return [
        mean_of(document, number, pieces, part(updates, pieces), LAYOUT, TERMS)
        for number, pieces in enumerate(shards(document, ELEMENTS))
    ]


FOUR = {name: update(name, seed) for seed, name in enumerate("abcd")}


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4])
def test_shards_together_are_what_a_coordinator_agrees_on(count: int) -> None:
    """Header and body, whatever the number of shards."""
    document = roster_for(FOUR, *"abcd"[:count])
    header, body = agreed(document, all_means(document, FOUR), LAYOUT, TERMS.down)
    expected, expected_body = agree(
        LAYOUT,
        TERMS,
        document.roster,
        FOUR,
        run="run",
        fragment=0,
        round=1,
        base=BASE,
        outer=OUTER,
    )

    assert header == expected
    assert body.tobytes() == expected_body.tobytes()


@given(pieces=st.integers(1, 40), count=st.integers(0, 50))
def test_shards_have_every_piece_once(pieces: int, count: int) -> None:
    """In order, none of them empty, and no two differ by more than one."""
    document = replace(roster_for(FOUR), shards=tuple(f"i{n:02}" for n in range(count)))
    found = shards(document, pieces * PIECE_ELEMENTS - 5)

    assert [p for each in found for p in range(each.first, each.last)] == list(
        range(pieces)
    )
    sizes = [each.last - each.first for each in found]
    assert max(sizes) - min(sizes) <= 1 <= min(sizes)
    assert sum(each.size for each in found) == pieces * PIECE_ELEMENTS - 5


def test_no_mean_is_made_of_a_damaged_update() -> None:
    """Whoever meets it names its island; the other pieces of it make a mean."""
    document = roster_for(FOUR)
    (whole,) = shards(document, ELEMENTS)
    broken = dict(FOUR)
    header, body = FOUR["b"]
    begin, _ = Pieces(1, 2, ELEMENTS).span(TERMS.up)
    bad = body.copy()
    bad[begin + 5] ^= 1
    broken["b"] = (header, bad)
    with pytest.raises(Unverified) as told:
        mean_of(document, 0, whole, part(broken, whole), LAYOUT, TERMS)
    assert told.value.islands == ("b",)

    first = Pieces(0, 1, ELEMENTS)
    mean = mean_of(document, 0, first, part(broken, first), LAYOUT, TERMS)
    clean = mean_of(document, 0, first, part(FOUR, first), LAYOUT, TERMS)
    assert mean.body.tobytes() == clean.body.tobytes()


def sealed_fp32(name: str, values: np.ndarray) -> tuple[Header, np.ndarray]:
    """Return an update as somebody may have sealed it who does not use an encoder."""
    body, encoded = values.view(np.uint8), FOUR[name][0]
    header = replace(encoded, codec="fp32", body_bytes=0, pieces=())
    return with_body(header, body), body


@pytest.mark.parametrize("large", [0.0, 3e38])
def test_a_piece_that_verifies_but_does_not_decode_counts_as_zeros(
    large: float,
) -> None:
    """Also if values before it overflow, which makes the round void in both cases."""
    settings = RunSettings.from_dict({"wire": {"up": "fp32", "down": "fp32"}})
    terms, document = terms_of(LAYOUT, settings), roster_for(FOUR)
    (whole,) = shards(document, ELEMENTS)
    ones = np.ones(ELEMENTS, np.float32)
    broken, zeroed, other = ones.copy(), ones.copy(), ones.copy()
    broken[0] = other[0] = np.float32(large)
    broken[PIECE_ELEMENTS - 1] = np.nan
    zeroed[:PIECE_ELEMENTS] = 0.0
    rest = {"a": sealed_fp32("a", other)} | {
        name: sealed_fp32(name, ones) for name in ("c", "d")
    }
    means = [
        mean_of(
            document, 0, whole, {**rest, "b": sealed_fp32("b", mine)}, LAYOUT, terms
        )
        for mine in (broken, zeroed)
    ]

    assert [each.spoilt for each in means] == [("b",), ()]
    assert [each.overflows for each in means] == [large > 0.0] * 2
    assert means[0].body.tobytes() == means[1].body.tobytes()


@pytest.mark.parametrize("size", [0, 1, 1000])
def test_no_mean_is_made_of_an_update_that_is_missing_or_cut_off(size: int) -> None:
    """The roster counts it, so that a mean without it would be another one."""
    document = roster_for(FOUR)
    (whole,) = shards(document, ELEMENTS)
    given: Updates = part(FOUR, whole)
    given["c"] = (None if size == 0 else FOUR["c"][0], FOUR["c"][1][:size])

    with pytest.raises(Unverified, match="c"):
        mean_of(document, 0, whole, given, LAYOUT, TERMS)


def test_a_mean_that_overflows_anywhere_makes_the_round_void() -> None:
    """Everybody who reads that shard refuses the whole round."""
    document = roster_for(FOUR, "a", "b")
    first, second = all_means(document, FOUR)
    over = replace(second, overflows=True, digests=(), body=np.empty(0, np.uint8))
    header, body = agreed(document, [first, over], LAYOUT, TERMS.down)

    assert len(body) == header.elements == 0
    assert header.roster is not None
    assert {entry.verdict for entry in header.roster.entries} == {Verdict.REFUSED}
    assert {entry.reason for entry in header.roster.entries} == {OVERFLOWS}


def test_a_mean_survives_its_bytes_and_nothing_else_does() -> None:
    """Each part that is cut off, changed or of another round is refused."""
    document = roster_for(FOUR, "a", "b")
    pieces = shards(document, ELEMENTS)[1]
    mean = all_means(document, FOUR)[1]
    key = keys.mean(0, 1, 1)
    parse = partial(parse_mean, down=TERMS.down, key=key)
    data = b"".join(bytes(part) for part in packed_mean(mean, key))
    again = parse(memoryview(data), document, 1, pieces)
    assert again.body.tobytes() == mean.body.tobytes()

    for wrong in (data[:4], data[:40], data[:-1], data[:-1] + bytes([data[-1] ^ 1])):
        with pytest.raises(CorruptError):
            parse(memoryview(wrong), document, 1, pieces)
    for other in (replace(document, round=2), replace(document, base=b"c" * 16)):
        with pytest.raises(CorruptError):
            parse(memoryview(data), other, 1, pieces)
    with pytest.raises(CorruptError):
        parse(memoryview(data), document, 0, pieces)
    with pytest.raises(CorruptError, match="it is the object of 'rounds/0/1/mean/1'"):
        parse(memoryview(data), document, 1, pieces, key=keys.mean(0, 2, 1))


def test_every_bit_of_the_head_of_a_mean_is_guarded() -> None:
    """Its body is guarded by the digests in it."""
    document = roster_for(FOUR, "a", "b")
    pieces, key = shards(document, ELEMENTS)[1], keys.mean(0, 1, 1)
    size, head, body = packed_mean(all_means(document, FOUR)[1], key)
    for bit in range(8 * len(head)):
        bad = bytearray(head)
        bad[bit // 8] ^= 1 << bit % 8
        data = b"".join([size, bad, body])
        with pytest.raises(CorruptError):
            parse_mean(memoryview(data), document, 1, pieces, TERMS.down, key=key)


def test_three_read_everything_and_four_share_the_work() -> None:
    """Whoever departs makes no shard; a radial mean needs whole tensors."""
    roster = roster_for(FOUR).roster
    three = roster_for({name: FOUR[name] for name in "abc"}).roster

    assert owners(three, frozenset(), LAYOUT, TERMS) == ()
    assert owners(roster, frozenset(), LAYOUT, TERMS) == ("a", "b", "c", "d")
    assert owners(roster, frozenset("bd"), LAYOUT, TERMS) == ("a", "c")
    assert owners(roster, frozenset("abcd"), LAYOUT, TERMS) == ("a", "b", "c", "d")
    assert owners(roster, frozenset(), LAYOUT, replace(TERMS, merge="radial")) == ()


def test_gathered_updates_are_read_whole_while_they_are_smaller_than_their_mean() -> (
    None
):
    """Seven in e3m0 take 3.6 bytes per element, eight 4.1: those share the work."""
    terms = replace(TERMS, gathers=True)
    (header, body), names = update("a", 1), "abcdefgh"
    updates = {name: (replace(header, island=name), body) for name in names}
    seven = roster_for({name: updates[name] for name in names[:7]}).roster

    assert owners(seven, frozenset(), LAYOUT, terms) == ()
    assert owners(seven, frozenset(), LAYOUT, TERMS) == tuple(names[:7])
    assert owners(roster_for(updates).roster, frozenset(), LAYOUT, terms) == (
        tuple(names)
    )
