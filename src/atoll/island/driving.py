"""Drives the island machine: an event goes in, and its actions are performed.

Everything here is the thread that trains. `courier.Courier` seals, sends and receives
in the background, `live.Live` reads and changes the weights, `departing.Departing`
gives away what is left, and `ledger.Ledger` knows what has counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from atoll.clock import Clock
from atoll.errors import RunEnded, UsageError
from atoll.exchange import Exchange
from atoll.island.arrivals import Arrival, Summons
from atoll.island.background import Background
from atoll.island.beginning import begin, plan_of
from atoll.island.courier import Courier
from atoll.island.departing import Departing
from atoll.island.ledger import Ledger
from atoll.island.live import Live
from atoll.island.memory import Memory
from atoll.island.rerunning import seen_from
from atoll.island.run_clock import RunClock
from atoll.island.saved import SavedIsland
from atoll.island.saving import is_standing, save_island
from atoll.island.slot import Sealed, Slot
from atoll.island.tally import Tally
from atoll.protocol import (
    Action,
    Await,
    Beat,
    End,
    Event,
    IslandState,
    JoinReply,
    Leaving,
    NeverOpens,
    Resend,
    Rest,
    Seal,
    Take,
    Taken,
    Wanted,
    advance,
    wakes_at,
)


class Driver:
    """One life of the island machine, from joining until the run or the life ends."""

    def __init__(
        self,
        exchange: Exchange,
        joined: JoinReply,
        slots: list[Slot],
        tally: Tally,
        memory: Memory,
        *,
        clock: Clock,
        background: Background,
        state: IslandState | None = None,
    ) -> None:
        self._exchange, self._joined, self._slots = exchange, joined, slots
        self._tally, self._clock = tally, clock
        self.courier = Courier(exchange, joined, slots, memory, tally, background)
        self._departing = Departing(exchange, self.courier, memory)
        self.ledger = Ledger(joined, tally)
        self._live = Live(
            memory,
            joined.settings.sync,
            self.ledger,
            tally,
            background=background,
        )
        self._memory = memory
        self._plan = plan_of(joined, slots)
        self._state = state or begin(joined, slots, self._plan)
        self.position, self.has_ended = joined.position, self._state.has_ended
        self.clock = RunClock.of(joined.position, syncs=0)
        self.before_seal: Callable[[], None] = _nothing
        """Called before an update is sealed."""

        self.failure: Exception | None = None
        """Why this life cannot go on, if it cannot."""

        self.step = self._state.step
        self._wakes_at = wakes_at(self._state, self._plan)
        for slot, book in zip(slots, self._state.books, strict=True):
            if slot.sealed is not None:
                self.courier.resume(slot, book)

    def save(self, *, is_exact: bool) -> SavedIsland:
        """Return this island for a checkpoint, while the slots stand still."""
        is_exact = is_exact and is_standing(self._slots)
        fragments = self._memory.saving(
            self._slots,
            self._joined.settings.sync,
            made=(self._tally.inner_steps, self._tally.tokens),
            is_exact=is_exact,
        )
        return save_island(
            self._joined,
            replace(self._state, step=self.step),
            fragments,
            self._tally,
            origin=self._slots[0].origin,
            is_exact=is_exact,
        )

    @property
    def wakes_in(self) -> int:
        """How many inner steps from here the machine has something to do."""
        return max(1, self._wakes_at - self.step)

    @property
    def is_awake(self) -> bool:
        """Whether the machine has anything to do at this step."""
        return self.step >= self._wakes_at

    def beat(self) -> None:
        """Tell the run where this island is, and learn where the run is."""
        self.position = self._exchange.heartbeat(self._beat())

    def perform(self, event: Event) -> None:
        """Let the machine decide, and do what it says.

        Raises:
            Exception: whatever an action raised; this life is over then.
        """
        try:
            self._perform_all(deque(self._advance(event)))
        except Exception as exc:
            # The machine and the weights may disagree now: this island is over.
            self.failure = exc
            raise
        self.step = self._state.step
        self._wakes_at = wakes_at(self._state, self._plan)

    def depart(self) -> None:
        """Give away what has not counted, once the courier has stopped."""
        try:
            self.perform(Leaving())
        except RunEnded:
            self.failure = None
            self._end()
            return
        for slot, book in zip(self._slots, self._state.books, strict=True):
            if not self._state.finished(book):
                continue  # a round takes it, or it was reported
            if book.flight and slot.sealed is None:
                self._send_rest(slot, book.flight.round)  # its seal was interrupted
            else:
                self.ledger.lose(slot)

    def _perform_all(self, actions: deque[Action]) -> None:
        while actions and not self.has_ended:
            match actions.popleft():
                case Seal(fragment, round):
                    self._seal(self._slots[fragment], round)
                case Await(fragment, round):
                    self._seal(self._slots[fragment], round, is_awaited=True)
                case Take(fragment, round):
                    more = self._take(self._slots[fragment], round)
                    actions.extendleft(reversed(more))
                case Resend(fragment, round):
                    self._departing.resend(
                        self._slots[fragment],
                        self._state.books[fragment],
                        self._beat((fragment, round)),
                    )
                case Rest(fragment, round):
                    self._send_rest(
                        self._slots[fragment], self._rest_round(fragment, round)
                    )
                case End():
                    self._end()

    def _advance(self, event: Event) -> Sequence[Action]:
        self._state, actions = advance(self._state, event, self._plan)
        return actions

    def _seal(self, slot: Slot, round: int, *, is_awaited: bool = False) -> None:
        """Copy the live weights, and leave the rest to the courier."""
        if not is_awaited:
            self._live.give_back(slot)
            self.before_seal()
        slot.sealed = self._live.seal(slot, round, is_awaited=is_awaited)
        book = self._state.books[slot.index]
        if is_awaited:
            self.courier.expect(slot, book)
        else:
            self.courier.send(slot, book)

    def _take(self, slot: Slot, round: int) -> Sequence[Action]:
        """Wait for an outcome, and take it into the live weights."""
        sealed = slot.sealed
        if sealed is None or sealed.round != round:
            return []  # a summons came between, and it has been taken already
        try:
            arrival = self._wait(slot, sealed)
        except RunEnded:
            self._live.forget(sealed)
            slot.sealed = None
            return self._advance(NeverOpens(slot.index))
        if isinstance(arrival, Summons):
            self._forget_void()
            return self._advance(Wanted(slot.index, arrival.position))
        self._adopt(slot, sealed, arrival)
        position = self._exchange.heartbeat(self._beat())
        self.position = arrival.position or position
        self.clock = RunClock.of(self.position, syncs=self.clock.syncs + 1)
        taken = Taken(
            fragment=slot.index,
            verdict=arrival.verdict,
            through=arrival.through,
            position=self.position,
        )
        seen = seen_from(self.position, self._slots, self._state.books, taken)
        return self._advance(replace(taken, position=seen))

    def _wait(self, slot: Slot, sealed: Sealed) -> Arrival | Summons:
        waits_from_s = self._clock.now_s()
        try:
            return self.courier.wait(sealed, self._beat((slot.index, sealed.round)))
        finally:
            self._tally.wait_s += self._clock.now_s() - waits_from_s

    def _adopt(self, slot: Slot, sealed: Sealed, arrival: Arrival) -> None:
        try:
            self._live.take(slot, sealed, arrival.how)
        except BaseException:
            # Half of the weights may be the outcome's: nothing may depart from them.
            self.failure = UsageError(
                f"Island {self._joined.island!r} was interrupted while it took an "
                "outcome. Join again."
            )
            raise
        self.ledger.count(slot, sealed, arrival)
        slot.sealed = None

    def _forget_void(self) -> None:
        """Forget the waits that a summons has ended: nothing was sealed for them."""
        for slot in self._slots:
            if slot.sealed is not None and slot.sealed.is_void:
                self._live.forget(slot.sealed)
                slot.sealed = None

    def _beat(self, waits_for: tuple[int, int] | None = None) -> Beat:
        return Beat(
            island=self._joined.island,
            incarnation=self._joined.incarnation,
            step=self.step,
            waits_for=waits_for,
            holds=tuple(slot.held for slot in self._slots),
        )

    def _rest_round(self, fragment: int, round: int) -> int:
        """Return the round for the rest: an interrupted seal is still to be made."""
        flight = self._state.books[fragment].flight
        was_interrupted = flight and self._slots[fragment].sealed is None
        return flight.round if flight and was_interrupted else round

    def _send_rest(self, slot: Slot, round: int) -> None:
        """Send the work since the last seal as a departing update, if there is any."""
        if not (self.ledger.has_rest(slot) or self._memory.has_left_over(slot)):
            return
        if self._state.books[slot.index].next_round <= slot.counted_through:
            return  # made again: an earlier life's update has all of it
        rest = self._live.seal(slot, round)
        if not self._departing.send_rest(slot, rest, self._beat((slot.index, round))):
            self.ledger.lose(slot)

    def _end(self) -> None:
        self.has_ended = True
        self.ledger.end(self._slots)


def _nothing() -> None:
    """Nobody wants anything done."""
