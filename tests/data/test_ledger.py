"""The ledger of rows: who holds them, what counted, and that nothing is lost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.data import DataSpec, RowLedger, Spans
from atoll.data.ledger import KEPT_CLAIMS
from atoll.errors import Refused, UsageError
from atoll.wire import Roster, RosterEntry, Verdict


def ledger_of(
    rows: int | None = 100, *, unit_rows: int = 10, passes: int = 1, fragments: int = 1
) -> RowLedger:
    ledger = RowLedger(unit_rows=unit_rows, passes=passes, num_fragments=fragments)
    return ledger.opened(DataSpec(rows=rows))


def roster_of(
    counted: dict[str, Spans], refused: dict[str, Spans] | None = None
) -> Roster:
    entries = [
        RosterEntry(
            island=island,
            incarnation=1,
            digest=b"d" * 32,
            weight=1,
            verdict=verdict,
            reason="norm: too large" if verdict is Verdict.REFUSED else "",
            spans=spans.pack(),
        )
        for verdict, by_island in (
            (Verdict.COUNTED, counted),
            (Verdict.REFUSED, refused or {}),
        )
        for island, spans in by_island.items()
    ]
    return Roster(tuple(sorted(entries, key=lambda entry: entry.island.encode())))


def claim(
    ledger: RowLedger, island: str, *, want: int = 1, num_live: int = 1
) -> RowLedger:
    spans = ledger.chosen(want, num_live=num_live)
    return ledger.claimed(island, ledger.last_claim(island) + 1, spans)


def test_units_are_dealt_from_the_front() -> None:
    """Claims get the lowest units that nobody has had, and hold them."""
    ledger = claim(claim(ledger_of(), "a", want=2), "b")

    assert list(ledger.holdings["a"]) == [(0, 20)]
    assert list(ledger.holdings["b"]) == [(20, 30)]
    assert ledger.front == 30
    assert ledger.counts.in_hand == 30
    assert ledger.counts.free == 70


def test_no_unit_is_in_two_passes() -> None:
    """The last unit of a pass is short, and the next pass begins a new one."""
    # 25 rows in units of 10: 10, 10, 5, and again.
    ledger = ledger_of(25, passes=2)
    for _ in range(4):
        ledger = claim(ledger, "a")

    spans = [list(spans) for _, spans in ledger.claims["a"]]
    assert spans == [[(0, 10)], [(10, 20)], [(20, 25)], [(25, 35)]]


def test_a_claim_near_the_end_gets_less() -> None:
    """An island that asks for much leaves something to the others."""
    # 10 units left, 2 live islands: at most 10 // 4 = 2 at once.
    assert len(ledger_of().chosen(8, num_live=2)) == 20
    assert len(ledger_of().chosen(8, num_live=9)) == 10
    assert len(ledger_of(passes=0).chosen(8, num_live=9)) == 80


def test_a_repeated_claim_gets_the_same_rows() -> None:
    """A number that is known has its answer; one that is too old is refused."""
    ledger = ledger_of(10_000)
    for _ in range(KEPT_CLAIMS + 1):
        ledger = claim(ledger, "a")

    assert ledger.answered("a", KEPT_CLAIMS + 2) is None
    assert ledger.answered("a", 2) == Spans([(10, 20)])
    with pytest.raises(Refused, match="Claim 1 of island 'a' is not kept: its last"):
        ledger.answered("a", 1)


def test_returned_rows_are_dealt_before_new_ones() -> None:
    """The rows of an island that has gone come first, whole units or not."""
    ledger = claim(claim(ledger_of(), "a", want=2), "b")
    ledger = ledger.settled(0, roster_of({"a": Spans([(0, 4)])}))
    ledger = ledger.released("a")

    assert ledger.free == Spans([(4, 20)])
    assert ledger.chosen(1) == Spans([(4, 10)])
    assert ledger.chosen(3) == Spans([(4, 20), (30, 40)])


def test_counted_rows_of_an_island_that_goes_are_not_dealt_again() -> None:
    """What one of two fragments has counted stays out, and is partly trained."""
    ledger = claim(ledger_of(fragments=2), "a")
    ledger = ledger.settled(0, roster_of({"a": Spans([(0, 4)])}))
    ledger = ledger.released("a")

    assert ledger.counts.partly == 4
    assert ledger.states.partly_of == {"a": Spans([(0, 4)])}
    assert ledger.free == Spans([(4, 10)])
    assert ledger.answered("a", 1) == Spans()


def test_a_row_is_trained_when_every_fragment_has_it() -> None:
    """A row that one fragment has counted is in hand until the other has too."""
    ledger = claim(ledger_of(fragments=2), "a")

    ledger = ledger.settled(0, roster_of({"a": Spans([(0, 6)])}))
    assert (ledger.counts.trained, ledger.counts.in_hand) == (0, 10)

    ledger = ledger.settled(1, roster_of({"a": Spans([(0, 5)])}))
    assert (ledger.counts.trained, ledger.counts.in_hand) == (5, 5)
    assert ledger.holdings["a"] == Spans([(5, 10)])


def test_a_refused_row_stays_in_hand_for_the_other_fragments() -> None:
    """What one fragment refuses may count in another: it is partly trained then."""
    ledger = claim(ledger_of(fragments=2), "a")
    ledger = ledger.settled(0, roster_of({}, {"a": Spans([(0, 6)])}))

    assert ledger.counts.refused == 6
    assert ledger.fault("a", 1, Spans([(0, 6)]).pack()) == ""

    ledger = ledger.settled(1, roster_of({"a": Spans([(0, 6)])}))
    assert (ledger.counts.refused, ledger.counts.partly) == (0, 6)
    assert ledger.holdings["a"] == Spans([(6, 10)])


def test_rows_of_another_island_are_no_part_of_an_update() -> None:
    """An update that names rows which its island does not hold is at fault."""
    ledger = claim(claim(ledger_of(), "a"), "b")
    ledger = ledger.settled(0, roster_of({"a": Spans([(0, 3)])}))

    assert ledger.fault("a", 0, Spans([(3, 10)]).pack()) == ""
    assert ledger.fault("a", 0, b"") == ""
    held_by_b = Spans([(8, 12)]).pack()
    assert ledger.fault("a", 0, held_by_b) == (
        "data: rows that were dealt to another island"
    )
    assert "dealt to another" in ledger.fault("a", 0, Spans([(0, 3)]).pack())
    assert ledger.fault("a", 0, b"\x05").startswith("data: Packed turns end after")


def test_no_fragment_counts_a_row_twice() -> None:
    """A row that is in hand for one fragment is at fault in the other."""
    ledger = claim(ledger_of(fragments=2), "a")
    ledger = ledger.settled(0, roster_of({"a": Spans([(0, 3)])}))

    assert ledger.fault("a", 0, Spans([(2, 5)]).pack()) == (
        "data: rows that have counted before"
    )
    assert ledger.fault("a", 1, Spans([(2, 5)]).pack()) == ""


def test_a_refusal_settles_no_row_of_another_island() -> None:
    """A refused update that names rows of others changes nothing about them."""
    ledger = claim(claim(ledger_of(), "a"), "b")

    ledger = ledger.settled(0, roster_of({}, {"a": Spans([(5, 15)])}))

    assert ledger.states.refused == Spans([(5, 10)])
    assert ledger.states.in_hand["b"] == Spans([(10, 20)])


def test_the_next_incarnation_trains_what_no_fragment_has() -> None:
    """Rows that counted somewhere, were refused or are staged are not trained again."""
    ledger = claim(ledger_of(fragments=2), "a")
    ledger = ledger.settled(0, roster_of({"a": Spans([(0, 2)])}))
    ledger = ledger.settled(1, roster_of({}, {"a": Spans([(2, 3)])}))
    standing = (Spans([(3, 5)]), Spans())

    assert ledger.to_train("a", standing) == Spans([(5, 10)])
    assert ledger.unsettled("a", standing) == Spans([(0, 2), (2, 10)])
    assert ledger.unsettled("b") == Spans()


def test_a_roster_teaches_claims_that_were_lost() -> None:
    """Rows of a claim that a journal has lost are counted, and dealt no more."""
    ledger = ledger_of().settled(0, roster_of({"a": Spans([(10, 20)])}))

    assert ledger.counts.trained == 10
    assert ledger.chosen(3) == Spans([(0, 10), (20, 40)])


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (
            DataSpec(rows=1_000_000),
            DataSpec(rows=1_000_500),
            "This island's data has 1,000,500 rows, and the run's has 1,000,000. "
            "Give all islands the same data",
        ),
        (
            DataSpec(rows=10, fingerprint="abc"),
            DataSpec(rows=10, fingerprint="xyz"),
            "fingerprint 'xyz', and the run's has 'abc'",
        ),
        (DataSpec(rows=10), DataSpec(rows=0), "The dataset has no rows"),
    ],
)
def test_a_second_dataset_is_refused(
    first: DataSpec, second: DataSpec, message: str
) -> None:
    """A run deals out one dataset: another length or content is refused with both."""
    ledger = RowLedger(unit_rows=4, passes=1, num_fragments=1).opened(first)

    with pytest.raises(UsageError, match=message):
        ledger.opened(second)


def test_an_unknown_fingerprint_is_not_compared() -> None:
    """An island whose library knows no fingerprint may have the same data."""
    ledger = RowLedger(unit_rows=4, passes=1, num_fragments=1)

    ledger = ledger.opened(DataSpec(rows=10, fingerprint="abc"))

    assert ledger.opened(DataSpec(rows=10)) == ledger


def test_turns_have_a_limit() -> None:
    """More turns than the format numbers are refused with the remedy."""
    ledger = RowLedger(unit_rows=4, passes=4, num_fragments=1)

    with pytest.raises(UsageError, match="Choose fewer passes"):
        ledger.opened(DataSpec(rows=2**61))


def test_a_stream_is_as_long_as_its_reader_finds() -> None:
    """Units of a stream are dealt before its end is known, and end there."""
    ledger = claim(claim(ledger_of(None), "a"), "b")
    assert ledger.counts.free is None

    ledger = ledger.opened(DataSpec(rows=14))

    assert ledger.holdings["b"] == Spans([(10, 14)])
    assert ledger.counts.free == 0
    assert not ledger.has_free


def test_a_stream_cannot_end_before_what_was_trained() -> None:
    """An island whose stream is shorter than another's has other data."""
    ledger = claim(ledger_of(None), "a")
    ledger = ledger.settled(0, roster_of({"a": Spans([(0, 10)])}))

    with pytest.raises(UsageError, match="ended after 7 rows, and 10 of the run's"):
        ledger.opened(DataSpec(rows=7))


