"""Rows that a run deals out: claims, what returns, who may count them, and the end."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TypeVar

import numpy as np
import pytest

from atoll.data import Ask, Claim, DataSpec, RowLedger, Spans
from atoll.errors import LeaseLost, Refused, UsageError
from atoll.protocol import JoinRequest, events
from atoll.protocol.coordinator import advance, roster_of, wakes_at
from atoll.protocol.coordinator_state import CoordinatorState
from atoll.protocol.join_leave import reply_to
from atoll.protocol.membership import LEASE_S
from atoll.protocol.rounds import Phase
from atoll.wire import FrameKind, Header, Roster, Verdict, with_body
from tests.protocol.drivers import (
    MODEL,
    NOW_S,
    OPEN_ROUND,
    OUTER,
    dealing,
    member,
    open_round,
    state_of,
    update,
)

T = TypeVar("T")

LATER_S = NOW_S + 2 * LEASE_S
LONG_SILENT_S = NOW_S + 601.0


def run_of(*islands: str, rows: int = 40, **run: object) -> CoordinatorState:
    """Return a run of live islands that has its data."""
    members = [member(name, slot=slot) for slot, name in enumerate(islands)]
    round = open_round(candidates=frozenset(islands))
    return dealing(state_of(*members, rounds=(round,), **run), rows=rows)


def ledger_of(state: CoordinatorState) -> RowLedger:
    assert state.ledger is not None
    return state.ledger


def asked(
    state: CoordinatorState,
    island: str,
    *,
    number: int | None = None,
    want: int = 1,
    now_s: float = NOW_S,
) -> tuple[CoordinatorState, Claim, list[events.Change]]:
    """Return the state after a claim, its answer, and what had to be durable."""
    if number is None:
        number = ledger_of(state).last_claim(island) + 1
    ask = Ask(island=island, incarnation=1, number=number, want=want)
    state, actions = advance(state, events.RowsClaimed(ask), now_s)
    (answer,) = of_type(actions, events.Respond)
    assert isinstance(answer.answer, Claim)
    changes = [action.change for action in of_type(actions, events.Persist)]
    return state, answer.answer, changes


def of_type(actions: list[events.Action], kind: type[T]) -> list[T]:
    return [action for action in actions if isinstance(action, kind)]


def with_cursor(header: Header, cursor: bytes) -> Header:
    """Return a sealed update with a cursor."""
    progress = replace(header.progress, inner_steps=1, cursor=cursor)
    values = np.ones(3, np.float32).view(np.uint8)
    header = replace(
        header, refused="", elements=3, norm=math.sqrt(3.0), progress=progress
    )
    return with_body(header, values)


def staged(
    state: CoordinatorState, island: str, spans: Spans, *, is_departing: bool = False
) -> CoordinatorState:
    kind = FrameKind.DEPARTING if is_departing else FrameKind.UPDATE
    header = with_cursor(update(island, kind=kind), spans.pack())
    return advance(state, events.UpdateStored(header), NOW_S)[0]


def judged(state: CoordinatorState) -> Roster:
    return roster_of(state, state.rounds[0], NOW_S)


def committed(state: CoordinatorState) -> CoordinatorState:
    """Close the open round with what is staged, and commit it."""
    roster = judged(state)
    closing = replace(state.rounds[0], phase=Phase.CLOSING, roster=roster)
    state = replace(state, rounds=(closing,))
    event = events.Committed(0, roster, b"a" * 16, OUTER)
    return advance(state, event, NOW_S)[0]


def left(state: CoordinatorState, island: str) -> CoordinatorState:
    return advance(state, events.Leave(island, 1), NOW_S)[0]


def test_a_claim_is_durable_before_it_is_answered() -> None:
    """The action that makes a claim durable comes before its response."""
    state, claim, changes = asked(run_of("a", "b"), "a")

    assert changes == [events.RowsDealt("a", 1, Spans([(0, 10)]))]
    assert claim == Claim(spans=Spans([(0, 10)]))
    assert ledger_of(state).holdings == {"a": Spans([(0, 10)])}


def test_a_repeated_claim_changes_nothing() -> None:
    """The same number again gets the same rows, and nothing new is durable."""
    state, claim, _ = asked(run_of("a", "b"), "a")

    again, repeated, changes = asked(state, "a", number=1)

    assert (again, repeated, changes) == (state, claim, [])


def test_no_row_is_dealt_to_two_islands() -> None:
    """Claims of different islands never share a row."""
    state, of_a, _ = asked(run_of("a", "b"), "a", want=3)
    state, of_b, _ = asked(state, "b", want=3)

    assert not of_a.spans & of_b.spans


def test_a_claim_before_the_data_is_refused() -> None:
    """Nobody knows how many rows there are before an island has said it."""
    state = run_of("a")
    state = replace(state, ledger=RowLedger(unit_rows=10, passes=1, num_fragments=1))

    with pytest.raises(UsageError, match="Open it before the first claim"):
        asked(state, "a")


def test_a_run_that_deals_nothing_says_so() -> None:
    """With data.order='islands' data is not described and rows are not claimed."""
    state = state_of(member("a"), rounds=(open_round(),))

    with pytest.raises(UsageError, match=r"does not deal out rows: data\.order='isl"):
        advance(state, events.DataOpened("a", 1, DataSpec(rows=9)), NOW_S)


def test_an_unfounded_run_deals_nothing() -> None:
    """A run without weights has no rounds that could count a row."""
    state = replace(run_of("a"), ledger=None, rounds=())

    with pytest.raises(Refused, match="has no weights yet, and deals out no rows"):
        advance(state, events.DataOpened("a", 1, DataSpec(rows=9)), NOW_S)


@pytest.mark.parametrize(
    "event",
    [
        events.DataOpened("a", 2, DataSpec(rows=40)),
        events.RowsClaimed(Ask(island="a", incarnation=2, number=1)),
    ],
)
def test_only_the_present_incarnation_gets_rows(event: events.Event) -> None:
    """Another incarnation than the member's is fenced."""
    with pytest.raises(LeaseLost):
        advance(run_of("a"), event, NOW_S)


