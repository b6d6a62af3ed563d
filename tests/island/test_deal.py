"""The rows of an island: in the order of claims, in inner steps, in updates."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll import RunSettings
from atoll.data import Ask, Claim, DataSpec, Spans
from atoll.errors import AtollWarning, UsageError
from atoll.island.deal import Deal, DealtRows, SavedDeal, Tape
from atoll.runtime import SystemRuntime
from tests.island.dealing import LedgerDealer


def settings(**data: object) -> RunSettings:
    return RunSettings.from_dict({"data": {"order": "run", "shuffle": False, **data}})


def deal_of(
    dealer: LedgerDealer,
    *,
    saved: SavedDeal | None = None,
    unsettled: Spans | None = None,
    number: int = 0,
    fragments: int = 1,
) -> Deal:
    return Deal(
        dealer,
        Ask(island="a", incarnation=1, number=number),
        settings(unit_rows=dealer.ledger.unit_rows),
        SystemRuntime(),
        num_fragments=fragments,
        saved=saved,
        unsettled=Spans() if unsettled is None and saved is None else unsettled,
    )


def opened(dealer: LedgerDealer, *, rows: int = 20) -> Deal:
    deal = deal_of(dealer)
    deal.open(DataSpec(rows=rows))
    return deal


def take(rows: DealtRows, count: int) -> list[int]:
    """Return a whole batch of rows, which the loop is given."""
    batch: list[int] = []
    while len(batch) < count and len(part := rows.take(count - len(batch))):
        batch += part.tolist()
    rows.give(len(batch))
    return batch


def spans_of(deal: Deal, first: int, last: int) -> list[tuple[int, int]]:
    return list(Spans.unpack(deal.cursor(first, last)))


def steps(deal: Deal, *sizes: int) -> None:
    """Make an inner step on each of these numbers of rows."""
    for size in sizes:
        take(deal.rows, size)
        marks = deal.save().marks
        deal.stepped((marks[-1][0] if marks else 0) + 1)


def test_an_update_has_the_rows_of_its_inner_steps() -> None:
    """Whichever inner steps it has: carried work and rests need no other rule."""
    deal = opened(LedgerDealer(unit_rows=8))
    steps(deal, 3, 3, 4)

    assert spans_of(deal, 0, 1) == [(0, 3)]
    assert spans_of(deal, 1, 3) == [(3, 10)]
    assert spans_of(deal, 0, 3) == [(0, 10)]
    assert spans_of(deal, 3, 3) == []


def test_rows_that_are_fetched_ahead_are_in_no_inner_step() -> None:
    """A loop that begins again gets them."""
    deal = opened(LedgerDealer(unit_rows=8))
    deal.rows.take(6)
    deal.rows.give(2)
    deal.stepped(1)

    assert spans_of(deal, 0, 1) == [(0, 2)]
    deal.rows.restart()
    assert take(deal.rows, 3) == [2, 3, 4]


def test_batches_before_one_step_are_all_in_it() -> None:
    """Gradient accumulation: rows given since the last step belong to the next."""
    deal = opened(LedgerDealer(unit_rows=8))
    take(deal.rows, 2)
    take(deal.rows, 3)
    deal.stepped(1)

    assert spans_of(deal, 0, 1) == [(0, 5)]


def test_the_loop_ends_when_the_run_has_no_more_rows() -> None:
    """Each row once, and then none, however often the loop asks."""
    deal = opened(LedgerDealer(unit_rows=8), rows=20)

    assert take(deal.rows, 100) == list(range(20))
    assert take(deal.rows, 1) == []
    assert deal.is_over
    assert take(deal.rows, 1) == []


def test_claims_are_numbered_and_at_most_one_per_window() -> None:
    """A window of 8 rows in units of 4 asks for two units at its seal, once."""
    dealer = LedgerDealer(unit_rows=4)
    deal = opened(dealer, rows=400)
    for window in range(5):
        for _ in range(4):
            steps(deal, 2)
        before = len(dealer.asks)
        deal.note_seal(0)
        deal.note_seal(1)
        deal.absorb(waits=True)
        assert len(dealer.asks) - before == 1, window

    assert [ask.number for ask in dealer.asks] == list(range(1, len(dealer.asks) + 1))
    assert [ask.want for ask in dealer.asks][-4:] == [2, 2, 2, 2]


def test_an_exact_resume_is_dealt_the_same_rows_again() -> None:
    """It asks for the same numbers, as the incarnation before did."""
    dealer = LedgerDealer(unit_rows=4, num_live=2)
    deal = opened(dealer, rows=100)
    steps(deal, 3, 3)
    saved = deal.save()
    first = take(deal.rows, 20)

    again = deal_of(dealer, saved=SavedDeal.from_tree(saved.to_tree()))
    again.open(DataSpec(rows=100))

    assert spans_of(again, 0, 2) == [(0, 6)]
    assert take(again.rows, 20) == first


def test_a_restart_is_dealt_what_has_not_counted_before_it_claims() -> None:
    """Rows of its restored work are not dealt, and are in its next update."""
    dealer = LedgerDealer(unit_rows=8)
    deal = opened(dealer, rows=40)
    steps(deal, 2, 2, 2)
    saved = deal.save()
    take(deal.rows, 4)  # trained after the checkpoint, and lost with the island

    remaining = saved.work_since(11, before_steps=10)
    assert remaining.marks == ((12, 4), (13, 6))
    unsettled = dealer.held("a") - Spans([(0, 2)])  # a round has counted the first step
    number = dealer.ledger.last_claim("a")
    again = deal_of(dealer, saved=remaining, unsettled=unsettled, number=number)
    again.open(DataSpec(rows=40))

    assert spans_of(again, 11, 13) == [(2, 6)]
    assert take(again.rows, 40) == list(range(6, 40))


def test_lost_work_of_all_fragments_is_dealt_again_at_the_end() -> None:
    """A row that one fragment has counted is not trained again."""
    dealer = LedgerDealer(unit_rows=4)
    deal = deal_of(dealer, fragments=2)
    deal.open(DataSpec(rows=8))
    steps(deal, 2, 2, 4)
    deal.drop(0, 0, 2)
    deal.drop(1, 1, 3)

    assert take(deal.rows, 8) == [2, 3]
    assert deal.is_over


@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 60), st.integers(1, 9))
def test_ranks_have_every_row_once(
    ranks: int, batch: int, rows: int, unit: int
) -> None:
    """Each the same number; a remainder waits for the next claim, or is left."""
    dealer = LedgerDealer(unit_rows=unit)
    deal = opened(dealer, rows=rows)
    tapes = [deal.rows.tape] + [Tape() for _ in range(ranks - 1)]

    def refill() -> bool:
        end = deal.rows.tape.end
        is_more = deal.refill()
        for tape in tapes[1:]:
            tape.extend(deal.dealt_since(end).intervals)
        return is_more

    drawn = [DealtRows(tape, 0, refill) for tape in tapes]
    for index, part in enumerate(drawn):
        part.begin(DataSpec(rows=rows), settings())
        part.share(index, ranks)
    seen: list[list[int]] = [[] for _ in drawn]
    while True:
        parts = [part.take(batch).tolist() for part in drawn]
        if not parts[0]:
            break
        for seen_by_rank, rows_of_rank, part in zip(seen, parts, drawn, strict=True):
            seen_by_rank += rows_of_rank
            part.give(len(rows_of_rank))

    dealt = list(itertools.chain(*zip(*seen, strict=True)))
    assert dealt == list(range(rows - rows % ranks))
    assert drawn[0].position == len(dealt)


def test_a_second_dataset_is_refused() -> None:
    """A run deals out one dataset; the same one again continues."""
    deal = opened(LedgerDealer(unit_rows=8), rows=20)
    assert take(deal.rows, 3) == [0, 1, 2]

    with pytest.raises(UsageError, match=r"20 rows, and now 21 rows.*one dataset"):
        deal.open(DataSpec(rows=21))
    assert take(deal.open(DataSpec(rows=20)), 2) == [3, 4]


def test_an_update_of_too_many_units_is_refused_with_the_remedy() -> None:
    """A header holds 4096 bytes of them."""
    dealer = LedgerDealer(unit_rows=1)
    deal = deal_of(
        dealer, unsettled=Spans((2 * turn, 2 * turn + 1) for turn in range(3000))
    )
    deal.open(DataSpec(rows=10_000))
    steps(deal, 3000)

    with pytest.raises(UsageError, match=r"3000 separate units.*Raise data\.unit_rows"):
        deal.cursor(0, 1)


def test_a_loop_that_asks_for_no_rows_is_warned_of_once() -> None:
    """The run owns the order of its data."""
    deal = deal_of(LedgerDealer(unit_rows=8))

    with pytest.warns(AtollWarning, match="'a' has asked for no rows") as warned:
        deal.note_seal(0)
    deal.note_seal(0)
    assert len(warned) == 1


INTERVALS = st.lists(
    st.tuples(st.integers(0, 50), st.integers(1, 9)).map(lambda x: (x[0], x[0] + x[1])),
    max_size=8,
)


def _turns(intervals: list[tuple[int, int]]) -> list[int]:
    return [turn for first, last in intervals for turn in range(first, last)]


@given(INTERVALS, st.integers(0, 9), st.data())
def test_a_tape_is_a_list_of_turns(
    intervals: list[tuple[int, int]], start: int, data: st.DataObject
) -> None:
    """Read, trimmed and cut as a list would be."""
    tape, turns = Tape(intervals, start=start), _turns(intervals)
    assert tape.end == start + len(turns)

    low, high = sorted(
        data.draw(st.tuples(*[st.integers(start, tape.end)] * 2), label="part")
    )
    assert _turns(tape.between(low, high)) == turns[low - start : high - start]
    tape.trim(low)
    assert _turns(tape.between(low, tape.end)) == turns[low - start :]
    before = data.draw(st.integers(0, 60), label="before")
    tape.cut(high, before=before)
    expected = [turn for turn in turns[high - start :] if turn < before]
    assert (
        _turns(tape.between(low, tape.end))
        == turns[low - start : high - start] + expected
    )


def test_rows_are_those_of_the_runs_order() -> None:
    """The rows of the first pass over 10, by seed 7, are these."""
    dealer = LedgerDealer(unit_rows=4)
    deal = Deal(
        dealer,
        Ask(island="a", incarnation=1, number=0),
        settings(unit_rows=4, seed=7, shuffle=True),
        SystemRuntime(),
        num_fragments=1,
        unsettled=Spans(),
    )

    assert take(deal.open(DataSpec(rows=10)), 10) == [1, 0, 3, 9, 5, 8, 4, 6, 2, 7]
    assert np.array_equal(deal.rows.take(1), [])


class PatientDealer(LedgerDealer):
    """Never says that no row can return."""

    def claim(self, ask: Ask) -> Claim:
        return replace(super().claim(ask), is_over=False)


def test_a_claim_that_is_repeated_while_the_loop_waits_is_added_once() -> None:
    """A window is sealed while the loop waits for rows: both ask for one claim."""
    dealer = PatientDealer(unit_rows=4)
    deal = opened(dealer, rows=8)
    dealer.claim(Ask(island="b", incarnation=1, number=1, want=1))
    steps(deal, 4)
    waits = iter([True, False])

    def rows_return() -> bool:
        dealer.ledger = dealer.ledger.released("b")
        deal.note_seal(0)
        return next(waits)

    deal.wait_for_rows = rows_return

    assert take(deal.rows, 8) == [0, 1, 2, 3]
    assert deal.is_over
    assert {2, 3} <= {ask.number for ask in dealer.asks}
