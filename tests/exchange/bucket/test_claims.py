"""Rows of a run in a bucket: claims, restarts, evictions, and what a claim costs."""

from __future__ import annotations

import random

import pytest

from atoll.data import Ask, Spans
from atoll.errors import UsageError
from atoll.exchange.bucket import dealer, keys
from atoll.exchange.bucket.dealer import KEPT_LEDGERS, LEDGER_ENTRIES
from atoll.exchange.bucket.view import BEAT_S
from atoll.store import CountedStore, MemoryStore
from atoll.testing.dealer_contract import dealing_settings
from atoll.wire import FrameKind, Verdict
from tests.exchange.bucket.dealt import (
    ROWS,
    Reef,
    asynchronous_dealing,
    rows_in,
    rows_of,
    total_of,
)

OF_A_CLAIM = 2
"""A get that finds no next entry of the log, and the put of it."""

OF_ANOTHER_ENTRY = 1
"""More for each entry that another island has put since."""


def test_a_claim_costs_two_requests_and_one_for_each_other_entry() -> None:
    """Whatever the number of islands, and of claims that were made before."""
    reef = Reef("a", "b")
    counted = CountedStore(reef.store)
    reef.enter("c", store=counted)
    for others in range(3):
        for _ in range(others):
            reef.claim("b")
        before = counted.requests
        reef.exchanges["c"]._dealer.claim(ask_of(reef, "c"))  # without its heartbeat
        reef.numbers["c"] += 1
        spent = counted.requests.since(before)

        assert spent.total == OF_A_CLAIM + OF_ANOTHER_ENTRY * others


def verdict_on(reef: Reef, name: str, round: int) -> Verdict:
    entry = reef.roster("b", round).entry(name)
    assert entry is not None
    return entry.verdict


def ask_of(reef: Reef, name: str) -> Ask:
    return Ask(
        island=name,
        incarnation=reef.joined[name].incarnation,
        number=reef.numbers[name] + 1,
    )


def test_the_next_incarnation_trains_what_had_not_counted() -> None:
    """Rows that have counted, or stand in an update, are not dealt again."""
    reef = Reef("a", "b")
    first, second = reef.claim("a").spans, reef.claim("a").spans
    reef.publish("a", first.head(4), round=1)
    reef.publish("b", Spans(), round=1)
    assert verdict_on(reef, "a", 1) is Verdict.COUNTED
    reef.hold("a")
    standing = (first | second) - first.head(4)
    reef.publish("a", standing.head(3), round=2)

    rejoined = reef.enter("a")

    assert Spans.unpack(rejoined.held_rows) == standing - standing.head(3)
    assert rejoined.last_claim == 2


def test_rows_of_an_evicted_island_return() -> None:
    """Silence frees nothing in a bucket; an operator's eviction does."""
    reef = Reef("a", "b", end_rounds=9)
    lost = reef.claim("a").spans
    reef.kill("a")
    while spans := reef.claim("b").spans:
        assert not spans & lost
    assert reef.claim("b").is_over

    reef.evict("a")

    assert reef.claim("b").spans == lost


def test_a_run_ends_with_its_data_and_names_rows_of_the_dead() -> None:
    """Nothing is free, and no live island has rows left: the run is stopped."""
    reef = Reef("a", "b")
    lost = reef.claim("a").spans
    reef.kill("a")
    dealt = Spans()
    while spans := reef.claim("b").spans:
        dealt = dealt | spans
    assert reef.exchanges["b"]._reader.view.state.last_round is None

    reef.publish("b", dealt, round=1)
    reef.roster("b", 1)

    state = reef.exchanges["b"]._reader.view.state
    assert state.last_round == 1
    ledger = reef.ledger()
    assert ledger.counts.trained == ROWS - len(lost)
    assert ledger.states.in_hand == {"a": lost}


def test_an_island_without_work_closes_the_round_that_keeps_rows() -> None:
    """Rows return when no update of their island stands, so that must not wait."""
    reef = Reef("a", "b", end_rounds=9)
    spans = reef.claim("a").spans
    while reef.claim("b").spans:
        pass
    reef.publish("a", spans.head(2), round=1, kind=FrameKind.DEPARTING)
    reef.exchanges["a"].leave("a", reef.joined["a"].incarnation)
    claims = []
    for _ in range(200):
        reef.hold("b")
        claims.append(reef.claim("b"))
        if claims[-1].spans:
            break

    assert claims[-1].spans == spans - spans.head(2)
    assert not any(claim.is_over for claim in claims)


def test_an_island_that_returns_overtakes_the_release_of_its_rows() -> None:
    """Another has decided that its rows are free; the entry of the return is first."""
    reef = Reef("a", "b")
    spans = reef.claim("a").spans
    reef.exchanges["a"].leave("a", reef.joined["a"].incarnation)
    reef.time.sleep(BEAT_S)
    b = reef.exchanges["b"]
    rows_of(reef, "b").read()
    _, release = b._dealer._decided(ask_of(reef, "b"))
    number = rows_of(reef, "b").number + 1
    assert [gone.island for gone in release.released] == ["a"]

    rejoined = reef.enter("a")

    assert not rows_of(reef, "b").put(release, number)
    assert Spans.unpack(rejoined.held_rows) == spans
    assert not reef.claim("b").spans & spans