def test_the_data_is_described_once() -> None:
    """The first description is durable, and a second one is compared with it."""
    state = run_of("a", "b")
    state = replace(state, ledger=RowLedger(unit_rows=10, passes=1, num_fragments=1))

    state, actions = advance(state, events.DataOpened("a", 1, DataSpec(rows=40)), NOW_S)
    assert events.Persist(DataSpec(rows=40)) in actions

    _, actions = advance(state, events.DataOpened("b", 1, DataSpec(rows=40)), NOW_S)
    assert actions == [events.Respond(DataSpec(rows=40))]
    with pytest.raises(UsageError, match="has 41 rows, and the run's has 40"):
        advance(state, events.DataOpened("b", 1, DataSpec(rows=41)), NOW_S)


def test_a_roster_repeats_the_rows_of_an_update() -> None:
    """The entry of an update that counts has the spans that its cursor has."""
    state, claim, _ = asked(run_of("a", "b"), "a")
    state = staged(state, "a", claim.spans)

    entry = judged(state).entry("a")

    assert entry is not None
    assert (entry.verdict, entry.spans) == (Verdict.COUNTED, claim.spans.pack())


def test_rows_of_another_island_do_not_count() -> None:
    """An update with rows that its island does not hold is refused by the judge."""
    state, _, _ = asked(run_of("a", "b"), "a")
    state, of_b, _ = asked(state, "b")
    state = staged(state, "a", of_b.spans)

    entry = judged(state).entry("a")

    assert entry is not None
    assert entry.verdict is Verdict.REFUSED
    assert entry.reason == "data: rows that were dealt to another island"


def test_a_cursor_that_is_no_set_is_refused_without_its_bytes() -> None:
    """A roster never repeats bytes that are no packed rows."""
    state, _, _ = asked(run_of("a", "b"), "a")
    header = with_cursor(update("a"), b"\x05")
    state, _ = advance(state, events.UpdateStored(header), NOW_S)

    entry = judged(state).entry("a")

    assert entry is not None
    assert (entry.verdict, entry.spans) == (Verdict.REFUSED, b"")
    assert entry.reason.startswith("data: Packed turns end after 1 bytes")


def test_a_committed_roster_settles_its_rows() -> None:
    """Rows are trained when the round with their update is committed."""
    state, claim, _ = asked(run_of("a", "b"), "a")

    state = committed(staged(state, "a", claim.spans))

    assert ledger_of(state).counts.trained == 10
    assert ledger_of(state).holdings["a"] == Spans()


def test_a_run_that_cuts_its_data_writes_no_rows() -> None:
    """Without a ledger a cursor means nothing, and no roster repeats it."""
    state = state_of(member("a"), rounds=(open_round(),))
    state = staged(state, "a", Spans([(0, 10)]))

    entry = judged(state).entry("a")

    assert entry is not None
    assert (entry.verdict, entry.spans) == (Verdict.COUNTED, b"")


