"""The sync worker: one thread seals and sends updates, another receives outcomes.

An island that resumes from a checkpoint makes some rounds again:

Rule 1: a round that was over at the checkpoint is taken by itself, at the step at which
        the earlier incarnation took it, before the rounds after it are known.
Rule 2: if an update of an earlier incarnation has counted and this incarnation does not
        make it again to the byte, the update contains this incarnation's work too. The
        work must not count twice, so it is dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np

from atoll.errors import AtollError, CorruptError, NonFinite, OutcomeLost
from atoll.exchange import Exchange, Frame, Outcome
from atoll.island.base import Runtime
from atoll.island.entry import fetch_state, state_frame
from atoll.island.fragment import IslandFragment, UpdateInFlight
from atoll.island.identity import update_seed
from atoll.island.memory import Memory
from atoll.island.progress import IslandCounters
from atoll.island.saved_state import AppliedOutcome, FragmentsWanted
from atoll.protocol import (
    Heartbeat,
    JoinReply,
    OutcomeTaken,
    Position,
    Reception,
    WorkDecision,
    decide,
    verdict_of,
)
from atoll.protocol.island_types import FragmentSync
from atoll.trace import span
from atoll.weights import FragmentState, terms_of
from atoll.wire import (
    FrameKind,
    Header,
    RosterEntry,
    TrainingProgress,
    Verdict,
    as_reason,
    frame_bytes,
    update_digest,
    verify_body,
    with_body,
)

POLL_S = 0.1
"""How long a receiver waits before it looks whether the island is leaving."""

log = logging.getLogger("atoll")


class SyncWorker:
    """Takes sealed weights to the run, and outcomes back into the anchor."""

    def __init__(
        self,
        exchange: Exchange,
        joined: JoinReply,
        slots: Sequence[IslandFragment],
        memory: Memory,
        tally: IslandCounters,
        background: Runtime,
    ) -> None:
        self._exchange, self._joined, self._slots = exchange, joined, slots
        self._memory, self._tally = memory, tally
        self._decay = joined.settings.wire.error_feedback_decay
        self._stops = False
        self._background = background
        self._waiting: tuple[UpdateInFlight, Heartbeat] | None = None
        self._sender = background.hand(f"atoll-{joined.island}-send")
        self._receiver = background.hand(f"atoll-{joined.island}-receive")

    def send(self, slot: IslandFragment, book: FragmentSync) -> None:
        """Seal and publish `slot.sealed`, then wait for its outcome: all behind."""
        self._sender.submit(self._send, slot, book)

    def expect(self, slot: IslandFragment, book: FragmentSync) -> None:
        """Wait for an outcome without an update: an earlier life has sent one."""
        assert slot.sealed is not None
        self._receiver.submit(self.receive, slot, slot.sealed, book)

    def resume(self, slot: IslandFragment, book: FragmentSync) -> None:
        """Go on with an update that a checkpoint holds, from where it was."""
        sealed = slot.sealed
        assert sealed is not None
        if sealed.arrival.done():
            return
        if sealed.is_awaited:
            self.expect(slot, book)
        else:
            self.send(slot, book)

    def wait(
        self, sealed: UpdateInFlight, beat: Heartbeat
    ) -> AppliedOutcome | FragmentsWanted:
        """Stand still for an outcome, and say so; a summons may come before it."""
        # Read before the receiver may know that somebody waits: it replaces a promise
        # that it has kept with a summons.
        arrival = sealed.arrival
        self._waiting = None if arrival.done() else (sealed, beat)
        try:
            if self._waiting:
                self._exchange.heartbeat(beat)
                self._sender.submit(self._say_waiting, sealed)
            return arrival.result()
        finally:
            self._waiting = None

    def stop(self) -> None:
        """Finish what is being sent, and receive nothing more."""
        self._sender.shutdown()
        self._stops = True
        self._receiver.shutdown()

    def fresh(self, beat: Heartbeat) -> Heartbeat:
        """Return a beat that says what is held now."""
        return replace(beat, holds=tuple(slot.held for slot in self._slots))

    def _send(self, slot: IslandFragment, book: FragmentSync) -> None:
        sealed = slot.sealed
        assert sealed is not None
        try:
            if sealed.frame is None:
                sealed.frame = self.seal(slot, sealed, FrameKind.UPDATE)
            if not slot.is_over(sealed.round):
                self.publish(sealed.frame)
        except BaseException as exc:  # the thread that trains must learn of it
            sealed.arrival.set_exception(exc)
            return
        self._receiver.submit(self.receive, slot, sealed, book)

    def seal(
        self,
        slot: IslandFragment,
        sealed: UpdateInFlight,
        kind: FrameKind,
        *,
        is_difference: bool = False,
    ) -> Frame:
        """Return the update's frame; one that is refused here has no body."""
        run, island = self._joined.run, self._joined.island
        seed = update_seed(run, slot.index, sealed.round, island)
        try:
            with span("seal"):
                body, norm = self._memory.seal(
                    slot,
                    sealed,
                    seed=seed,
                    decay=self._decay,
                    is_difference=is_difference,
                )
        except NonFinite as exc:
            refused = as_reason(str(exc))
            header = self._header(slot, sealed, kind, seed=seed, refused=refused)
            return Frame(header, np.empty(0, np.uint8))
        header = self._header(
            slot, sealed, kind, seed=seed, elements=slot.layout.elements, norm=norm
        )
        with span("digest"):
            return Frame(with_body(header, body), body)

    def _header(
        self,
        slot: IslandFragment,
        sealed: UpdateInFlight,
        kind: FrameKind,
        *,
        seed: int,
        elements: int = 0,
        norm: float = 0.0,
        refused: str = "",
    ) -> Header:
        joined, tally = self._joined, self._tally
        with span("digest"):
            # Measured, not remembered: memory may have changed since the last round.
            base = self._memory.measure(slot)
        return Header(
            kind=kind,
            run=joined.run,
            fragment=slot.index,
            round=sealed.round,
            island=joined.island,
            incarnation=joined.incarnation,
            epoch=joined.epoch,
            base=base,
            codec=slot.up.name,
            seed=seed,
            elements=elements,
            weight=sealed.weight,
            norm=norm,
            refused=refused,
            progress=TrainingProgress(
                inner_steps=joined.inner_steps
                + sealed.inner_steps
                - tally.earlier_steps,
                tokens=joined.tokens + sealed.tokens - tally.earlier_tokens,
            ),
        )

    def publish(self, frame: Frame) -> Reception:
        """Publish a frame, and count its bytes."""
        with span("send"):
            reception = self._exchange.publish(frame)
        self._tally.bytes_up += frame_bytes(frame.header)
        return reception

    def receive(
        self, slot: IslandFragment, sealed: UpdateInFlight, book: FragmentSync
    ) -> None:
        """Keep the promise of an update's outcome, or come again for it."""
        if sealed.is_void:
            return
        try:
            outcomes = self._outcomes(slot, sealed)
            if outcomes is None:
                self._receiver.submit(self.receive, slot, sealed, book)
            elif outcomes:
                self._apply(slot, sealed, book, outcomes)
                for fragment in outcomes[-1].position.lost:
                    self._sender.submit(self._bring_quietly, self._slots[fragment])
        except OutcomeLost as exc:
            self._start_over(slot, sealed, str(exc))
        except BaseException as exc:  # the thread that trains must learn of it
            sealed.arrival.set_exception(exc)

    def _outcomes(
        self, slot: IslandFragment, sealed: UpdateInFlight
    ) -> list[Outcome] | None:
        """Return the outcome of the sealed round and of all that passed since.

        One without a body is the last: the state is to be taken instead of means. What
        was over when this life resumed is taken by itself. An island that leaves looks
        once more, and waits for nothing. None: another flight goes first.
        """
        outcomes: list[Outcome] = []
        while True:
            is_last_look = self._stops
            with span("outcome"):
                outcome = self._exchange.outcome(
                    slot.index,
                    sealed.round + len(outcomes),
                    wait_s=0.0 if is_last_look else POLL_S,
                )
            if outcome is None:
                if is_last_look:
                    return []
                if not outcomes and (self._heed() or self._waits_elsewhere(sealed)):
                    return None
                continue
            outcomes.append(outcome)
            header = outcome.agreed.header
            if not outcome.has_body:
                return outcomes
            with span("digest"):
                verify_body(header, outcome.agreed.body)
            self._tally.bytes_down += frame_bytes(header)
            is_last = outcome.position.rounds[slot.index] <= header.round + 1
            if is_last or slot.is_over(sealed.round):
                return outcomes

    def _say_waiting(self, sealed: UpdateInFlight) -> None:
        """Let the run know at once that training stands still."""
        waiting = self._waiting
        if waiting and waiting[0] is sealed and not sealed.arrival.done():
            with suppress(AtollError):  # the receiver meets the same, and tells
                self._exchange.heartbeat(waiting[1], at_once=True)

    def _waits_elsewhere(self, sealed: UpdateInFlight) -> bool:
        """Return whether training stands still for another flight than this one."""
        waiting = self._waiting
        return waiting is not None and waiting[0] is not sealed

    def _heed(self) -> bool:
        """Tell the thread that trains what everybody waits for, while it waits too."""
        waiting = self._waiting
        if waiting is None:
            return False
        sealed, beat = waiting
        position = self._exchange.heartbeat(self.fresh(beat))
        self.bring_lost(position)
        wanted = {
            index: position.rounds[index]
            for index in position.wanted
            if not self._is_on_its_way(self._slots[index], position.rounds[index])
        }
        if not wanted.items() - sealed.told or sealed.arrival.done():
            return False
        sealed.told |= wanted.items()
        self._waiting = None
        self._void_waits(wanted)
        told, sealed.arrival = sealed.arrival, self._background.promise()
        told.set_result(FragmentsWanted(replace(position, wanted=tuple(wanted))))
        return True

    def _is_on_its_way(self, slot: IslandFragment, round: int) -> bool:
        """Return whether this life has published for a round, or knows its outcome."""
        sealed = slot.sealed
        if sealed is None or sealed.round != round:
            return False
        return not sealed.is_awaited or sealed.arrival.done()

    def _void_waits(self, wanted: Mapping[int, int]) -> None:
        """Wait no more for what the run waits for: an earlier life's update is lost."""
        for index, round in wanted.items():
            sealed = self._slots[index].sealed
            if sealed is not None and sealed.round == round:
                sealed.is_void = True

    def bring_lost(self, position: Position) -> None:
        """Bring the states that the run has lost, as it says."""
        for fragment in position.lost:
            self._bring_state(self._slots[fragment])

    def _bring_quietly(self, slot: IslandFragment) -> None:
        """Bring a state behind the training: if it fails, another island is asked."""
        try:
            self._bring_state(slot)
        except AtollError as exc:
            log.warning("the state of fragment %d was not brought: %s", slot.index, exc)

    def _bring_state(self, slot: IslandFragment) -> None:
        """Give the run what it has lost: the last outcomes, and the state after them.

        Nothing if this island has moved on since it said what it holds.
        """
        outer = terms_of(slot.layout, self._joined.settings).outer
        with slot.lock:
            outcomes = tuple(slot.outcomes)
            state = self._memory.whole(slot)
            frame = state_frame(self._joined, slot.index, state, outer)
        for outcome in outcomes:
            self._exchange.publish(Frame(outcome, np.empty(0, np.uint8)))
        self._exchange.publish(frame)

    def _apply(
        self,
        slot: IslandFragment,
        sealed: UpdateInFlight,
        book: FragmentSync,
        outcomes: list[Outcome],
    ) -> None:
        first, last = outcomes[0].agreed.header, outcomes[-1].agreed.header
        assert first.roster is not None
        mine, base = b"nothing", slot.state.digest
        if sealed.frame is not None:
            mine, base = update_digest(sealed.frame.header), sealed.frame.header.base
        verdict = verdict_of(first.roster, self._joined.island, mine)
        entry = first.roster.entry(self._joined.island)
        reason = entry.reason if entry else ""
        fresh = None
        if first.base != base or not outcomes[-1].has_body:
            fresh = fetch_state(self._exchange, slot.index)
        through = fresh.round if fresh else last.round
        how, residual = decide(book, verdict, through=through), verdict
        if spent := why_spent(slot, sealed, entry, mine, through=through):
            # All of it is in the anchor already, and the codec's rest with it.
            how, verdict, reason = WorkDecision.DROP, Verdict.COUNTED, spent
            residual = Verdict.REFUSED
        with slot.turn:
            if how is WorkDecision.CARRY:
                self._memory.keep_loaded(slot, sealed)
            if fresh is not None:
                self._replace_state(slot, fresh)
            else:
                self._apply_or_fetch(slot, outcomes)
            self._memory.settle(slot, sealed, residual)
            self._judge_held_back(slot, first)
            sealed.arrival.set_result(
                AppliedOutcome(
                    how=how,
                    verdict=verdict,
                    reason=reason,
                    through=slot.state.round,
                    position=outcomes[-1].position,
                )
            )

    def _judge_held_back(self, slot: IslandFragment, outcome: Header) -> None:
        """Take note what an outcome leaves of saved work that waited for it."""
        held = slot.held_back
        if held is None or held.round != outcome.round:
            return
        assert outcome.roster is not None
        held.judge(outcome.roster, self._joined.island)
        self._memory.leave_over(slot, held.saved, held.remains)

    def _start_over(
        self, slot: IslandFragment, sealed: UpdateInFlight, reason: str
    ) -> None:
        """Take the run's state: nobody knows whether the update counted.

        It must not count twice, so that it counts as refused.
        """
        fresh = fetch_state(self._exchange, slot.index)
        with slot.turn:
            self._replace_state(slot, fresh)
            self._memory.settle(slot, sealed, Verdict.REFUSED)
            slot.held_back = None
            sealed.arrival.set_result(
                AppliedOutcome(
                    how=WorkDecision.REFUSE,
                    verdict=Verdict.REFUSED,
                    reason=reason,
                    through=slot.state.round,
                    position=None,
                )
            )

    def _replace_state(self, slot: IslandFragment, fresh: FragmentState) -> None:
        with slot.lock:
            self._memory.replace(slot, fresh)
            slot.outcomes.clear()
            slot.note_held()

    def _apply_or_fetch(self, slot: IslandFragment, outcomes: list[Outcome]) -> None:
        """Take the outer steps; if one does not fit, take the run's state instead."""
        try:
            self._apply_all(slot, outcomes)
        except CorruptError as exc:
            log.warning(
                "fragment %d takes the run's state instead of its outcome: %s",
                slot.index,
                exc,
            )
            self._replace_state(slot, fetch_state(self._exchange, slot.index))

    def _apply_all(self, slot: IslandFragment, outcomes: list[Outcome]) -> None:
        with slot.lock:
            for outcome in outcomes:
                with span("apply"):
                    self._memory.apply(slot, outcome.agreed)
                slot.outcomes.append(outcome.agreed.header)
            slot.note_held()


