"""Objects of the log of claims that are damaged, forged, gone or foreign."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from atoll.data import DataSpec, Spans
from atoll.errors import CorruptError, UsageError
from atoll.exchange.api.bodies import MAX_LARGE_BYTES
from atoll.exchange.bucket import claims, dealer, documents, keys
from atoll.exchange.bucket.claims import ClaimDocument, DepartedIsland, LedgerDocument
from atoll.testing.dealer_contract import dealing_settings
from atoll.wire import Verdict
from tests.exchange.bucket.dealt import ROWS, Reef, rows_of, total_of

WORTHLESS = [
    b"",
    b"not a document",
    b"x" * (MAX_LARGE_BYTES + 1),
    b'{"digest":"' + b"0" * 64 + b'","document":{}}',
]


def forged(reef: Reef, **fields: object) -> ClaimDocument:
    """Return an entry that an island may put, with some fields changed."""
    document = ClaimDocument(
        run=reef.exchanges["a"]._reader.run,
        island="b",
        incarnation=1,
        number=9,
        spans=Spans(),
        released=(),
        rounds=(0,),
    )
    return replace(document, **fields)  # type: ignore[arg-type]


def put(reef: Reef, document: ClaimDocument) -> int:
    """Put an entry at the end of the log; return its number."""
    number = rows_of(reef, "a").number + 1
    key = keys.claim(number)
    assert reef.store.put_new(key, documents.packed(claims.CLAIM, document, key))
    return number


@pytest.mark.parametrize("data", WORTHLESS, ids=["empty", "text", "large", "sealed"])
def test_an_entry_that_cannot_be_read_is_void_for_all(
    data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """It is reported with its key, and rows are dealt after it."""
    reef = Reef("a", "b")
    first = reef.claim("a").spans
    number = rows_of(reef, "a").number + 1
    reef.store.put(keys.claim(number), [data])

    with caplog.at_level(logging.WARNING):
        second = reef.claim("b").spans

    assert f"{keys.claim(number)} is ignored" in caplog.text
    assert not first & second
    assert reef.ledger() == reef.ledger("a") == reef.ledger("b")
    assert rows_of(reef, "b").number == number + 1


@pytest.mark.parametrize(
    "fields",
    [
        {"spans": Spans([(0, ROWS + 1)])},
        {"spans": Spans([(40, 50)]), "rounds": ()},
        {"spans": Spans([(40, 50)]), "incarnation": 1, "island": "c"},
        {"data": DataSpec(rows=7), "number": 0},
    ],
    ids=["beyond the data", "no rounds", "of an old incarnation", "other data"],
)
def test_a_forged_entry_is_void(fields: dict[str, object]) -> None:
    """It changes no row's state, and every reader has the same ledger."""
    reef = Reef("a", "b", "c")
    reef.claim("c")
    reef.enter("c")  # from now on its first incarnation claims nothing
    before = reef.ledger("a")

    put(reef, forged(reef, **fields))

    after = reef.ledger("a")
    assert after.counts == before.counts
    assert after.holdings == before.holdings
    assert after.rows == ROWS
    assert reef.ledger() == after


def test_rows_in_hand_cannot_be_claimed() -> None:
    """An entry that names rows of another island gets the free ones only."""
    reef = Reef("a", "b")
    spans = reef.claim("a").spans

    put(reef, forged(reef, spans=spans | Spans([(20, 30)])))

    ledger = reef.ledger("a")
    assert ledger.holdings["a"] == spans
    assert list(ledger.holdings["b"]) == [(20, 30)]
    assert total_of(ledger) == ROWS


def test_a_forged_release_makes_no_row_count_twice() -> None:
    """Whoever can write the bucket can free rows; a row still counts once."""
    reef = Reef("a", "b", end_rounds=9)
    spans = reef.claim("a").spans
    gone = DepartedIsland(island="a", incarnation=1)
    put(reef, forged(reef, number=0, released=(gone,)))
    assert reef.claim("b").spans == spans
    reef.publish("a", spans, round=1)
    reef.publish("b", spans, round=1)

    roster = reef.roster("b", 1)
    assert {entry.island: entry.verdict for entry in roster.entries} == {
        "a": Verdict.REFUSED,
        "b": Verdict.COUNTED,
    }


def test_an_entry_that_a_roster_names_and_that_is_gone_is_named() -> None:
    """The ledger is never guessed."""
    reef = Reef("a", "b")
    for name in ("a", "b"):
        reef.publish(name, reef.claim(name).spans, round=1)
    reef.roster("a", 1)
    reef.store.remove([keys.claim(2)])

    with pytest.raises(CorruptError, match=r"claims/2 is gone: a roster was written"):
        reef.ledger()


def test_a_roster_that_an_entry_names_and_that_is_gone_is_named() -> None:
    """An entry of a forger, too, names a roster of the future."""
    reef = Reef("a", "b")
    put(reef, forged(reef, rounds=(5,)))

    with pytest.raises(CorruptError, match=r"rounds/0/5/roster is gone: claims/2 was"):
        reef.claim("a")


def test_an_entry_of_another_run_is_void() -> None:
    """Two runs cannot share a URL, and their claims do not mix."""
    reef = Reef("a", "b")
    put(reef, forged(reef, run="other", spans=Spans([(0, 10)])))

    assert list(reef.claim("a").spans) == [(0, 10)]


def damaged(document: LedgerDocument, fault: str) -> LedgerDocument:
    """Return a ledger that cannot be that of the run."""
    if fault == "fragments":
        return replace(document, rounds=(0, 0))
    if fault == "twice":
        return replace(document, free=Spans([(0, 10_000)]))
    if fault == "front":
        return replace(document, counted=(Spans([(9000, 9001)]),))
    return replace(document, number=1)


@pytest.mark.parametrize("fault", ["fragments", "twice", "front", "number", "bytes"])
def test_a_ledger_that_is_wrong_is_ignored(
    fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A reader begins with the one before it."""
    monkeypatch.setattr(dealer, "LEDGER_ENTRIES", 8)
    reef = Reef("a", "b", settings=dealing_settings(), rows=10_000)
    for _ in range(12):
        for name in ("a", "b"):
            reef.claim(name)
    key = max(item.key for item in reef.store.items(keys.LEDGERS))
    document = documents.fetch(reef.store, claims.LEDGER, key)
    data = documents.packed(claims.LEDGER, damaged(document, fault), key)
    reef.store.put(key, [b"bytes"] if fault == "bytes" else data)

    with caplog.at_level(logging.WARNING):
        ledger = reef.ledger()

    assert ledger == reef.ledger("a")
    if fault != "number":
        assert f"{key} is ignored" in caplog.text


def test_another_dataset_is_refused_with_both() -> None:
    """An island with other data does not begin."""
    reef = Reef("a", "b")

    with pytest.raises(UsageError, match="has 96 rows, and the run's has 95"):
        reef.open("b", rows=96)
