"""The driver of the island machine: events go in, and their actions are performed.

Live weights are read at a seal and changed by an outcome. When an island leaves, it
publishes the work that no round has counted, marked departing.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count

from atoll import protocol
from atoll.algorithm.schedule import Stride
from atoll.errors import AtollWarning, OutcomeLost, Refused, RunEnded, UsageError
from atoll.exchange import Exchange, Frame, Outcome
from atoll.island.base import IslandMemory
from atoll.island.deal import Deal
from atoll.island.fragment import IslandFragment, UpdateInFlight, adopt_mode
from atoll.island.progress import (
    IslandCounters,
    RunClock,
    StepTimer,
    WorkLedger,
    window_of,
)
from atoll.island.saved_state import AppliedOutcome, FragmentsWanted, SavedIsland
from atoll.island.snapshot import can_save_exactly, save_island
from atoll.island.sync_worker import (
    POLL_S,
    SyncWorker,
    position_at_outcome,
)
from atoll.protocol.island import CARRIED_ROUNDS, FragmentSync
from atoll.runtime import Runtime
from atoll.settings import SyncSection
from atoll.trace import span
from atoll.wire import FrameKind, Header, Verdict, update_digest


class Driver:
    """Runs the island machine for one incarnation: performs its actions."""

    def __init__(
        self,
        exchange: Exchange,
        joined: protocol.JoinReply,
        slots: list[IslandFragment],
        counters: IslandCounters,
        memory: IslandMemory,
        *,
        runtime: Runtime,
        state: protocol.IslandState | None = None,
        stride: Stride | None = None,
        deal: Deal | None = None,
    ) -> None:
        self._exchange, self._joined, self._slots = exchange, joined, slots
        self._counters, self._runtime = counters, runtime
        self.worker = SyncWorker(exchange, joined, slots, memory, counters, runtime)
        self._departing = DepartureSender(
            exchange, self.worker, memory, is_async=joined.settings.sync.is_async
        )
        self._deal = deal
        self.ledger = WorkLedger(joined, counters, deal)
        self._live = LiveWeights(
            memory,
            joined.settings.sync,
            self.ledger,
            counters,
            runtime=runtime,
        )
        self._memory = memory
        self._plan = plan_of(joined, slots)
        self._state = state or begin(joined, slots, self._plan)
        self.position, self.has_ended = joined.position, self._state.has_ended
        self.before_seal: Callable[[], None] = _no_callback
        """Called before an update is sealed."""

        self.failure: Exception | None = None
        """The error after which this incarnation cannot continue."""

        self.stride = stride or begin_stride(joined, self._state.step)
        """The inner steps of this island in the run's schedule."""

        self.clock = RunClock.of(joined.position, syncs=0, step=self.step)
        self._window = self.stride.window
        """Inner steps per window, by the last roster that listed the island."""

        self._timer = StepTimer()
        self._wakes_at = protocol.wakes_at(self._state, self._plan)
        for slot, sync_state in zip(slots, self._state.sync_states, strict=True):
            if slot.sealed is not None:
                self.worker.resume(slot, sync_state)

    def save(self, *, is_exact: bool) -> SavedIsland:
        """Return this island for a checkpoint. The caller holds the slots' turns."""
        is_exact = is_exact and can_save_exactly(self._slots)
        fragments = self._memory.saving(
            self._slots,
            trained=(self._counters.inner_steps, self._counters.tokens),
            is_exact=is_exact,
        )
        if is_exact:
            for fragment, sync_state in zip(
                fragments, self._state.sync_states, strict=True
            ):
                fragment.sync_state = sync_state
        return save_island(
            self._joined,
            fragments,
            self._counters,
            stride=self.stride,
            is_exact=is_exact,
            origin=self._slots[0].origin,
            deal=self._deal.save() if self._deal else None,
        )

    @property
    def step(self) -> int:
        """The schedule step that this island has reached."""
        return self.stride.step

    @property
    def wakes_in(self) -> int:
        """Inner steps until the machine has an action to perform."""
        return max(1, self.stride.until(self._wakes_at))

    def stepped(self) -> None:
        """Count one inner step, and perform the actions of its schedule step."""
        self._timer.end(self._runtime.now_s())
        self._counters.inner_steps += 1
        if self._deal is not None:
            self._deal.stepped(self._counters.inner_steps)
        self.stride = self.stride.stepped()
        step = self.stride.step
        self.position = self._exchange.heartbeat(self._beat())
        if step >= self._wakes_at:
            self.perform(protocol.Stepped(step))
        self._timer.begin(self._runtime.now_s())

    def perform(self, event: protocol.Event) -> None:
        """Give the machine an event, and perform all actions that follow.

        Raises:
            Exception: an action failed; this incarnation is over then.
        """
        try:
            self._perform_all(deque(self._advance(event)))
        except Exception as exc:
            # The machine and the weights may disagree now: this island is over.
            self.failure = exc
            raise
        self.stride = self.stride.at(self._state.step).to(self._window)
        self._wakes_at = protocol.wakes_at(self._state, self._plan)

    def beat_at_once(self) -> None:
        """Send a heartbeat now: no inner step sends one while the loop waits."""
        self.position = self._exchange.heartbeat(self._beat(), at_once=True)

    def depart(self) -> None:
        """Publish the work that has not counted. The worker has stopped before."""
        try:
            self.perform(protocol.Leaving())
        except RunEnded:
            self.failure = None
            self._end()
            return
        for slot, sync_state in zip(self._slots, self._state.sync_states, strict=True):
            if not self._state.finished(slot.index):
                continue  # a round takes it, or it was reported
            if sync_state.flight and slot.sealed is None:
                self._send_rest(
                    slot, sync_state.flight.round
                )  # its seal was interrupted
            else:
                self.ledger.lose(slot)

    def _perform_all(self, actions: deque[protocol.Action]) -> None:
        while actions and not self.has_ended:
            match actions.popleft():
                case protocol.Seal(fragment, round):
                    self._seal(self._slots[fragment], round)
                case protocol.Await(fragment, round):
                    self._seal(self._slots[fragment], round, is_awaited=True)
                case protocol.Take(fragment, round):
                    next_actions = self._take(self._slots[fragment], round)
                    actions.extendleft(reversed(next_actions))
                case protocol.Resend(fragment, round):
                    self._departing.resend(
                        self._slots[fragment],
                        self._state.sync_states[fragment],
                        self._beat((fragment, round)),
                    )
                case protocol.PublishRest(fragment, round):
                    self._send_rest(
                        self._slots[fragment], self._rest_round(fragment, round)
                    )
                case protocol.End():
                    self._end()

    def _advance(self, event: protocol.Event) -> Sequence[protocol.Action]:
        self._state, actions = protocol.advance(self._state, event, self._plan)
        return actions

    def _seal(
        self, slot: IslandFragment, round: int, *, is_awaited: bool = False
    ) -> None:
        """Copy the live weights; the worker encodes and sends them."""
        if not is_awaited:
            self._live.give_back(slot)
            self.before_seal()
            if self._deal is not None:
                self._deal.note_seal(slot.index)
        slot.sealed = self._live.seal(slot, round, is_awaited=is_awaited)
        sync_state = self._state.sync_states[slot.index]
        if is_awaited:
            self.worker.expect(slot, sync_state)
        else:
            self.worker.send(slot, sync_state)

    def _take(self, slot: IslandFragment, round: int) -> Sequence[protocol.Action]:
        """Wait for an outcome, and take it into the live weights."""
        sealed = slot.sealed
        if sealed is None or sealed.round != round:
            return []  # taken already, after a request for other fragments
        try:
            arrival = self._wait(slot, sealed)
        except RunEnded:
            self._forget_uncounted(slot, sealed)
            return self._advance(self._never_opens(slot))
        if isinstance(arrival, FragmentsWanted):
            self._forget_void()
            return self._advance(
                protocol.FragmentsRequested(slot.index, arrival.position)
            )
        self._adopt(slot, sealed, arrival)
        if arrival.window is not None:
            self._window = window_of(arrival.window, self._joined.settings.sync)
        position = self._exchange.heartbeat(self._beat())
        self.position = arrival.position or position
        syncs = self.clock.syncs + 1
        self.clock = RunClock.of(self.position, syncs=syncs, step=self.step)
        outcome_taken = protocol.OutcomeTaken(
            fragment=slot.index,
            verdict=arrival.verdict,
            through=arrival.through,
            position=self.position,
        )
        seen = position_at_outcome(
            self.position, self._slots, self._state.sync_states, outcome_taken
        )
        return self._advance(replace(outcome_taken, position=seen))

    def _wait(
        self, slot: IslandFragment, sealed: UpdateInFlight
    ) -> AppliedOutcome | FragmentsWanted:
        waits_from_s = self._runtime.now_s()
        try:
            beat = self._beat((slot.index, sealed.round))
            return self.worker.wait(sealed, self.worker.renewed(beat))
        finally:
            waited_s = self._runtime.now_s() - waits_from_s
            self._counters.wait_s += waited_s
            if sealed.sealed_at_s is not None and sealed.held_at_s is not None:
                seconds = sealed.held_at_s - sealed.sealed_at_s
                self._counters.note_exchange(slot.index, seconds, waited_s=waited_s)

    def _adopt(
        self, slot: IslandFragment, sealed: UpdateInFlight, arrival: AppliedOutcome
    ) -> None:
        try:
            self._live.take(slot, sealed, arrival.decision)
        except BaseException:
            # Some live weights may be the outcome's: no update may be made of them.
            self.failure = UsageError(
                f"Island {self._joined.island!r} was interrupted while it adopted an "
                "outcome. Join again."
            )
            raise
        self.ledger.count(slot, sealed, arrival)
        slot.sealed = None
        if self._deal is not None:
            self._deal.trim(min(map(first_unsettled, self._slots)))

    def _forget_uncounted(self, slot: IslandFragment, sealed: UpdateInFlight) -> None:
        """Forget an update that no round takes, because the run has ended.

        The live weights of an asynchronous island lose its work, because the anchor
        has moved since it was sealed.
        """
        if self._plan.is_async and not sealed.is_awaited:
            self._live.take(slot, sealed, protocol.WorkDecision.REBASE)
        else:
            self._live.forget(sealed)
        slot.sealed = None

    def _never_opens(self, slot: IslandFragment) -> protocol.NeverOpens:
        last_round = slot.state.round if self._plan.is_async else None
        return protocol.NeverOpens(slot.index, last_round=last_round)

    def _forget_void(self) -> None:
        """Forget awaited rounds that the run requests an update for after all."""
        for slot in self._slots:
            if slot.sealed is not None and slot.sealed.is_void:
                self._live.forget(slot.sealed)
                slot.sealed = None

    def _beat(self, waits_for: tuple[int, int] | None = None) -> protocol.Heartbeat:
        return protocol.Heartbeat(
            island=self._joined.island,
            incarnation=self._joined.incarnation,
            step=self.step,
            waits_for=waits_for,
            holds=tuple(slot.held_round for slot in self._slots),
            step_s=self._timer.median_s,
        )

    def _rest_round(self, fragment: int, round: int) -> int:
        """Return the round of the remaining work: that of an interrupted seal first."""
        flight = self._state.sync_states[fragment].flight
        was_interrupted = flight and self._slots[fragment].sealed is None
        return flight.round if flight and was_interrupted else round

    def _send_rest(self, slot: IslandFragment, round: int) -> None:
        """Send the work since the last seal as a departing update, if there is any."""
        if not (self.ledger.has_rest(slot) or self._memory.has_left_over(slot)):
            return
        if self._state.sync_states[slot.index].next_round <= slot.counted_through:
            return  # repeated work: an update of an earlier incarnation contains it
        rest = self._live.seal(slot, round)
        if not self._departing.send_rest(slot, rest, self._beat((slot.index, round))):
            self.ledger.lose(slot)

    def _end(self) -> None:
        self.has_ended = True
        self.ledger.end(self._slots)


