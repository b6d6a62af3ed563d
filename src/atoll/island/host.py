"""An island's host: drives the island machine over an exchange.

The thread that trains calls `stepped`; a step that synchronises nothing costs a
counter and a heartbeat, and one that seals costs one copy. `courier.Courier` seals,
sends and receives in the background, and `departing.Departing` gives away what is left.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from atoll.clock import Clock
from atoll.errors import AtollWarning, RunEnded, Unreachable, UsageError
from atoll.exchange import Exchange
from atoll.island.background import Background, Threads
from atoll.island.buffers import Buffers
from atoll.island.courier import Courier
from atoll.island.departing import Departing
from atoll.island.entry import enter
from atoll.island.slot import Arrival, Sealed, Slot, Summons
from atoll.island.tally import Tally
from atoll.island.view import ParameterView
from atoll.protocol import (
    Action,
    Await,
    Beat,
    End,
    Event,
    How,
    JoinRequest,
    Leaving,
    Plan,
    Position,
    Resend,
    Rest,
    Seal,
    Stats,
    Stepped,
    SyncNow,
    Take,
    Taken,
    Wanted,
    advance,
    join_at,
    wakes_at,
)
from atoll.weights import adopt
from atoll.weights.layout import F32
from atoll.wire import Verdict, blake3_digest


class Host:
    """One island of a run, for any framework that offers a `ParameterView`.

    Joining founds the run or takes its weights; afterwards `slots` hold the anchor.
    """

    def __init__(
        self,
        exchange: Exchange,
        view: ParameterView,
        request: JoinRequest,
        *,
        clock: Clock,
        background: Background | None = None,
        leaving: AbstractContextManager[object] | None = None,
    ) -> None:
        self._exchange, self._view, self._clock = exchange, view, clock
        self._leaving = leaving or nullcontext()
        self._joined_at_s = clock.now_s()
        self._background = background or Threads()
        self._buffers = Buffers()
        self.tally = Tally()
        self.joined, self.slots = enter(exchange, view, request, leaving=self._leaving)
        self.settings = self.joined.settings
        self._courier = Courier(
            exchange,
            self.joined,
            self.slots,
            self._buffers,
            self.tally,
            self._background,
        )
        self._departing = Departing(exchange, self._courier)
        self._plan = Plan(
            sync_every=self.settings.sync.sync_every,
            num_fragments=self.settings.sync.num_fragments,
            overlap_steps=self.settings.sync.overlap_steps,
            has_buffers=self.slots[-1].layout.is_buffers,
        )
        self._state = join_at(
            self._position_of_slots(), self._plan, self._still_spoken_for()
        )
        self.position = self.joined.position
        self.has_ended = self._state.has_ended
        self.has_left = False
        self._failure: Exception | None = None
        self._step = self._state.step
        self._wakes_at = wakes_at(self._state, self._plan)

    @property
    def round(self) -> int:
        """The lowest committed round over the fragments."""
        return min(slot.state.round for slot in self.slots)

    @property
    def run_steps(self) -> int:
        """The schedule step this island has reached, in phase with the others."""
        return self._step

    @property
    def digest(self) -> str:
        """A digest over anchor and velocity of every fragment, in hex."""
        digests = b"".join(slot.read_digest() for slot in self.slots)
        return blake3_digest(digests).hex()[:32]

    def stepped(self) -> None:
        """Count one inner step, and synchronise what is due.

        Raises:
            Refused: the run refused this island three times in succession.
            UsageError: weights by tokens are asked for, and none were reported.
        """
        if self._is_over():
            return
        self.tally.inner_steps += 1
        self._step += 1
        self.position = self._exchange.heartbeat(self._beat())
        if self._step >= self._wakes_at:
            self._perform(Stepped(self._step))

    def sync_now(self) -> None:
        """Seal every fragment for its open round, and return when all are adopted."""
        if not self._is_over():
            self._perform(SyncNow(self._step))

    def leave(self, *, depart: bool = True) -> None:
        """Give away what has not counted, and end the membership. Safe to repeat.

        With `depart` False nothing more is published; what was sealed stays sealed.
        """
        if self.has_left:
            return
        self.has_left = True
        try:
            with self._leaving:
                self._leave(depart=depart)
        except Unreachable as exc:
            # At most so many: what the run has taken all the same, nobody can say.
            self._note_lost(max(self._unsettled(slot)[0] for slot in self.slots))
            warnings.warn(
                f"Island {self.joined.island!r} leaves without a farewell: {exc}",
                AtollWarning,
                stacklevel=2,
            )

    def _leave(self, *, depart: bool) -> None:
        try:
            self._courier.stop()
            if self.has_ended:
                return
            if depart and self._failure is None:
                self._depart()
            else:
                self._note_lost(max(self._unsettled(slot)[0] for slot in self.slots))
        finally:
            self._exchange.leave(self.joined.island, self.joined.incarnation)

    def stats(self) -> Stats:
        """Return what people are told of this island."""
        return self.tally.stats(self._clock.now_s() - self._joined_at_s)

    def _depart(self) -> None:
        try:
            self._perform(Leaving())
        except RunEnded:
            self._failure = None
            self._end()
            return
        for slot, book in zip(self.slots, self._state.books, strict=True):
            if not self._state.finished(book):
                continue  # a round takes it, or it was reported
            if book.flight and slot.sealed is None:
                self._send_rest(slot, book.flight.round)  # its seal was interrupted
            else:
                self._lose(slot)

    def read_anchor(self, fragment: int, out: F32) -> int:
        """Copy a fragment's anchor into `out`, and return its round."""
        slot = self.slots[fragment]
        with slot.lock:
            out[:] = slot.state.anchor
            return slot.state.round

    def _position_of_slots(self) -> Position:
        """Where this island starts: a state may be newer than the join reply."""
        position = self.joined.position
        return Position(
            step=position.step,
            rounds=tuple(slot.state.round + 1 for slot in self.slots),
            last_round=position.last_round,
            tokens=position.tokens,
        )

    def _is_over(self) -> bool:
        if self._failure is not None:
            raise self._failure
        return self.has_ended or self.has_left

    def _still_spoken_for(self) -> tuple[int, ...]:
        """Return what an earlier life has published for the round that is open here."""
        opened = self.joined.position.rounds
        return tuple(
            index
            for index in self.joined.spoken_for
            if self.slots[index].state.round + 1 == opened[index]
        )

    def _perform(self, event: Event) -> None:
        try:
            self._perform_all(deque(self._advance(event)))
        except Exception as exc:
            # The machine and the weights may disagree now: this island is over.
            self._failure = exc
            raise
        self._step = self._state.step
        self._wakes_at = wakes_at(self._state, self._plan)

    def _perform_all(self, actions: deque[Action]) -> None:
        while actions and not self.has_ended:
            match actions.popleft():
                case Seal(fragment, round):
                    self._seal(self.slots[fragment], round)
                case Await(fragment, round):
                    self._seal(self.slots[fragment], round, is_awaited=True)
                case Take(fragment, round):
                    more = self._take(self.slots[fragment], round)
                    actions.extendleft(reversed(more))
                case Resend(fragment, round):
                    self._departing.resend(
                        self.slots[fragment],
                        self._state.books[fragment],
                        self._beat((fragment, round)),
                    )
                case Rest(fragment, round):
                    self._send_rest(
                        self.slots[fragment], self._rest_round(fragment, round)
                    )
                case End():
                    self._end()

    def _advance(self, event: Event) -> Sequence[Action]:
        self._state, actions = advance(self._state, event, self._plan)
        return actions

    def _seal(self, slot: Slot, round: int, *, is_awaited: bool = False) -> None:
        """Copy the live weights, and leave the rest to the courier."""
        local = self._buffers.vector(slot.layout.elements)
        self._view.read(slot.index, local)
        slot.sealed = Sealed(
            round=round,
            base=local,
            inner_steps=self.tally.inner_steps,
            tokens=self.tally.tokens,
            weight=self._weight(slot),
            arrival=self._background.promise(),
            is_awaited=is_awaited,
        )
        book = self._state.books[slot.index]
        if is_awaited:
            self._courier.expect(slot, book)
        else:
            self._courier.send(slot, book)

    def _weight(self, slot: Slot) -> int:
        by_tokens = self.settings.outer.weight == "tokens"
        if not by_tokens and self.settings.run.end_tokens is None:
            return 1
        settled_steps, settled_tokens = self._settled(slot)
        tokens = self.tally.tokens - settled_tokens
        if tokens < 1 and self.tally.inner_steps > settled_steps:
            key = "outer.weight='tokens'" if by_tokens else "run.end_tokens"
            raise UsageError(
                f"Island {self.joined.island!r} has reported {tokens} tokens since its "
                f"last update, and {key} needs them. "
                "Call island.report(tokens=...) before every optimizer step."
            )
        return max(1, tokens) if by_tokens else 1

    def _settled(self, slot: Slot) -> tuple[int, int]:
        """Return the inner steps and tokens that no further update has to hold."""
        flying = slot.sealed
        if flying is None or (flying.outcome and flying.outcome.how is How.CARRY):
            return slot.settled_steps, slot.settled_tokens
        return flying.inner_steps, flying.tokens

    def _take(self, slot: Slot, round: int) -> Sequence[Action]:
        """Wait for an outcome, and take it into the live weights."""
        sealed = slot.sealed
        if sealed is None or sealed.round != round:
            return []  # a summons came between, and it has been taken already
        waits_from_s = self._clock.now_s()
        try:
            arrival = self._courier.wait(sealed, self._beat((slot.index, sealed.round)))
        except RunEnded:
            self._end()
            return []
        finally:
            self.tally.wait_s += self._clock.now_s() - waits_from_s
        if isinstance(arrival, Summons):
            self._forget_void()
            return self._advance(Wanted(slot.index, arrival.position))
        try:
            self._adopt(slot, sealed, arrival)
        except BaseException:
            # Half of the weights may be the outcome's: nothing may depart from them.
            self._failure = UsageError(
                f"Island {self.joined.island!r} was interrupted while it took an "
                "outcome. Join again."
            )
            raise
        self._count(slot, sealed, arrival)
        slot.sealed = None
        position = self._exchange.heartbeat(self._beat())
        self.position = arrival.position or position
        return self._advance(
            Taken(
                fragment=slot.index,
                verdict=arrival.verdict,
                through=arrival.through,
                position=self.position,
            )
        )

    def _forget_void(self) -> None:
        """Forget the waits that a summons has ended: nothing was sealed for them."""
        for slot in self.slots:
            if slot.sealed is not None and slot.sealed.is_void:
                self._buffers.give_back(slot.sealed.base)
                slot.sealed = None

    def _beat(self, waits_for: tuple[int, int] | None = None) -> Beat:
        return Beat(
            island=self.joined.island,
            incarnation=self.joined.incarnation,
            step=self._step,
            waits_for=waits_for,
            holds=tuple(slot.held for slot in self.slots),
        )

    def _adopt(self, slot: Slot, sealed: Sealed, arrival: Arrival) -> None:
        how = self._how(arrival.how)
        is_untrained = sealed.inner_steps == self.tally.inner_steps
        if how == "replace" or (how == "rebase" and is_untrained):
            self._view.write(slot.index, slot.state.anchor)
        else:
            local = self._buffers.vector(slot.layout.elements)
            self._view.read(slot.index, local)
            adopt(
                slot.layout,
                how,
                slot.state.anchor,
                local,
                sealed.base,
                keep_local=self.settings.sync.keep_local,
            )
            self._view.write(slot.index, local)
            self._buffers.give_back(local)
        self._buffers.give_back(sealed.base)

    def _how(self, how: How) -> str:
        match how:
            case How.ADOPT:
                return self.settings.sync.adopt
            case How.REBASE:
                return "rebase"
            case How.CARRY:
                return "carry"
            case How.DROP | How.REFUSE:
                return "replace"

    def _count(self, slot: Slot, sealed: Sealed, arrival: Arrival) -> None:
        match arrival.how:
            case How.ADOPT | How.REBASE:
                self.tally.counted += 1
                slot.settle(sealed.inner_steps, sealed.tokens)
            case How.CARRY:
                self.tally.carried += 1
            case How.DROP:
                self.tally.counted += arrival.verdict is Verdict.COUNTED
                self.tally.dropped += 1
                slot.settle(self.tally.inner_steps, self.tally.tokens)
            case How.REFUSE:
                self.tally.refused += 1
                slot.settle(self.tally.inner_steps, self.tally.tokens)
                warnings.warn(
                    f"Round {sealed.round} refused fragment {slot.index} of island "
                    f"{self.joined.island!r}: {arrival.reason}. "
                    "Its weights are the anchor's again; the work since is lost.",
                    AtollWarning,
                    stacklevel=2,
                )

    def _rest_round(self, fragment: int, round: int) -> int:
        """Return the round for the rest: an interrupted seal is still to be made."""
        flight = self._state.books[fragment].flight
        was_interrupted = flight and self.slots[fragment].sealed is None
        return flight.round if flight and was_interrupted else round

    def _send_rest(self, slot: Slot, round: int) -> None:
        """Send the work since the last seal as a departing update, if there is any."""
        settled_steps, _ = self._settled(slot)
        if self.tally.inner_steps == settled_steps and not slot.has_left_over():
            return
        local = self._buffers.vector(slot.layout.elements)
        self._view.read(slot.index, local)
        rest = Sealed(
            round=round,
            base=local,
            inner_steps=self.tally.inner_steps,
            tokens=self.tally.tokens,
            weight=self._weight(slot),
            arrival=self._background.promise(),
        )
        if not self._departing.send_rest(slot, rest, self._beat((slot.index, round))):
            self._lose(slot)

    def _lose(self, slot: Slot) -> None:
        """Say what no round has taken since the last seal, if there is any."""
        steps, tokens = self._unsettled(slot)
        self._note_lost(steps)
        if steps:
            warnings.warn(
                f"Island {self.joined.island!r} leaves, and no round took what it has "
                f"learnt of fragment {slot.index} since round {slot.state.round}: "
                f"{steps} inner steps are lost, with {tokens} tokens.",
                AtollWarning,
                stacklevel=2,
            )

    def _unsettled(self, slot: Slot) -> tuple[int, int]:
        """Return the inner steps and tokens that are in no update of a fragment.

        One whose outcome cannot be learnt any more is none, as far as is known here.
        """
        steps, tokens = self._settled(slot)
        flying = slot.sealed
        if flying and flying.arrival.done() and flying.arrival.exception():
            steps, tokens = slot.settled_steps, slot.settled_tokens
        return self.tally.inner_steps - steps, self.tally.tokens - tokens

    def _note_lost(self, steps: int) -> None:
        """Show what is lost, of the fragment that loses most."""
        self.tally.not_counted_steps = max(self.tally.not_counted_steps, steps)

    def _end(self) -> None:
        self.has_ended = True
        last = min(slot.settled_steps for slot in self.slots)
        self.tally.not_counted_steps = self.tally.inner_steps - last
