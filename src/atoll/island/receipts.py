"""The way of an asynchronous update to its receipt: the roster that lists it.

Rule 1: an island takes the outcomes of a fragment in the order of their rounds, from
        its state on, and applies each one immediately. Neither its live weights nor the
        bytes of the update in flight depend on the anchor.
Rule 2: an update's receipt is a roster with its digest. A wait without an update ends
        with the outcome of its round.
Rule 3: from its receipt on an update is settled, and a checkpoint has its outcome,
        though the rounds that are over by then are still being taken.
Rule 4: one frame at a time is in memory. An island that is far behind fetches the
        state of the run, and only the rosters of the rounds in between.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from atoll import protocol, wire
from atoll.errors import AtollError, CorruptError
from atoll.exchange import Exchange, Outcome
from atoll.island.base import IslandMemory
from atoll.island.entry import fetch_state
from atoll.island.fragment import IslandFragment, UpdateInFlight
from atoll.island.progress import IslandCounters
from atoll.island.saved_state import AppliedOutcome
from atoll.protocol.island import FragmentSync
from atoll.trace import span
from atoll.wire import Verdict

log = logging.getLogger("atoll")

F32_BYTES = 4
_NO_BODY = np.empty(0, np.uint8)


@dataclass(frozen=True)
class _Progress:
    """The run's progress in a fragment, by the last outcome."""

    open_round: int
    outcome_bytes: int
    """Of a frame that the exchange transfers; 0 if it is made of updates."""