def why_spent(
    slot: IslandFragment,
    sealed: UpdateInFlight,
    entry: RosterEntry | None,
    digest: bytes,
    *,
    through: int,
) -> str:
    """Return why the work of an update is in the anchor already; empty if it is not.

    `digest` is the update's own, and `through` the last round that is taken with it.
    """
    if not slot.origin:
        return ""
    if sealed.round < slot.counted_through <= through:
        return (
            f"rounds up to {through} are taken together, because what came between is "
            f"kept no more, and round {slot.counted_through} counted an earlier life"
        )
    is_another = entry is not None and entry.digest != digest
    if entry is None or not is_another or entry.verdict is not Verdict.COUNTED:
        return ""
    if entry.incarnation < slot.origin:
        return ""
    return (
        f"round {sealed.round} counted another update of incarnation "
        f"{entry.incarnation}: this life did not make the same one again"
    )


def seen_from(
    position: Position,
    slots: Sequence[IslandFragment],
    books: Sequence[FragmentSync],
    taken: OutcomeTaken,
) -> Position:
    """Return where the run was when the life before took an outcome.

    Of a round that is made again, those after it have not been heard of.
    """
    if not any(slot.over_through for slot in slots):
        return position
    rounds = list(position.rounds)
    for slot, book in zip(slots, books, strict=True):
        own = book.flight.round if book.flight else book.taken + 1
        if slot.index == taken.fragment:
            own = taken.through + 1
        if slot.is_over(own):
            rounds[slot.index] = min(rounds[slot.index], own)
    return replace(position, rounds=tuple(rounds))