def test_an_asynchronous_run_deals_rows_once() -> None:
    """An update counts in the round that lists it, whatever its label is."""
    reef = Reef("a", "b", settings=asynchronous_dealing())
    for label in (1, 2):
        for name in ("a", "b"):
            reef.publish(name, reef.claim(name).spans, round=label)
            reef.time.sleep(2.0)
            reef.hold(name)
    reef.publish("a", reef.claim("a", number=1).spans, round=3)
    reef.time.sleep(2.0)
    reef.hold("a")

    ledger = reef.ledger()
    assert ledger.counts.trained == 40
    assert total_of(ledger) == ROWS
    last = reef.exchanges["a"]._reader.view.number(0) - 1
    assert verdict_on(reef, "a", last) is Verdict.REFUSED


def test_a_stream_ends_for_all() -> None:
    """The island that reaches the end of a stream says where, as an entry."""
    reef = Reef("a", "b", rows=None)
    reef.claim("a", want=3)
    reef.claim("b", want=3)

    assert reef.open("b", rows=42).rows == 42
    assert reef.open("a", rows=42).rows == 42
    with pytest.raises(UsageError, match="has 43 rows, and the run's has 42"):
        reef.open("a", rows=43)
    ledger = reef.ledger()
    assert ledger.total == total_of(ledger) == 42
    assert list(ledger.holdings["b"]) == [(30, 42)]


def test_the_log_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries and ledgers that no reader needs are removed, and the ledger stays."""
    monkeypatch.setattr(dealer, "LEDGER_ENTRIES", 8)
    reef = Reef("a", "b", settings=dealing_settings(), rows=10_000)
    largest = 0
    for _ in range(60):
        for name in ("a", "b"):
            reef.claim(name)
            listed = [item.key for item in reef.store.items(keys.CLAIMS)]
            largest = max(largest, len(listed))

    assert largest <= 3 * 8 + KEPT_LEDGERS + 1
    assert reef.ledger() == reef.ledger("a") == reef.ledger("b")
    assert len(reef.ledger("a").holdings["a"]) == 600
    assert LEDGER_ENTRIES == 64


def test_a_reader_that_stood_still_begins_with_a_later_ledger(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The entries that it lacks are gone; a roster names a later one."""
    monkeypatch.setattr(dealer, "LEDGER_ENTRIES", 8)
    reef = Reef("a", "b", settings=dealing_settings(), rows=10_000)
    late = reef.reader()
    rows_in(late).read()
    for _ in range(40):
        for name in ("a", "b"):
            reef.claim(name)
    rows_in(late).read()
    assert late.view.state.ledger != reef.ledger("a")  # it sees no next entry

    for name in ("a", "b"):
        reef.publish(name, Spans(), round=1)
    reef.roster("a", 1)
    late.read_rosters(0)
    rows_in(late).read()

    assert late.view.state.ledger == reef.ledger("a")


@pytest.mark.parametrize("seed", range(8))
def test_all_readers_have_the_same_ledger(seed: int) -> None:
    """Whenever they read, and whoever claims, leaves, is killed and returns."""
    drawn = random.Random(seed)
    store = MemoryStore()
    reef = Reef("a", "b", "c", store=store, end_rounds=999)
    readers = [reef.reader() for _ in range(2)]
    in_hand: dict[str, Spans] = {name: Spans() for name in "abc"}
    round, gone = 1, set[str]()
    for _ in range(25):
        for name in sorted(set("abc") - gone):
            if drawn.random() < 0.7:
                in_hand[name] = in_hand[name] | reef.claim(name).spans
        for name in sorted(set("abc") - gone):
            part = in_hand[name].head(drawn.randrange(12))
            reef.publish(name, part, round=round)
            in_hand[name] = in_hand[name] - part
        alive = sorted(set("abc") - gone)
        for _ in range(100):
            for name in alive:
                reef.hold(name)
            if reef.exchanges[alive[0]]._reader.view.number(0) > round:
                break
        round += 1
        reef.time.sleep(BEAT_S)
        fate, name = drawn.random(), drawn.choice("abc")
        if name in gone:
            rejoined = reef.enter(name)
            in_hand[name] = Spans.unpack(rejoined.held_rows)
            gone.discard(name)
            reef.hold(name)
        elif fate < 0.2 and len(gone) < 2:
            reef.exchanges[name].leave(name, reef.joined[name].incarnation)
            gone.add(name)
        elif fate < 0.4 and len(gone) < 2:
            reef.kill(name)
            gone.add(name)
        reader = drawn.choice(readers)
        reader.read_rosters(0)
        if drawn.random() < 0.5:
            rows_in(reader).read()

    expected = reef.ledger()
    assert total_of(expected) == ROWS
    for reader in readers:
        reader.read_rosters(0)
        rows_in(reader).read()
        assert reader.view.state.ledger == expected
    counted = Spans()
    for number in range(1, round):
        for entry in reef.reader().roster(0, number).roster.counted:
            spans = Spans.unpack(entry.spans)
            assert not counted & spans
            counted = counted | spans
    assert counted == expected.counted[0]


def test_the_last_island_to_leave_closes_the_rounds_of_its_rows() -> None:
    """After their grace: no other island would, and its rows would stay in hand."""
    reef = Reef("a", settings=asynchronous_dealing())
    dealt = Spans()
    while spans := reef.claim("a").spans:
        dealt = dealt | spans
    reef.publish("a", dealt, round=1, kind=FrameKind.DEPARTING)

    reef.exchanges["a"].leave("a", reef.joined["a"].incarnation)

    ledger = reef.ledger()
    assert ledger.counts.trained == ROWS
