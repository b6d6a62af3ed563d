"""Wrong data of an island is refused alike by every run that deals out rows."""

from __future__ import annotations

import pytest

from atoll.data import Ask, DataSpec, Spans
from atoll.errors import UsageError
from atoll.protocol import JoinReply
from atoll.settings import RunSettings
from atoll.store import MemoryStore
from atoll.testing.dealer_contract import (
    AttachDealer,
    DealingExchange,
    OpenDealingRun,
    dealing_settings,
)
from atoll.testing.fixtures import StoreRun, enter
from tests.exchange.test_dealers import at_a_coordinator, in_memory


def in_a_bucket(settings: RunSettings) -> AttachDealer:
    return StoreRun(MemoryStore(), settings)


EACH_RUN = pytest.mark.parametrize(
    "open_run", [in_memory, at_a_coordinator, in_a_bucket]
)


def two(open_run: OpenDealingRun) -> list[tuple[DealingExchange, JoinReply]]:
    """Return two islands of a run whose data is not open yet."""
    attach = open_run(dealing_settings())
    exchanges = [attach(key=name.encode()) for name in "ab"]
    return [
        (exchange, enter(exchange, name))
        for exchange, name in zip(exchanges, "ab", strict=True)
    ]


@EACH_RUN
def test_another_length_is_refused_with_both(open_run: OpenDealingRun) -> None:
    """The second island is told that all must have the same data."""
    (a, _), (b, _) = two(open_run)
    a.open_data("a", 1, DataSpec(rows=1_000_000))

    with pytest.raises(UsageError) as refused:
        b.open_data("b", 1, DataSpec(rows=1_000_500))

    assert str(refused.value) == (
        "This island's data has 1,000,500 rows, and the run's has 1,000,000. "
        "Give all islands the same data."
    )


@EACH_RUN
def test_another_fingerprint_is_refused_with_both(open_run: OpenDealingRun) -> None:
    """An island without one is not compared."""
    (a, _), (b, _) = two(open_run)
    a.open_data("a", 1, DataSpec(rows=50, fingerprint="c0ffee"))

    assert b.open_data("b", 1, DataSpec(rows=50)).rows == 50
    with pytest.raises(UsageError, match=r"fingerprint 'bad', and the run's has 'c0f"):
        b.open_data("b", 1, DataSpec(rows=50, fingerprint="bad"))


@EACH_RUN
def test_an_empty_dataset_is_refused(open_run: OpenDealingRun) -> None:
    """And opens nothing: another island may open its own."""
    (a, _), (b, _) = two(open_run)

    with pytest.raises(UsageError, match="nothing to deal out"):
        a.open_data("a", 1, DataSpec(rows=0))

    assert b.open_data("b", 1, DataSpec(rows=50)).rows == 50


@EACH_RUN
def test_a_stream_that_ends_within_a_claim_has_no_rows_beyond(
    open_run: OpenDealingRun,
) -> None:
    """The rest of a claimed unit is not there; the other island learns the length."""
    (a, _), (b, _) = two(open_run)
    for name, exchange in (("a", a), ("b", b)):
        exchange.open_data(name, 1, DataSpec(rows=None))
    a.claim(Ask(island="a", incarnation=1, number=1, want=2))
    spans = b.claim(Ask(island="b", incarnation=1, number=1, want=2)).spans
    assert spans == Spans([(20, 40)])

    b.open_data("b", 1, DataSpec(rows=33))

    assert not a.claim(Ask(island="a", incarnation=1, number=2)).spans
    assert a.open_data("a", 1, DataSpec(rows=33)).rows == 33
    with pytest.raises(UsageError, match="has 34 rows, and the run's has 33"):
        a.open_data("a", 1, DataSpec(rows=34))
