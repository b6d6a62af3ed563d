"""An island keeps its run's receipts, and sends them with its calls."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from atoll.exchange import Frame, Outcome
from atoll.exchange.coordinator import KEPT_ROUNDS, ReceiptCache
from atoll.protocol import Heartbeat, HeldRound, Position
from tests.wire.samples import a_state, an_agreed

NO_BODY = np.empty(0, np.uint8)
POSITION = Position(step=0, rounds=(1,))


def outcome(round: int, *, fragment: int = 0, is_proven: bool = True) -> Outcome:
    """Return an outcome whose receipts name their round."""
    header = an_agreed(fragment=fragment, round=round)
    of_outcome, of_state = (b"o%d" % round, b"s%d" % round) if is_proven else (b"", b"")
    return Outcome(Frame(header, NO_BODY, of_outcome), POSITION, of_state)


def state(round: int, receipt: bytes = b"") -> Frame:
    """Return a state of round `round`, as an island brings it."""
    header = a_state(fragment=0, round=round, island="a", incarnation=2)
    return Frame(header, NO_BODY, receipt)


def beat(*rounds: int) -> Heartbeat:
    """Return a beat with a holding for each fragment."""
    holds = tuple(HeldRound(round, bytes(16)) for round in rounds)
    return Heartbeat(island="a", incarnation=2, step=0, holds=holds)


def test_a_beat_shows_the_receipt_of_each_holding() -> None:
    """By fragment and round, from outcomes and from states; others stay bare."""
    cache = ReceiptCache()
    assert cache.with_receipts(beat(1, 2)) == beat(1, 2)
    cache.note_outcome(outcome(1))
    cache.note_state(state(5, b"fetched"))
    cache.note_outcome(outcome(2, fragment=1))

    def shown(*rounds: int) -> list[bytes]:
        return [held.receipt for held in cache.with_receipts(beat(*rounds)).holds]

    assert shown(1, 2) == [b"s1", b"s2"]
    assert shown(5, 1) == [b"fetched", b""]
    assert shown(0, 2, 2) == [b"", b"s2", b""]


def test_a_recovery_brings_what_is_proven() -> None:
    """The state and the last outcomes before it, without a gap."""
    cache = ReceiptCache()
    for each in (outcome(4), outcome(5, is_proven=False), outcome(6), outcome(7)):
        cache.note_outcome(each)
    headers = [outcome(round).agreed.header for round in (4, 5, 6, 7)]
    call = cache.recovery(state(7), headers)

    assert (call.island, call.incarnation) == ("a", 2)
    assert call.state == replace(state(7), receipt=b"s7")
    assert [header.round for header in call.outcomes] == [6, 7]
    assert call.receipts == (b"o6", b"o7")


def test_old_receipts_are_forgotten() -> None:
    """A run of any length takes the same memory."""
    cache = ReceiptCache()
    for round in range(1, 100):
        cache.note_outcome(outcome(round))

    assert cache.with_receipts(beat(99)).holds[0].receipt == b"s99"
    oldest = 99 - KEPT_ROUNDS + 1
    assert cache.with_receipts(beat(oldest)).holds[0].receipt == b"s%d" % oldest
    assert cache.with_receipts(beat(oldest - 1)).holds[0].receipt == b""