def test_the_rows_of_a_leaver_return_at_once() -> None:
    """Without an update of it in an open round its rows are free with its leave."""
    state, claim, _ = asked(run_of("a", "b"), "a")

    state, actions = advance(state, events.Leave("a", 1), NOW_S)

    assert events.Persist(events.RowsReleased("a")) in actions
    assert ledger_of(state).free == claim.spans


def test_a_leaver_keeps_its_rows_while_its_update_stands() -> None:
    """Rows of a departing update may still count, so that no other island gets them."""
    state, claim, _ = asked(run_of("a", "b", quorum=2), "a", want=2)
    in_update = claim.spans.head(4)
    state = left(staged(state, "a", in_update, is_departing=True), "a")
    assert ledger_of(state).free == Spans()

    state = committed(state)
    state, of_b, changes = asked(state, "b")

    assert changes[0] == events.RowsReleased("a")
    assert of_b.spans == Spans([(4, 10)])


def test_an_evicted_island_loses_its_rows() -> None:
    """An operator's eviction is a leave, and returns the rows."""
    state, claim, _ = asked(run_of("a", "b"), "a")

    state, _ = advance(state, events.Leave("a", 1, reason="evicted"), NOW_S)

    assert ledger_of(state).free == claim.spans


def test_a_silent_island_keeps_its_rows_while_others_are_free() -> None:
    """Silence alone releases nothing."""
    state, _, _ = asked(run_of("a", "b"), "a")
    state = replace(
        state, members=state.members.with_member(member("b", lease_until_s=1e9))
    )

    state, claim, changes = asked(state, "b", now_s=LONG_SILENT_S)

    assert claim.spans == Spans([(10, 20)])
    assert len(changes) == 1


def test_a_long_silent_island_loses_its_rows_when_no_other_is_free() -> None:
    """After the longest deadline, and when somebody asks, its rows are dealt again."""
    state = run_of("a", "b", rows=20)
    state, of_a, _ = asked(state, "a")
    state, _, _ = asked(state, "b")
    state = replace(
        state, members=state.members.with_member(member("b", lease_until_s=1e9))
    )

    state, claim, changes = asked(state, "b", now_s=LATER_S)
    assert (claim, changes) == (Claim(spans=Spans()), [])

    state, claim, changes = asked(state, "b", now_s=LONG_SILENT_S)
    assert claim.spans == of_a.spans
    assert changes[0] == events.RowsReleased("a")


def test_who_comes_back_too_late_cannot_count_its_rows() -> None:
    """The judge refuses rows that were dealt again while their island was silent."""
    state = run_of("a", "b", rows=20)
    state, of_a, _ = asked(state, "a")
    state, _, _ = asked(state, "b")
    state = replace(
        state, members=state.members.with_member(member("b", lease_until_s=1e9))
    )
    state, _, _ = asked(state, "b", now_s=LONG_SILENT_S)

    entry = judged(staged(state, "a", of_a.spans)).entry("a")

    assert entry is not None
    assert entry.verdict is Verdict.REFUSED


def test_a_silent_island_keeps_its_rows_while_its_update_is_staged() -> None:
    """A staged update may count: its rows are not dealt again before its round."""
    state = run_of("a", "b", rows=20, quorum=2)
    state, of_a, _ = asked(state, "a")
    state, _, _ = asked(state, "b")
    state = staged(state, "a", of_a.spans)
    state = replace(
        state, members=state.members.with_member(member("b", lease_until_s=1e9))
    )

    _, claim, changes = asked(state, "b", now_s=LONG_SILENT_S)

    assert (claim.spans, changes) == (Spans(), [])


def test_the_data_is_over_for_an_island_when_live_ones_hold_the_rest() -> None:
    """What another live island holds will not return: the loop may end."""
    state = run_of("a", "b", rows=20)
    state, _, _ = asked(state, "a")
    state, _, _ = asked(state, "b")

    _, claim, _ = asked(state, "b")

    assert claim == Claim(spans=Spans(), is_over=True)


