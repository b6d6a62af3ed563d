"""The receipts that one life of an island has got from its coordinator.

An island repeats them in its beats and in a recovery: a coordinator that has lost
rounds believes nothing else. They are kept in memory only, because an island that
starts again takes the run's state or outcomes, and new receipts with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from atoll.exchange.base import Frame, Outcome
from atoll.exchange.calls import RecoverCall
from atoll.protocol import Heartbeat
from atoll.wire import Header

KEPT_ROUNDS = 16
"""Rounds of one fragment whose receipts are kept. An island holds the last round that
it took, brings at most two outcomes, and may have fetched a few outcomes ahead."""


class ReceiptCache:
    """Receipts by fragment and round. Threads may share it."""

    def __init__(self) -> None:
        self._states: dict[int, dict[int, bytes]] = {}
        self._outcomes: dict[int, dict[int, bytes]] = {}

    def note_state(self, state: Frame) -> None:
        """Keep the receipt of a state that came from the run."""
        _keep(self._states, state.header, state.receipt)

    def note_outcome(self, outcome: Outcome) -> None:
        """Keep the receipts of an outcome, and of the state after it."""
        _keep(self._outcomes, outcome.agreed.header, outcome.agreed.receipt)
        _keep(self._states, outcome.agreed.header, outcome.receipt)

    def with_receipts(self, beat: Heartbeat) -> Heartbeat:
        """Return the beat with the receipt of every holding that has one."""
        if not self._states:
            return beat
        holds = tuple(
            replace(held, receipt=_find(self._states, fragment, held.round))
            for fragment, held in enumerate(beat.holds)
        )
        return replace(beat, holds=holds)

    def recovery(self, state: Frame, outcomes: Sequence[Header]) -> RecoverCall:
        """Return the call that brings a lost state, with all that is proven.

        Outcomes lead to the state without a gap, so those before one whose receipt
        is not known are left out.
        """
        header = state.header
        proven: list[tuple[Header, bytes]] = []
        for outcome in reversed(outcomes):
            receipt = _find(self._outcomes, outcome.fragment, outcome.round)
            if not receipt:
                break
            proven.insert(0, (outcome, receipt))
        receipt = _find(self._states, header.fragment, header.round)
        return RecoverCall(
            header.island,
            header.incarnation,
            replace(state, receipt=receipt),
            tuple(outcome for outcome, _ in proven),
            tuple(receipt for _, receipt in proven),
        )


def _keep(known: dict[int, dict[int, bytes]], header: Header, receipt: bytes) -> None:
    if not receipt:
        return
    # Replaced whole: another thread may read while this one writes.
    rounds = {**known.get(header.fragment, {}), header.round: receipt}
    newest = sorted(rounds)[-KEPT_ROUNDS:]
    known[header.fragment] = {round: rounds[round] for round in newest}


def _find(known: dict[int, dict[int, bytes]], fragment: int, round: int) -> bytes:
    return known.get(fragment, {}).get(round, b"")