def _no_callback() -> None:
    """Do nothing before a seal."""


class LiveWeights:
    """The live weights of a framework: copied by seals, changed by outcomes."""

    def __init__(
        self,
        memory: IslandMemory,
        sync: SyncSection,
        ledger: WorkLedger,
        counters: IslandCounters,
        *,
        runtime: Runtime,
    ) -> None:
        self._memory, self._sync = memory, sync
        self._ledger, self._counters = ledger, counters
        self._runtime, self._numbers = runtime, count()

    def seal(
        self, slot: IslandFragment, round: int, *, is_awaited: bool = False
    ) -> UpdateInFlight:
        """Return an update with the work up to here, not encoded yet."""
        number = next(self._numbers)
        with span("seal"):
            base = self._memory.hold(slot, number)
        return UpdateInFlight(
            number=number,
            round=round,
            base=base,
            inner_steps=self._counters.inner_steps,
            tokens=self._counters.tokens,
            weight=self._ledger.weight(slot),
            cursor=b"" if is_awaited else self._ledger.cursor(slot),
            arrival=self._runtime.future(),
            sealed_at_s=None if is_awaited else self._runtime.now_s(),
            is_awaited=is_awaited,
        )

    def take(
        self,
        slot: IslandFragment,
        sealed: UpdateInFlight,
        decision: protocol.WorkDecision,
    ) -> None:
        """Adopt the slot's anchor into the live weights, as decided by the outcome."""
        mode = adopt_mode(decision, self._sync)
        is_untrained = sealed.inner_steps == self._counters.inner_steps
        if mode == "rebase" and is_untrained:
            mode = "replace"
        with span("apply"):
            self._memory.take(slot, sealed, mode)
        self.forget(sealed)
        if slot.held_back is not None and slot.held_back.remaining_after is not None:
            self.give_back(slot)

    def give_back(self, slot: IslandFragment) -> None:
        """Add held-back work to the live weights, as far as it has not counted."""
        held_back = slot.held_back
        if held_back is None:
            return
        if held_back.remaining_after is None:
            self._memory.leave_over(slot, held_back.saved, held_back.remains)
        self._memory.give(slot, held_back.saved, held_back.remains)
        slot.settle(*held_back.settled)
        slot.held_back = None

    def forget(self, sealed: UpdateInFlight) -> None:
        """Make an update's buffers available again."""
        self._memory.forget(sealed)