class ReceiptReader:
    """Applies the outcomes of an asynchronous run, and finds receipts in them."""

    def __init__(
        self,
        exchange: Exchange,
        joined: protocol.JoinReply,
        memory: IslandMemory,
        counters: IslandCounters,
    ) -> None:
        self._exchange, self._memory, self._counters = exchange, memory, counters
        self._island = joined.island
        self._has_windows = joined.settings.sync.dynamic_local_updates
        self._progress: dict[int, _Progress] = {}

    def take_next(
        self,
        slot: IslandFragment,
        sealed: UpdateInFlight,
        sync_state: FragmentSync,
        *,
        wait_s: float,
    ) -> bool:
        """Take the next outcome of a fragment; return False if there is none yet.

        Afterwards `sealed.receipt` is set if an outcome that was taken is the receipt.

        Raises:
            OutcomeLost: the run has lost an outcome.
            RunEnded: the next round never opens.
        """
        if self._is_far_behind(slot):
            return self._take_state(slot, sealed, sync_state)
        round = slot.state.round + 1
        with span("outcome"):
            outcome = self._exchange.outcome(slot.index, round, wait_s=wait_s)
        if outcome is None:
            return False
        header = outcome.agreed.header
        self._progress[slot.index] = _Progress(
            outcome.position.rounds[slot.index],
            0 if outcome.is_made_of_updates else header.body_bytes,
        )
        if not outcome.has_body:
            return self._take_state(slot, sealed, sync_state)
        with span("digest"):
            wire.verify_body(header, outcome.agreed.body)
        self._counters.bytes_down += wire.frame_bytes(header)
        try:
            with slot.turn:
                self._apply(slot, sealed, outcome)
                self._note(slot, sealed, sync_state, outcome)
        except CorruptError as exc:
            log.warning(
                "fragment %d takes the run's state instead of its outcome: %s",
                slot.index,
                exc,
            )
            return self._take_state(slot, sealed, sync_state)
        return True

    def take_rest(
        self, slot: IslandFragment, sealed: UpdateInFlight, sync_state: FragmentSync
    ) -> None:
        """Take the rounds that were over at the receipt; on an error, those so far.

        The next update meets the same error.
        """
        progress = self._progress[slot.index]
        with suppress(AtollError):
            while slot.state.round + 1 < progress.open_round and self.take_next(
                slot, sealed, sync_state, wait_s=0.0
            ):
                pass

    def _is_far_behind(self, slot: IslandFragment) -> bool:
        """Return whether the missing outcomes are larger than the state."""
        progress = self._progress.get(slot.index)
        if progress is None:
            return False
        behind = progress.open_round - 1 - slot.state.round
        return behind * progress.outcome_bytes > _state_bytes(slot)

    def _apply(
        self, slot: IslandFragment, sealed: UpdateInFlight, outcome: Outcome
    ) -> None:
        self._keep_loaded(slot, sealed)
        with slot.lock, span("apply"):
            self._memory.apply(slot, outcome.agreed)
            slot.outcomes.append(outcome.agreed.header)
            slot.note_held()

    def _take_state(
        self, slot: IslandFragment, sealed: UpdateInFlight, sync_state: FragmentSync
    ) -> bool:
        """Take the run's state, and look for the update in the rosters up to it.

        Return False if the run is not ahead: it has lost rounds.
        """
        fresh = fetch_state(self._exchange, slot.index)
        first, last = slot.state.round + 1, fresh.round
        passed = [self._roster_of(slot, round) for round in range(first, last + 1)]
        outcomes = [outcome for outcome in passed if outcome is not None]
        progress = self._progress.pop(slot.index)
        if not outcomes or len(outcomes) < len(passed):
            return False
        self._counters.bytes_down += _state_bytes(slot)
        self._progress[slot.index] = replace(
            progress, open_round=outcomes[-1].position.rounds[slot.index]
        )
        with slot.turn:
            self._keep_loaded(slot, sealed)
            with slot.lock:
                self._memory.replace(slot, fresh)
                slot.outcomes.clear()
                slot.outcomes.extend(outcome.agreed.header for outcome in outcomes)
                slot.note_held()
            for outcome in outcomes:
                self._note(slot, sealed, sync_state, outcome)
        return True

    def _roster_of(self, slot: IslandFragment, round: int) -> Outcome | None:
        """Return the outcome of a round that is over, without its body."""
        with span("outcome"):
            outcome = self._exchange.outcome(
                slot.index, round, wait_s=0.0, has_body=False
            )
        if outcome is None:
            return None
        return replace(outcome, agreed=replace(outcome.agreed, body=_NO_BODY))

    def _keep_loaded(self, slot: IslandFragment, sealed: UpdateInFlight) -> None:
        """Keep the anchor that the work of a wait without an update is based on."""
        if sealed.is_awaited and sealed.receipt is None:
            self._memory.keep_loaded(slot, sealed)

    def _note(
        self,
        slot: IslandFragment,
        sealed: UpdateInFlight,
        sync_state: FragmentSync,
        outcome: Outcome,
    ) -> None:
        """Note what an outcome in the state says of an update. Holds `slot.turn`."""
        header = outcome.agreed.header
        roster = header.roster
        assert roster is not None
        if sealed.receipt is not None:
            self._note_passed(slot, sealed, sync_state, outcome)
            return
        judge_held_back(self._memory, slot, header, island=self._island)
        digest = b""
        if sealed.frame is not None:
            digest = wire.update_digest(sealed.frame.header)
        verdict = protocol.verdict_of(roster, self._island, digest)
        is_own = bool(digest) and verdict is not Verdict.LATE
        if not (is_own or (sealed.is_awaited and header.round == sealed.round)):
            return
        entry = roster.entry(self._island)
        self._memory.settle(slot, sealed, verdict)
        sealed.listed = header.round
        sealed.receipt = AppliedOutcome(
            decision=protocol.decide(
                sync_state, verdict, through=slot.state.round, listed=header.round
            ),
            verdict=verdict,
            reason=entry.reason if entry and is_own else "",
            through=slot.state.round,
            position=outcome.position,
            window=entry.window if entry and self._has_windows else None,
        )

    def _note_passed(
        self,
        slot: IslandFragment,
        sealed: UpdateInFlight,
        sync_state: FragmentSync,
        outcome: Outcome,
    ) -> None:
        """Note that one more round is in the state since the receipt."""
        receipt, through = sealed.receipt, slot.state.round
        assert receipt is not None
        sealed.receipt = replace(
            receipt,
            decision=protocol.decide(
                sync_state, receipt.verdict, through=through, listed=sealed.listed
            ),
            through=through,
            position=outcome.position,
        )


def judge_held_back(
    memory: IslandMemory, slot: IslandFragment, outcome: wire.Header, *, island: str
) -> None:
    """Decide by an outcome which part of the held-back work has not counted."""
    held_back = slot.held_back
    if held_back is None or held_back.round != outcome.round:
        return
    assert outcome.roster is not None
    held_back.judge(outcome.roster, island)
    memory.leave_over(slot, held_back.saved, held_back.remains)


def _state_bytes(slot: IslandFragment) -> int:
    """Return the size of a fragment's anchor and moments."""
    return F32_BYTES * slot.layout.elements * len(slot.state.vectors)
