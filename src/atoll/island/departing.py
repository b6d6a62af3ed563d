"""An island's farewell: what it has learnt and no round has counted is given away.

Rule 1: only after the courier has stopped; everything here is the thread that trains.
Rule 2: work that may have counted is never sent again: it would count twice.
"""

from __future__ import annotations

import warnings
from dataclasses import replace

from atoll.errors import AtollWarning, OutcomeLost, Refused, RunEnded
from atoll.exchange import Exchange, Frame, Outcome
from atoll.island.courier import POLL_S, Courier
from atoll.island.memory import Memory
from atoll.island.slot import Sealed, Slot
from atoll.protocol import Beat, How, Reception, verdict_of
from atoll.protocol.island_state import CARRIED_ROUNDS, Book
from atoll.wire import Header, Kind, Verdict, update_digest


class Departing:
    """Publishes what a courier has left, marked departing."""

    def __init__(self, exchange: Exchange, courier: Courier, memory: Memory) -> None:
        self._exchange, self._courier, self._memory = exchange, courier, memory

    def resend(self, slot: Slot, book: Book, beat: Beat) -> None:
        """Publish the update in flight again, same bytes, marked departing.

        One whose outcome is known has its receipt, and its body serves others by now.
        If the round is over, its outcome decides about the rest.
        """
        sealed = slot.sealed
        if sealed is None:
            return  # interrupted before the seal: all of it goes with the rest
        frame = sealed.frame
        if frame is None or sealed.outcome is not None:
            return
        if sealed.round <= slot.counted_through:
            return  # an earlier life's update of the same work stands
        frame = Frame(replace(frame.header, kind=Kind.DEPARTING), frame.body)
        try:
            if self._depart(frame, beat) is None:
                return
        except OutcomeLost:
            pass  # the receiver meets the same, and starts over
        except RunEnded:
            slot.sealed = None  # all of it is too late, as the rest will be told
            return
        if not sealed.arrival.done():
            self._courier.receive(slot, sealed, book)
        if sealed.outcome is None:
            # An earlier life's stands, or the line has failed: all goes with the rest.
            slot.sealed = None

    def send_rest(self, slot: Slot, rest: Sealed, beat: Beat) -> bool:
        """Publish the work since the last seal as a departing update.

        Its values are what was there at the seal, or was loaded, minus what is there
        now. False: it is lost, for no round has taken it.
        """
        flying = slot.sealed
        is_difference = flying is not None and (
            flying.frame is not None or flying.outcome is not None
        )
        if flying is not None and is_difference:
            if _takes_rest_along(flying):
                return False
            if flying.outcome is not None:
                rest.round = flying.outcome.through + 1
            is_settled = flying.outcome is not None
            self._memory.since(slot, flying, rest, is_settled=is_settled)
        try:
            return self._send_departing(slot, rest, beat, is_difference=is_difference)
        except (OutcomeLost, RunEnded):
            return False  # perhaps it counted: it must not count twice

    def _send_departing(
        self, slot: Slot, rest: Sealed, beat: Beat, *, is_difference: bool
    ) -> bool:
        """Publish for the round that is open, however many close meanwhile."""
        first = rest.round
        while rest.round <= first + CARRIED_ROUNDS:
            frame = self._courier.seal(
                slot, rest, Kind.DEPARTING, is_difference=is_difference
            )
            if not frame.header.elements:
                return False
            try:
                missed = self._depart(frame, beat)
            except Refused:
                if rest.round == first:
                    raise
                return False  # earlier lives speak for every round that takes any
            if missed is None:
                return True
            rest.round = missed
        return False

    def _depart(self, frame: Frame, beat: Beat) -> int | None:
        """Publish a departing update until it stands, or its round is over.

        Return the round to try instead, if this one has closed without it. None: it
        stands, or an outcome lists it.
        """
        header = frame.header
        self._exchange.heartbeat(self._courier.fresh(beat))
        while True:
            reception = self._courier.publish(frame)
            if reception is Reception.STAGED:
                return None
            if reception is Reception.SPOKEN_FOR:
                return header.round + 1
            beat = self._courier.fresh(beat)
            self._courier.bring_lost(self._exchange.heartbeat(beat, at_once=True))
            outcome = self._exchange.outcome(
                header.fragment, header.round, wait_s=POLL_S
            )
            if outcome is not None:
                return self._missed(header, outcome)

    def _missed(self, header: Header, outcome: Outcome) -> int | None:
        """Return the round that is open now, unless an outcome lists the update."""
        roster = outcome.agreed.header.roster
        assert roster is not None
        verdict = verdict_of(roster, header.island, update_digest(header))
        if verdict is Verdict.LATE:
            return outcome.position.rounds[header.fragment]
        entry = roster.entry(header.island)
        if entry is not None and verdict is Verdict.REFUSED:
            warnings.warn(
                f"Round {header.round} refused what island {header.island!r} leaves of "
                f"fragment {header.fragment}: {entry.reason}.",
                AtollWarning,
                stacklevel=2,
            )
        return None


def _takes_rest_along(flying: Sealed) -> bool:
    """Return whether an outcome has settled the work since the seal as well."""
    if flying.frame is not None and flying.frame.header.refused:
        return True
    outcome = flying.outcome
    return outcome is not None and outcome.how in (How.DROP, How.REFUSE)