def first_unsettled(slot: IslandFragment) -> int:
    """Return the inner steps up to which no further update has to hold the work."""
    if slot.held_back is None:
        return slot.settled_steps
    return min(slot.settled_steps, slot.held_back.settled[0])


def plan_of(
    joined: protocol.JoinReply, slots: Sequence[IslandFragment]
) -> protocol.SyncPlan:
    """Return when each fragment is due, by the run's settings."""
    sync = joined.settings.sync
    return protocol.SyncPlan(
        sync_every=sync.sync_every,
        num_fragments=sync.num_fragments,
        overlap_steps=sync.overlap_steps,
        has_buffers=slots[-1].layout.is_buffers,
        is_async=sync.is_async,
    )


def begin(
    joined: protocol.JoinReply, slots: Sequence[IslandFragment], plan: protocol.SyncPlan
) -> protocol.IslandState:
    """Return the machine's first state."""
    return protocol.join_at(
        _position_of(joined, slots), plan, _still_spoken_for(joined, slots)
    )


def begin_stride(joined: protocol.JoinReply, step: int) -> Stride:
    """Return the stride of an island that joins at a schedule step."""
    sync = joined.settings.sync
    return Stride(window_of(joined.window, sync), sync.sync_every, since=step)


def _position_of(
    joined: protocol.JoinReply, slots: Sequence[IslandFragment]
) -> protocol.Position:
    """Return the island's first position: a state may be newer than the reply."""
    position = joined.position
    return protocol.Position(
        step=position.step,
        rounds=tuple(slot.state.round + 1 for slot in slots),
        last_round=position.last_round,
        last_rounds=position.last_rounds,
        tokens=position.tokens,
    )