def test_a_reader_gets_units_from_where_it_stands() -> None:
    """Units behind the reader of a stream come only when no other is left."""
    ledger = claim(claim(claim(ledger_of(30), "a"), "b"), "c").released("a")

    assert ledger.chosen(1, start=10) == Spans([(0, 10)])

    ledger = claim(claim(ledger_of(40), "a"), "b").released("a")
    assert ledger.chosen(1, start=20) == Spans([(20, 30)])
    assert ledger.chosen(1, start=10**9) == Spans([(20, 30)])


ISLANDS = ("a", "b", "c")
STEPS = st.lists(
    st.tuples(
        st.sampled_from(("claim", "count", "refuse", "release")),
        st.sampled_from(ISLANDS),
        st.integers(0, 1),
        st.integers(0, 30),
        st.integers(1, 12),
    ),
    max_size=40,
)


@settings(max_examples=300, deadline=None)
@given(STEPS)
def test_every_row_is_in_one_state(steps: list[tuple[str, str, int, int, int]]) -> None:
    """After any events the five states add up, and counted rows are never dealt."""
    total = 46
    ledger = ledger_of(23, unit_rows=5, passes=2, fragments=2)
    for kind, island, fragment, first, length in steps:
        if kind == "claim":
            dealt = ledger.chosen(2, num_live=2)
            for settled in (
                *ledger.counted,
                *ledger.refused,
                *ledger.holdings.values(),
            ):
                assert not dealt & settled
            ledger = claim(ledger, island, want=2, num_live=2)
        elif kind == "release":
            ledger = ledger.released(island)
        else:
            held = ledger.holdings.get(island, Spans())
            spans = held & Spans([(first, first + length)])
            if ledger.fault(island, fragment, spans.pack()):
                continue
            one = {island: spans} if spans else {}
            roster = roster_of(one) if kind == "count" else roster_of({}, one)
            ledger = ledger.settled(fragment, roster)
        counts = ledger.counts
        assert counts.free is not None
        states = (counts.trained, counts.partly, counts.refused, counts.in_hand)
        assert sum(states) + counts.free == total
        holders = [spans for spans in ledger.holdings.values() if spans]
        assert sum(map(len, holders)) == len(Spans(s for h in holders for s in h))


def test_a_billion_rows_take_little_memory() -> None:
    """With 64 islands at work, no set has more intervals than a few per island."""
    ledger = ledger_of(10**9, unit_rows=1024, fragments=1)
    islands = [f"i{number}" for number in range(64)]
    for window in range(6):
        for island in islands:
            ledger = claim(ledger, island, num_live=64)
        done = {
            island: ledger.holdings[island].head(1000) for island in islands[window:]
        }
        ledger = ledger.settled(0, roster_of(done))

    sets = (*ledger.counted, ledger.free, *ledger.holdings.values())
    assert sum(spans.num_spans for spans in sets) < 16 * 64
