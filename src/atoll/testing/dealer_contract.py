"""Contract of every `Dealer`: an exchange whose run deals out rows.

A claim takes `open_run`, as those of `exchange_contract` do, and needs no clock:

    @pytest.mark.parametrize("claim", DEALER_CLAIMS, ids=lambda claim: claim.__name__)
    def test_it_is_a_dealer(claim):
        claim(open_my_run)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from atoll.data import Ask, Claim, DataSpec, Spans
from atoll.errors import LeaseLost, UsageError
from atoll.exchange import Exchange
from atoll.exchange.base import Dealer
from atoll.protocol import JoinReply
from atoll.settings import RunSettings
from atoll.testing.fixtures import (
    enter,
    plain_settings,
    raises,
    roster_of,
    update_of,
)
from atoll.wire import FrameKind, TrainingProgress, Verdict


class DealingExchange(Exchange, Dealer, Protocol):
    """An exchange of a run that deals out rows."""


class AttachDealer(Protocol):
    """Attaches islands to one run."""

    def __call__(self, *, key: bytes) -> DealingExchange:
        """Return the exchange for one incarnation of an island that holds `key`."""
        ...


OpenDealingRun = Callable[[RunSettings], AttachDealer]
ROWS = 45
"""In units of ten: four whole ones and a half."""


def claims_are_disjoint_and_cover_the_data(open_run: OpenDealingRun) -> None:
    """Two islands get every row once, and then learn that the data is over."""
    (a, b), (first, second) = _two(open_run)
    dealt = []
    for number in (1, 2, 3):
        for exchange, joined in ((a, first), (b, second)):
            dealt.append(_claim(exchange, joined, number))
    spans = [claim.spans for claim in dealt]

    assert list(Spans(span for part in spans for span in part)) == [(0, ROWS)]
    assert sum(map(len, spans)) == ROWS
    assert dealt[-1] == Claim(spans=Spans(), is_over=True)
    assert [claim.is_over for claim in dealt[:5]] == [False] * 5


def a_repeated_claim_gets_the_same_rows(open_run: OpenDealingRun) -> None:
    """A number that is known has its answer, regardless of later claims."""
    (a, b), (first, second) = _two(open_run)
    before = _claim(a, first, 1)
    _claim(b, second, 1)
    _claim(a, first, 2)

    assert _claim(a, first, 1) == before


def a_claim_before_the_data_is_refused(open_run: OpenDealingRun) -> None:
    """The run does not know the number of rows before an island has described it."""
    a = open_run(dealing_settings())(key=b"a")
    joined = enter(a, "a")

    with raises(UsageError):
        _claim(a, joined, 1)


def another_dataset_is_refused(open_run: OpenDealingRun) -> None:
    """Another length or fingerprint than the run's is refused with both."""
    (a, b), (first, second) = _two(open_run)

    for data in (DataSpec(rows=ROWS + 1), DataSpec(rows=ROWS, fingerprint="other")):
        with raises(UsageError):
            b.open_data("b", second.incarnation, data)
    same = DataSpec(rows=ROWS)
    assert a.open_data("a", first.incarnation, same).rows == ROWS


def rows_of_another_island_do_not_count(open_run: OpenDealingRun) -> None:
    """The judge refuses an update with rows that its island does not hold."""
    (a, b), (first, second) = _two(open_run)
    first_spans, other = _claim(a, first, 1).spans, _claim(b, second, 1).spans
    _publish(a, first, other)
    _publish(b, second, other)
    roster = roster_of(a, 1)

    entries = {entry.island: entry for entry in roster.entries}
    assert entries["a"].verdict is Verdict.REFUSED
    assert entries["a"].reason == "data: rows that were dealt to another island"
    assert entries["b"].verdict is Verdict.COUNTED
    assert entries["b"].spans == other.pack()
    assert not first_spans & other


def a_row_counts_once(open_run: OpenDealingRun) -> None:
    """A second update with the same rows is refused."""
    (a, b), (first, second) = _two(open_run)
    spans = _claim(a, first, 1).spans
    for round in (1, 2):
        _publish(a, first, spans, round=round)
        _publish(b, second, Spans(), round=round)

    verdicts = [roster_of(a, round).entry("a") for round in (1, 2)]
    assert [entry and entry.verdict for entry in verdicts] == [
        Verdict.COUNTED,
        Verdict.REFUSED,
    ]