def _still_spoken_for(
    joined: protocol.JoinReply, slots: Sequence[IslandFragment]
) -> tuple[int, ...]:
    """Return the fragments whose open round has an update of an earlier incarnation."""
    opened = joined.position.rounds
    return tuple(
        index
        for index in joined.spoken_for
        if slots[index].state.round + 1 == opened[index]
    )


class DepartureSender:
    """Publishes the work that no round has counted, marked departing."""

    def __init__(
        self,
        exchange: Exchange,
        worker: SyncWorker,
        memory: IslandMemory,
        *,
        is_async: bool,
    ) -> None:
        self._exchange, self._worker, self._memory = exchange, worker, memory
        self._is_async = is_async

    def resend(
        self, slot: IslandFragment, sync_state: FragmentSync, beat: protocol.Heartbeat
    ) -> None:
        """Publish the update in flight again, same bytes, marked departing.

        Nothing if its outcome is known: its buffers may be reused by now. If the round
        is over, its outcome decides about the remaining work.
        """
        sealed = slot.sealed
        if sealed is None:
            return  # interrupted before the seal: `send_rest` publishes all of it
        frame = sealed.frame
        if frame is None or sealed.outcome is not None:
            return
        if sealed.round <= slot.counted_through:
            return  # an earlier incarnation has published the same work
        frame = Frame(replace(frame.header, kind=FrameKind.DEPARTING), frame.body)
        try:
            if self._depart(frame, beat) is None:
                return
        except OutcomeLost:
            pass  # `receive` raises the same, and starts over
        except RunEnded:
            slot.sealed = None  # too late: `send_rest` reports all of it as lost
            return
        if not sealed.arrival.done():
            self._worker.receive(slot, sealed, sync_state)
        if sealed.outcome is not None:
            return
        # An earlier incarnation's update is staged, or the line has failed.
        if slot.read_digest() == frame.header.base:
            slot.sealed = None  # `send_rest` publishes all of it
        else:
            _warn_not_taken(frame.header)

    def send_rest(
        self, slot: IslandFragment, rest: UpdateInFlight, beat: protocol.Heartbeat
    ) -> bool:
        """Publish the work since the last seal as a departing update.

        Its values are the weights at the seal, or as loaded, minus the live weights.
        Return False if no round has taken it: the work is lost.
        """
        in_flight = slot.sealed
        is_difference = in_flight is not None and (
            in_flight.frame is not None or in_flight.outcome is not None
        )
        if in_flight is not None and is_difference:
            if _takes_rest_along(in_flight):
                return False
            if in_flight.outcome is not None:
                rest.round = in_flight.outcome.through + 1
            # Rounds may have passed that an asynchronous update is not listed in.
            rest.round = max(rest.round, slot.held_round.round + 1)
            is_settled = in_flight.outcome is not None
            self._memory.since(slot, in_flight, rest, is_settled=is_settled)
        try:
            return self._send_departing(slot, rest, beat, is_difference=is_difference)
        except (OutcomeLost, RunEnded):
            return False  # it may have counted, and must not count twice

    def _send_departing(
        self,
        slot: IslandFragment,
        rest: UpdateInFlight,
        beat: protocol.Heartbeat,
        *,
        is_difference: bool,
    ) -> bool:
        """Publish for the open round; try the next one when it closes meanwhile."""
        first = rest.round
        for _ in range(1 + CARRIED_ROUNDS):
            frame = self._worker.seal(
                slot, rest, FrameKind.DEPARTING, is_difference=is_difference
            )
            if not frame.header.elements:
                return False
            try:
                missed = self._depart(frame, beat)
            except Refused:
                if rest.round == first:
                    raise
                return False  # earlier incarnations have updates in all open rounds
            if missed is None:
                return True
            rest.round = missed
        return False

    def _depart(self, frame: Frame, beat: protocol.Heartbeat) -> int | None:
        """Publish a departing update until it is staged, or its round is over.

        Return the round to try instead, if this one has closed without it. Return None
        if the update is staged, or an outcome lists it.
        """
        header, first = frame.header, frame.header.round
        self._exchange.heartbeat(self._worker.renewed(beat))
        while True:
            reception = self._worker.publish(frame)
            if reception is protocol.Reception.STAGED:
                return None
            if reception is protocol.Reception.OTHER_STAGED and not self._is_async:
                return header.round + 1
            beat = self._worker.renewed(beat)
            self._worker.publish_lost(self._exchange.heartbeat(beat, at_once=True))
            while outcome := self._exchange.outcome(
                header.fragment, first, wait_s=POLL_S, has_body=False
            ):
                missed = self._missed(header, outcome)
                if missed is None or not self._is_async:
                    return missed
                first += 1  # any later roster may list it
            if reception is protocol.Reception.COMMITTED and self._is_async:
                return first

    def _missed(self, header: Header, outcome: Outcome) -> int | None:
        """Return the round that is open now; None if the outcome lists the update."""
        roster = outcome.agreed.header.roster
        assert roster is not None
        verdict = protocol.verdict_of(roster, header.island, update_digest(header))
        if verdict is Verdict.LATE:
            return outcome.position.rounds[header.fragment]
        entry = roster.entry(header.island)
        if entry is not None and verdict is Verdict.REFUSED:
            warnings.warn(
                f"Round {header.round} refused the departing update of island "
                f"{header.island!r} for fragment {header.fragment}: {entry.reason}.",
                AtollWarning,
                stacklevel=2,
            )
        return None


def _warn_not_taken(header: Header) -> None:
    warnings.warn(
        f"Island {header.island!r} leaves, and the run does not take its update of "
        f"fragment {header.fragment} for round {header.round}: its work is lost. "
        "The work since its seal is published.",
        AtollWarning,
        stacklevel=2,
    )


def _takes_rest_along(in_flight: UpdateInFlight) -> bool:
    """Return whether an outcome has settled the work since the seal as well."""
    if in_flight.frame is not None and in_flight.frame.header.refused:
        return True
    outcome = in_flight.outcome
    return outcome is not None and outcome.decision in (
        protocol.WorkDecision.DROP,
        protocol.WorkDecision.REFUSE,
    )
