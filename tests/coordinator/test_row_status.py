"""What status, events and metrics tell of the rows that a run deals out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from atoll.coordinator.rows import MAX_SPANS, RowWatcher, rows_of
from atoll.coordinator.status import status_of
from atoll.data import DataSpec, RowLedger, Spans
from atoll.exchange.calls import LeaveCall
from atoll.telemetry import EventBus, render, render_rows
from atoll.telemetry.bus import Counters
from atoll.wire import FrameKind
from tests.coordinator.test_rows import ROWS, claim, ledger_of, make, with_rows
from tests.data.test_ledger import roster_of
from tests.telemetry.statuses import status


def a_pass_with_everything() -> RowLedger:
    """Return a ledger with rows of two fragments in every state."""
    ledger = RowLedger(unit_rows=100, passes=1, num_fragments=2)
    ledger = ledger.opened(DataSpec(rows=1000, fingerprint="c0ffee"))
    for island in ("tokyo-1", "oslo-1", "oslo-2"):
        number = ledger.last_claim(island) + 1
        ledger = ledger.claimed(island, number, ledger.chosen(2))
    for fragment in (0, 1):
        ledger = ledger.settled(fragment, roster_of({"tokyo-1": Spans([(0, 150)])}))
    ledger = ledger.settled(0, roster_of({"oslo-1": Spans([(200, 212)])}))
    ledger = ledger.settled(1, roster_of({}, {"oslo-2": Spans([(400, 420)])}))
    return ledger.released("oslo-1")


def document(ledger: RowLedger | None, *, rows_per_s: float | None = None) -> Any:
    """Return the part of a status about rows."""
    service, _, _ = make()
    state = replace(service.state, ledger=ledger)
    return rows_of(state, rows_per_s=rows_per_s)


def test_the_states_of_all_rows_add_up() -> None:
    """The document has every state, by island, and what is neither trained nor free."""
    rows = document(a_pass_with_everything(), rows_per_s=5.0)

    assert rows["total"] == 1000
    assert (rows["trained"], rows["partly"], rows["refused"]) == (150, 12, 20)
    assert (rows["in_hand"], rows["free"]) == (230, 588)
    assert rows["by_island"] == {"tokyo-1": 50, "oslo-2": 180}
    assert rows["partly_by_island"] == {"oslo-1": 12}
    assert rows["trained_share"] == 0.15
    assert rows["eta_s"] == 170.0
    assert rows["spans"] == {
        "in_hand": {"tokyo-1": [[150, 200]], "oslo-2": [[420, 600]]},
        "partly": [[200, 212]],
        "refused": [[400, 420]],
    }


def test_a_run_that_cuts_its_data_has_no_rows() -> None:
    """Without a ledger there is nothing to count, and the page says why."""
    page = render_rows(status(), width=80)

    assert page.startswith("The run does not deal out rows: data.order is 'islands'")
    assert render_rows(status(data=None), width=80) == page


def test_many_intervals_are_cut_and_still_cover_their_rows() -> None:
    """A status stays small: the last interval spans all that are too many."""
    ledger = RowLedger(unit_rows=1, passes=1, num_fragments=1)
    ledger = ledger.opened(DataSpec(rows=10_000))
    spans = Spans((2 * turn, 2 * turn + 1) for turn in range(3000))
    listed = document(ledger.claimed("a", 1, spans))["spans"]["in_hand"]["a"]

    assert len(listed) == MAX_SPANS
    assert (listed[0], listed[-1][1]) == ([0, 1], 5999)


def test_the_page_has_a_line_for_each_state() -> None:
    """People read amounts, shares, and whose rows they are."""
    rows = document(a_pass_with_everything(), rows_per_s=5.0)

    assert render_rows({"data": rows}, width=100).splitlines() == [
        "1,000 rows, 1 pass, units of 10, not shuffled",
        "trained                     150   15.0 %   counted by every fragment",
        "in hand                     230   23.0 %   oslo-2 180, tokyo-1 50",
        "partly trained               12    1.2 %   counted by some fragments, and "
        "their island has gone:",
        "                                           oslo-1",
        "refused                      20    2.0 %",
        "free                        588   58.8 %",
        "300 rows/min, about 2 min 50 s left",
    ]


def test_the_page_of_data_that_nobody_has_opened_says_so() -> None:
    """A run that deals rows out begins without a description of them."""
    page = render_rows({"data": document(None)}, width=80)

    assert page == "No island has described the data of the run yet.\n"


def test_status_shows_the_trained_share_in_its_document() -> None:
    """The run's document has the rows, and no row belongs to nobody."""
    service, _, joined = make()
    claim(service, joined["a"], 1)
    told = status_of(service.state, 1.0, stats={}, verdicts={})

    assert told["data"]["by_island"] == {"a": 10}
    assert told["data"]["rows"] == ROWS
    assert told["unowned_share"] == 0.0


def test_metrics_have_the_rows_of_each_state() -> None:
    """A scraper reads one gauge per state, and none of a run without a ledger."""
    rows = document(a_pass_with_everything())
    counters = Counters(events={}, dropped={})

    page = render(status(data=rows), counters)

    assert 'atoll_data_rows{state="trained"} 150' in page
    assert 'atoll_data_rows{state="in_hand"} 230' in page
    assert 'atoll_data_rows{state="partly"} 12' in page
    assert 'atoll_data_rows{state="refused"} 20' in page
    assert 'atoll_data_rows{state="free"} 588' in page
    assert "atoll_data_rows" not in render(status(), counters)


def test_events_tell_claims_and_releases() -> None:
    """Each change of the ledger that people may ask about is one event."""
    service, _, joined = make()
    events = EventBus()
    watcher = RowWatcher(events)
    before, ledger = None, ledger_of(service)
    watcher.look(before, ledger, 0.0)
    spans = claim(service, joined["a"], 1).spans
    watcher.look(ledger, ledger_of(service), 1.0)
    ledger = ledger_of(service)
    call = with_rows(service, joined["a"], spans.head(4), kind=FrameKind.DEPARTING)
    service.handle(call, 2.0)
    service.handle(LeaveCall("a", joined["a"].incarnation), 2.0)
    service.handle(with_rows(service, joined["b"], Spans()), 2.0)
    claim(service, joined["b"], 1)
    watcher.look(ledger, ledger_of(service), 3.0)

    told = [event.as_dict() for event in events.after(0)]
    assert [(each["event"], each["rows"]) for each in told] == [
        ("data_opened", ROWS),
        ("rows_claimed", 10),
        ("rows_claimed", 6),
    ]


def test_a_release_is_an_event() -> None:
    """Rows that return are told with their number and the island that had them."""
    before = a_pass_with_everything()
    events = EventBus()

    RowWatcher(events).look(before, before.released("oslo-2"), 1.0)

    (event,) = events.after(0)
    assert (event.name, event.fields["rows"]) == ("rows_released", 180)


def test_the_rate_is_that_of_the_last_rounds() -> None:
    """Rows per second are measured from one change of the trained rows to the last."""
    watcher = RowWatcher(EventBus())
    ledger = a_pass_with_everything()
    watcher.look(None, ledger, 10.0)
    assert watcher.rows_per_s is None
    for now_s, first in ((20.0, 150), (30.0, 180)):
        before, turns = ledger, Spans([(first, first + 20)])
        for fragment in (0, 1):
            ledger = ledger.settled(fragment, roster_of({"tokyo-1": turns}))
        watcher.look(before, ledger, now_s)

    # 150 rows trained first, then 170 at 20 s and 190 at 30 s.
    assert watcher.rows_per_s == 2.0