def rows_of_a_leaver_are_dealt_again(open_run: OpenDealingRun) -> None:
    """Rows of an island that has left go to others, unless they have counted."""
    (a, b), (first, second) = _two(open_run)
    spans = _claim(a, first, 1).spans
    trained = spans.head(4)
    _publish(b, second, Spans())
    _publish(a, first, trained, kind=FrameKind.DEPARTING)
    a.leave("a", first.incarnation)
    roster_of(b, 1)

    assert _claim(b, second, 1).spans == spans - trained


def the_next_incarnation_has_what_its_name_holds(open_run: OpenDealingRun) -> None:
    """A join reply has the rows that did not count, and the number of the claims."""
    attach = open_run(dealing_settings())
    a, b = attach(key=b"a"), attach(key=b"b")
    first, second = enter(a, "a"), enter(b, "b")
    a.open_data("a", first.incarnation, DataSpec(rows=ROWS))
    spans = _claim(a, first, 1).spans
    _publish(a, first, spans.head(4))
    _publish(b, second, Spans())
    a.leave("a", first.incarnation)
    assert _claim(b, second, 1).spans == spans - spans.head(4)
    b.leave("b", second.incarnation)

    again = attach(key=b"a")
    rejoined = enter(again, "a")
    assert Spans.unpack(rejoined.held_rows) == Spans()
    assert rejoined.last_claim == 1


def a_fenced_incarnation_gets_nothing(open_run: OpenDealingRun) -> None:
    """An incarnation that has left neither describes data nor claims rows."""
    (a, _), (first, _) = _two(open_run)
    a.leave("a", first.incarnation)

    with raises(LeaseLost):
        _claim(a, first, 1)


def a_run_that_cuts_its_data_deals_nothing(open_run: OpenDealingRun) -> None:
    """With data.order='islands' a claim is refused with the setting that helps."""
    a = open_run(plain_settings())(key=b"a")
    joined = enter(a, "a")

    with raises(UsageError):
        a.open_data("a", joined.incarnation, DataSpec(rows=ROWS))


DEALER_CLAIMS: tuple[Callable[[OpenDealingRun], None], ...] = (
    claims_are_disjoint_and_cover_the_data,
    a_repeated_claim_gets_the_same_rows,
    a_claim_before_the_data_is_refused,
    another_dataset_is_refused,
    rows_of_another_island_do_not_count,
    a_row_counts_once,
    rows_of_a_leaver_are_dealt_again,
    the_next_incarnation_has_what_its_name_holds,
    a_fenced_incarnation_gets_nothing,
    a_run_that_cuts_its_data_deals_nothing,
)


def dealing_settings(**run: object) -> RunSettings:
    """Return settings of a run of plain averaging that deals out units of ten rows."""
    tables = plain_settings(**{"start_islands": 2, "end_rounds": 9} | run).to_dict()
    data = {"order": "run", "unit_rows": 10, "shuffle": False}
    return RunSettings.from_dict(tables | {"data": data})


def _two(
    open_run: OpenDealingRun,
) -> tuple[tuple[DealingExchange, DealingExchange], tuple[JoinReply, JoinReply]]:
    """Return two islands of a run that has begun, with its data open."""
    attach = open_run(dealing_settings())
    a, b = attach(key=b"a"), attach(key=b"b")
    first, second = enter(a, "a"), enter(b, "b")
    data = DataSpec(rows=ROWS, fingerprint="c0ffee")
    a.open_data("a", first.incarnation, data)
    b.open_data("b", second.incarnation, DataSpec(rows=ROWS))
    return (a, b), (first, second)


def _claim(exchange: Dealer, joined: JoinReply, number: int) -> Claim:
    ask = Ask(island=joined.island, incarnation=joined.incarnation, number=number)
    return exchange.claim(ask)


def _publish(
    exchange: Exchange,
    joined: JoinReply,
    spans: Spans,
    *,
    round: int = 1,
    kind: FrameKind = FrameKind.UPDATE,
) -> None:
    progress = TrainingProgress(inner_steps=round, tokens=0, cursor=spans.pack())
    frame = update_of(exchange, joined, 1.0, round=round, kind=kind, progress=progress)
    exchange.publish(frame)
