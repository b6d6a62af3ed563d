"""An island's ledger: which inner steps and tokens are in which update.

Work is settled when no further update has to hold it: it was counted, refused or
dropped. What is not settled when an island leaves, and no round takes, is lost.
"""

from __future__ import annotations

import logging
import warnings

from atoll.errors import AtollWarning, UsageError
from atoll.island.arrivals import Arrival
from atoll.island.slot import Sealed, Slot
from atoll.island.tally import Tally
from atoll.protocol import How, JoinReply
from atoll.protocol.island_state import CARRIED_ROUNDS
from atoll.wire import Verdict

log = logging.getLogger("atoll")


class Ledger:
    """Keeps an island's tally of work in step with what its updates came to."""

    def __init__(self, joined: JoinReply, tally: Tally) -> None:
        self._island, self._settings = joined.island, joined.settings
        self._tally = tally

    def weight(self, slot: Slot) -> int:
        """Return what an update counts for that is sealed now.

        Raises:
            UsageError: weights by tokens are asked for, and none were reported.
        """
        by_tokens = self._settings.outer.weight == "tokens"
        if not by_tokens and self._settings.run.end_tokens is None:
            return 1
        settled_steps, settled_tokens = self._settled(slot)
        tokens = self._tally.tokens - settled_tokens
        if tokens < 1 and self._tally.inner_steps > settled_steps:
            key = "outer.weight='tokens'" if by_tokens else "run.end_tokens"
            raise UsageError(
                f"Island {self._island!r} has reported {tokens} tokens since its "
                f"last update, and {key} needs them. "
                "Call island.report(tokens=...) before every optimizer step."
            )
        return max(1, tokens) if by_tokens else 1

    def has_rest(self, slot: Slot) -> bool:
        """Return whether inner steps of a fragment are in no update."""
        settled_steps, _ = self._settled(slot)
        return self._tally.inner_steps != settled_steps

    def count(self, slot: Slot, sealed: Sealed, arrival: Arrival) -> None:
        """Enter what an update came to."""
        match arrival.how:
            case How.ADOPT | How.REBASE:
                self._tally.counted += 1
                slot.settle(sealed.inner_steps, sealed.tokens)
            case How.CARRY:
                self._tally.carried += 1
            case How.DROP:
                self._tally.counted += arrival.verdict is Verdict.COUNTED
                self._tally.dropped += 1
                if arrival.reason:
                    self._tell_spent(slot, arrival)
                else:
                    self._report_dropped(slot, sealed, arrival.verdict)
                slot.settle(self._tally.inner_steps, self._tally.tokens)
            case How.REFUSE:
                self._tally.refused += 1
                slot.settle(self._tally.inner_steps, self._tally.tokens)
                self._tell_refused(slot, sealed, arrival)

    def lose(self, slot: Slot) -> None:
        """Say what no round has taken since the last seal, if there is any."""
        steps, tokens = self._unsettled(slot)
        self._note_lost(steps)
        if steps:
            warnings.warn(
                f"Island {self._island!r} leaves, and no round took what it has "
                f"learnt of fragment {slot.index} since round {slot.state.round}: "
                f"{steps} inner steps are lost, with {tokens} tokens.",
                AtollWarning,
                stacklevel=2,
            )

    def lose_all(self, slots: list[Slot]) -> None:
        """Note as lost what is in no update: of the fragment that loses most."""
        self._note_lost(max(self._unsettled(slot)[0] for slot in slots))

    def end(self, slots: list[Slot]) -> None:
        """Note what the run has ended without."""
        last = min(slot.settled_steps for slot in slots)
        self._tally.not_counted_steps = self._tally.inner_steps - last

    def _settled(self, slot: Slot) -> tuple[int, int]:
        """Return the inner steps and tokens that no further update has to hold."""
        flying = slot.sealed
        if flying is None or (flying.outcome and flying.outcome.how is How.CARRY):
            return slot.settled_steps, slot.settled_tokens
        return flying.inner_steps, flying.tokens

    def _unsettled(self, slot: Slot) -> tuple[int, int]:
        """Return the inner steps and tokens that are in no update of a fragment.

        One whose outcome cannot be learnt any more is none, as far as is known here.
        """
        steps, tokens = self._settled(slot)
        flying = slot.sealed
        if flying and flying.arrival.done() and flying.arrival.exception():
            steps, tokens = slot.settled_steps, slot.settled_tokens
        return self._tally.inner_steps - steps, self._tally.tokens - tokens

    def _note_lost(self, steps: int) -> None:
        self._tally.not_counted_steps = max(self._tally.not_counted_steps, steps)

    def _tell_spent(self, slot: Slot, arrival: Arrival) -> None:
        steps = self._tally.inner_steps - slot.settled_steps
        tokens = self._tally.tokens - slot.settled_tokens
        warnings.warn(
            f"Island {self._island!r} takes the anchor of fragment {slot.index}, and "
            f"drops {steps} inner steps with {tokens} tokens since its checkpoint: "
            f"{arrival.reason}. They are in the anchor already.",
            AtollWarning,
            stacklevel=2,
        )

    def _report_dropped(self, slot: Slot, sealed: Sealed, verdict: Verdict) -> None:
        if verdict is Verdict.COUNTED:
            # It counted rounds ago: only the work since its seal is dropped.
            slot.settle(sealed.inner_steps, sealed.tokens)
        steps = self._tally.inner_steps - slot.settled_steps
        tokens = self._tally.tokens - slot.settled_tokens
        slot.dropped_steps += steps
        self._tally.dropped_steps = max(self._tally.dropped_steps, slot.dropped_steps)
        log.warning(
            "island %s missed round %d of fragment %d, after %d others in a row: %d "
            "inner steps with %d tokens are dropped, and its weights are the anchor's. "
            "Raise run.patience or limits.deadline_max_s, or give it a faster link.",
            self._island,
            sealed.round,
            slot.index,
            CARRIED_ROUNDS,
            steps,
            tokens,
        )

    def _tell_refused(self, slot: Slot, sealed: Sealed, arrival: Arrival) -> None:
        warnings.warn(
            f"Round {sealed.round} refused fragment {slot.index} of island "
            f"{self._island!r}: {arrival.reason}. "
            "Its weights are the anchor's again; the work since is lost.",
            AtollWarning,
            stacklevel=2,
        )
