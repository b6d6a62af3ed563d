"""Buckets that Atoll 0.1.0 has written, whose objects have no digests, go on.

`buckets-0.1.0.json` holds the objects of three small runs, by key, in base64.
"""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from pathlib import Path

import pytest

from atoll.errors import CorruptError, UsageError
from atoll.exchange.bucket import BucketReader, StoreExchange, documents, keys
from atoll.exchange.bucket.documents import (
    ControlDocument,
    RosterDocument,
    fetch_roster,
)
from atoll.exchange.bucket.outcomes import Outcomes
from atoll.exchange.bucket.states import States
from atoll.protocol import JoinRequest
from atoll.store import MemoryStore
from atoll.testing.fixtures import MODEL, WaitingTime, outcome_of, update_of
from atoll.wire import Roster, blake3_digest

WRITTEN = json.loads(Path(__file__).with_name("buckets-0.1.0.json").read_text())
URL = "a bucket of 0.1.0"


def bucket(name: str) -> MemoryStore:
    store = MemoryStore()
    for key, data in WRITTEN[name]["objects"].items():
        store.put(key, [base64.b64decode(data)])
    return store


def joined_again(store: MemoryStore, islands: int) -> list[StoreExchange]:
    """Let the same islands join again, each as its next life."""
    time, exchanges = WaitingTime(), []
    for number in range(islands):
        reader = BucketReader.open(store, time, url=URL)
        nonce = b"again %d" % number
        exchange = StoreExchange(reader, key=b"%d" % number, nonce=nonce)
        exchange.join(JoinRequest(model=MODEL, island=f"i{number}", returns=True))
        exchanges.append(exchange)
    return exchanges


def next_round(exchanges: list[StoreExchange], round: int) -> None:
    for number, exchange in enumerate(exchanges):
        joined = exchange.join(
            JoinRequest(model=MODEL, island=f"i{number}", returns=True)
        )
        exchange.publish(update_of(exchange, joined, 1.0, round=round))
    for exchange in exchanges:
        outcome_of(exchange, round)


def roster(store: MemoryStore, round: int) -> RosterDocument:
    return fetch_roster(store, keys.roster(0, round))


@pytest.mark.parametrize(
    ("name", "islands", "closed"),
    [("direct", 2, 3), ("shards", 4, 3), ("no_state", 2, 2)],
)
def test_a_run_goes_on_and_is_chained_from_its_next_roster_on(
    name: str, islands: int, closed: int
) -> None:
    """The first new roster names the bytes of the last one that has no digest."""
    store = bucket(name)
    exchanges = joined_again(store, islands)
    assert exchanges[0].state(0).header.base.hex() == WRITTEN[name]["base"]
    next_round(exchanges, closed + 1)
    next_round(exchanges, closed + 2)

    old = store.get(keys.roster(0, closed))
    assert roster(store, closed + 1).before == blake3_digest(old)
    assert roster(store, closed + 2).before == roster(store, closed + 1).digest
    bases = {exchange.state(0).header.base for exchange in exchanges}
    late = BucketReader.open(store, WaitingTime(), url=URL)
    states = States(late, Outcomes(late, None))
    states.begin(0)
    assert {states.read(0).digest} == bases


def test_no_unchained_roster_follows_a_chained_one() -> None:
    """An island of 0.1.0 cannot have written it: it refuses the one before by name."""
    store = bucket("direct")
    exchanges = joined_again(store, 2)
    next_round(exchanges, 4)
    old = json.loads(bytes(store.get(keys.roster(0, 3))))
    old["document"] |= {"round": 5, "base": exchanges[0].state(0).header.base.hex()}
    store.put(keys.roster(0, 5), [json.dumps(old).encode()])
    late = BucketReader.open(store, WaitingTime(), url=URL)

    with pytest.raises(CorruptError, match=r"rounds/0/5/roster follows .*digest none"):
        States(late, Outcomes(late, None)).begin(0)


def test_the_last_unchained_roster_is_guarded_by_the_next_one() -> None:
    """One changed bit of it is found by whoever reads both."""
    store = bucket("direct")
    next_round(joined_again(store, 2), 4)
    key = keys.roster(0, 3)
    whole = bytes(store.get(key))
    assert b'"sgd",1.0' in whole
    store.put(key, [whole.replace(b'"sgd",1.0', b'"sgd",9.0')])
    store.remove([keys.state_complete(0, 2)])
    late = BucketReader.open(store, WaitingTime(), url=URL)

    with pytest.raises(CorruptError, match=r"rounds/0/4/roster follows"):
        States(late, Outcomes(late, None)).begin(0)


@pytest.mark.parametrize("has_moved", [False, True])
def test_a_round_that_a_move_had_frozen_is_refused_by_name(has_moved: bool) -> None:
    """Only 0.1.0 knows where such a round goes on, unless the run is elsewhere."""
    store = bucket("direct")
    exchanges = joined_again(store, 2)
    next_round(exchanges, 4)
    key = keys.roster(0, 5)
    frozen = replace(roster(store, 4), round=5, roster=Roster(()), move=1)
    store.put(key, [*documents.packed(documents.ROSTER, frozen, key)])
    for number, action in enumerate(["move", "moved"][: 1 + has_moved], start=1):
        control = ControlDocument(
            run=frozen.run, action=action, values={}, target="https://x:1", nonce="0f"
        )
        store.put(
            keys.control(number),
            documents.packed(documents.CONTROL, control, keys.control(number)),
        )
    late = BucketReader.open(store, WaitingTime(), url=URL)
    states = States(late, Outcomes(late, None))
    if has_moved:
        states.begin(0)
        assert states.read(0).round == 4
        return
    with pytest.raises(UsageError, match=r"rounds/0/5/roster was frozen.*0\.1\.0"):
        states.begin(0)


def test_documents_say_that_they_are_newer_than_0_1_0() -> None:
    """Version 0.1.0 reads the number, and refuses what it cannot judge."""
    store = bucket("direct")
    next_round(joined_again(store, 2), 4)

    assert json.loads(bytes(store.get(keys.roster(0, 4))))["format"] == 2
    assert documents.FORMAT == 2