def test_the_next_incarnation_is_told_what_its_name_holds() -> None:
    """A join reply has the rows that nothing has counted or staged, and the number."""
    state, claim, _ = asked(run_of("a", "b", quorum=2), "a", want=2)
    state = staged(state, "a", claim.spans.head(4))
    request = JoinRequest(model=MODEL, island="a", after=1)
    event = events.JoinRequested(request, b"key of a", b"other nonce")

    state, actions = advance(state, event, NOW_S)
    (welcome,) = of_type(actions, events.Welcome)
    reply = reply_to(state, welcome)

    assert Spans.unpack(reply.held_rows) == claim.spans - claim.spans.head(4)
    assert reply.last_claim == 1


def test_a_run_ends_with_its_data() -> None:
    """When every row counts or stands the run ends, as by an operator's stop."""
    state = run_of("a", rows=10, quorum=2)
    state, claim, _ = asked(state, "a")
    header = with_cursor(update("a"), claim.spans.pack())

    state, actions = advance(state, events.UpdateStored(header), NOW_S)

    (epoch,) = [action.change for action in of_type(actions, events.Persist)]
    assert epoch == events.Epoch(1, {"run.end_rounds": OPEN_ROUND})
    assert state.last_round == OPEN_ROUND
    assert committed(state).rounds[0].phase is Phase.ENDED


def test_a_tick_ends_a_run_whose_last_holder_stays_silent() -> None:
    """What a long silent island holds keeps no run open, and the tick is due then."""
    state = run_of("a", "b", rows=20)
    state, _, _ = asked(state, "a")
    state, claim, _ = asked(state, "b")
    state = committed(staged(state, "b", claim.spans))
    due_s = wakes_at(state, LATER_S)
    assert due_s == NOW_S + 1 - LEASE_S + 600.0

    state, _ = advance(state, events.Tick(), due_s)
    assert state.last_round is None

    state, _ = advance(state, events.Tick(), due_s + 0.5)
    assert state.last_round == OPEN_ROUND


def test_a_run_does_not_end_while_rows_are_unpublished() -> None:
    """Rows that a live island holds are trained before the run ends."""
    state = run_of("a", "b", rows=20)
    state, claim, _ = asked(state, "a")
    state, _, _ = asked(state, "b")
    state = committed(staged(state, "a", claim.spans))

    state, actions = advance(state, events.Tick(), NOW_S)

    assert (state.last_round, actions) == (None, [])


def test_an_open_last_round_ends_when_nobody_is_left() -> None:
    """The last rows may be in a higher round of one fragment than of another."""
    state = run_of("a", rows=10)
    other = replace(state.rounds[0], fragment=1, number=OPEN_ROUND - 1)
    state = replace(state, rounds=(state.rounds[0], other))
    state = dealing(state, rows=10)
    state, claim, _ = asked(state, "a")
    for fragment, number in ((1, OPEN_ROUND - 1), (0, OPEN_ROUND)):
        header = update("a", fragment=fragment, round=number, kind=FrameKind.DEPARTING)
        sealed = with_cursor(header, claim.spans.pack())
        state, _ = advance(state, events.UpdateStored(sealed), NOW_S)
    assert state.last_round == OPEN_ROUND
    state = left(state, "a")
    for closing in state.rounds:
        assert closing.roster is not None
        event = events.Committed(closing.fragment, closing.roster, b"a" * 16, OUTER)
        state, _ = advance(state, event, NOW_S)
    assert state.rounds[1].phase is Phase.OPEN
    assert wakes_at(state, NOW_S) == NOW_S + 1.0

    state, actions = advance(state, events.Tick(), NOW_S)

    last_rounds = events.LastRounds((OPEN_ROUND, OPEN_ROUND - 1))
    assert actions == [events.Persist(last_rounds)]
    assert [round.phase for round in state.rounds] == [Phase.ENDED, Phase.ENDED]


def test_a_run_with_another_end_goes_on_without_rows() -> None:
    """With end_rounds the rounds decide, whatever the data."""
    state = run_of("a", rows=10, end_rounds=9)
    state, claim, _ = asked(state, "a")

    state = committed(staged(state, "a", claim.spans))
    state, actions = advance(state, events.Tick(), NOW_S)

    assert (state.last_round, actions) == (None, [])


def test_an_ended_run_deals_nothing() -> None:
    """After the last round a claim is told that the data is over."""
    state = run_of("a")
    ended = replace(state.rounds[0], phase=Phase.ENDED)

    _, claim, changes = asked(replace(state, rounds=(ended,), last_round=4), "a")

    assert (claim, changes) == (Claim(spans=Spans(), is_over=True), [])
