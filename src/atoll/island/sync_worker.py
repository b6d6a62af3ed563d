"""The sync worker: one thread seals and sends updates, another receives outcomes.

An island that resumes from a checkpoint makes some rounds again:

Rule 1: a round that was over at the checkpoint is taken by itself, at the step at which
        the earlier incarnation took it, before the rounds after it are known.
Rule 2: if an update of an earlier incarnation has counted and this incarnation does not
        make it again to the byte, the update contains this incarnation's work too. The
        work must not count twice, so it is dropped.

In an asynchronous run the worker takes outcomes one by one, until one is the receipt of
the update in flight: see `receipts`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np

from atoll import protocol, wire
from atoll.errors import AtollError, CorruptError, NonFinite, OutcomeLost
from atoll.exchange import Exchange, Frame, Outcome
from atoll.island.base import IslandMemory
from atoll.island.entry import fetch_state, state_frame
from atoll.island.fragment import IslandFragment, SealTerms, UpdateInFlight
from atoll.island.identity import update_seed
from atoll.island.progress import IslandCounters
from atoll.island.receipts import ReceiptReader, judge_held_back
from atoll.island.saved_state import AppliedOutcome, FragmentsWanted
from atoll.protocol.island import FragmentSync
from atoll.runtime import Runtime, Worker
from atoll.trace import span
from atoll.weights import FragmentState, terms_of

POLL_S = 0.1
"""How long a receiver waits before it checks whether the island is leaving."""

log = logging.getLogger("atoll")


class SyncWorker:
    """Encodes and sends sealed weights, and applies outcomes to the anchor."""

    def __init__(
        self,
        exchange: Exchange,
        joined: protocol.JoinReply,
        slots: Sequence[IslandFragment],
        memory: IslandMemory,
        counters: IslandCounters,
        runtime: Runtime,
    ) -> None:
        self._exchange, self._joined, self._slots = exchange, joined, slots
        self._memory, self._counters = memory, counters
        self._decay = joined.settings.wire.error_feedback_decay
        self._is_async = joined.settings.sync.is_async
        self._receipts = ReceiptReader(exchange, joined, memory, counters)
        self._stops = False
        self._sealing = threading.Lock()
        self._runtime = runtime
        self._waiting: tuple[UpdateInFlight, protocol.Heartbeat] | None = None
        self._sender = Worker(runtime, f"atoll-{joined.island}-send")
        self._receiver = Worker(runtime, f"atoll-{joined.island}-receive")

    def send(self, slot: IslandFragment, sync_state: FragmentSync) -> None:
        """Start to encode and publish `slot.sealed`, and to wait for its outcome."""
        self._sender.submit(self._send, slot, sync_state)

    def expect(self, slot: IslandFragment, sync_state: FragmentSync) -> None:
        """Wait for an outcome without an update: an earlier incarnation sent one."""
        assert slot.sealed is not None
        self._receiver.submit(self.receive, slot, slot.sealed, sync_state)

    def resume(self, slot: IslandFragment, sync_state: FragmentSync) -> None:
        """Continue with an update that a checkpoint holds."""
        sealed = slot.sealed
        assert sealed is not None
        if sealed.arrival.done():
            return
        if sealed.is_awaited:
            self.expect(slot, sync_state)
        else:
            self.send(slot, sync_state)

    def wait(
        self, sealed: UpdateInFlight, beat: protocol.Heartbeat
    ) -> AppliedOutcome | FragmentsWanted:
        """Block until the outcome, or until the run requests other fragments first.

        Heartbeats tell the run meanwhile that training waits.
        """
        # Read before `_waiting` is set: from then on, the receiver may answer this
        # future with a request for fragments, and replace it by a new one.
        arrival = sealed.arrival
        self._waiting = None if arrival.done() else (sealed, beat)
        try:
            if self._waiting:
                self._exchange.heartbeat(beat)
                self._sender.submit(self._report_waiting, sealed)
            return arrival.result()
        finally:
            self._waiting = None

    def stop(self) -> None:
        """Finish the updates being sent, and stop receiving."""
        self._sender.shutdown()
        self._stops = True
        self._receiver.shutdown()

    def renewed(self, beat: protocol.Heartbeat) -> protocol.Heartbeat:
        """Return the heartbeat with the rounds that the island holds now.

        An asynchronous island may take several outcomes while it waits: it waits for
        the round after the one that it holds.
        """
        holds = tuple(slot.held_round for slot in self._slots)
        waits_for = beat.waits_for
        if self._is_async and waits_for is not None:
            fragment, _ = waits_for
            waits_for = fragment, holds[fragment].round + 1
        return replace(beat, holds=holds, waits_for=waits_for)

    def _send(self, slot: IslandFragment, sync_state: FragmentSync) -> None:
        sealed = slot.sealed
        assert sealed is not None
        try:
            frame = self._encode(slot, sealed)
            if not slot.is_over(sealed.round):
                self.publish(frame)
        except BaseException as exc:  # the thread that trains must learn of it
            sealed.arrival.set_exception(exc)
            return
        self._receiver.submit(self.receive, slot, sealed, sync_state)

    def finish_seals(self) -> None:
        """Encode every update that waits to be sent, so that a checkpoint has it.

        The sender may be waiting for the network, so this thread does it.
        """
        for slot in self._slots:
            sealed = slot.sealed
            if sealed and not sealed.is_awaited and not sealed.arrival.done():
                self._encode(slot, sealed)

    def _encode(self, slot: IslandFragment, sealed: UpdateInFlight) -> Frame:
        with self._sealing:
            if sealed.frame is None:
                sealed.frame = self.seal(slot, sealed, wire.FrameKind.UPDATE)
            return sealed.frame

    def seal(
        self,
        slot: IslandFragment,
        sealed: UpdateInFlight,
        kind: wire.FrameKind,
        *,
        is_difference: bool = False,
    ) -> Frame:
        """Return the update's frame, without a body if the weights are not finite."""
        run, island = self._joined.run, self._joined.island
        seed = update_seed(run, slot.index, sealed.round, island)
        terms = SealTerms(seed=seed, decay=self._decay, is_difference=is_difference)
        try:
            with span("seal"):
                body, norm = self._memory.seal(slot, sealed, terms)
        except NonFinite as exc:
            refused = wire.as_reason(str(exc))
            header = self._header(slot, sealed, kind, seed=seed, refused=refused)
            return Frame(header, np.empty(0, np.uint8))
        header = self._header(
            slot, sealed, kind, seed=seed, elements=slot.layout.elements, norm=norm
        )
        with span("digest"):
            return Frame(wire.with_body(header, body), body)

    def _header(
        self,
        slot: IslandFragment,
        sealed: UpdateInFlight,
        kind: wire.FrameKind,
        *,
        seed: int,
        elements: int = 0,
        norm: float = 0.0,
        refused: str = "",
    ) -> wire.Header:
        joined, counters = self._joined, self._counters
        with span("digest"):
            # Computed again, not cached: memory may have been damaged since the round.
            base = self._memory.measure(slot)
        return wire.Header(
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
            progress=wire.TrainingProgress(
                inner_steps=joined.inner_steps
                + sealed.inner_steps
                - counters.earlier_steps,
                tokens=joined.tokens + sealed.tokens - counters.earlier_tokens,
                cursor=sealed.cursor,
            ),
        )

    def publish(self, frame: Frame) -> protocol.Reception:
        """Publish a frame, and count its bytes."""
        with span("send"):
            reception = self._exchange.publish(frame)
        self._counters.bytes_up += wire.frame_bytes(frame.header)
        return reception

    def receive(
        self, slot: IslandFragment, sealed: UpdateInFlight, sync_state: FragmentSync
    ) -> None:
        """Set the outcome of an update if there is one; otherwise try again later."""
        if sealed.is_void:
            return
        try:
            if self._is_async:
                self._receive_standing(slot, sealed, sync_state)
                return
            outcomes = self._outcomes(slot, sealed)
            if outcomes is None:
                self._receiver.submit(self.receive, slot, sealed, sync_state)
            elif outcomes:
                self._apply(slot, sealed, sync_state, outcomes)
                for fragment in outcomes[-1].position.lost:
                    self._sender.submit(self._publish_lost_state, self._slots[fragment])
        except OutcomeLost as exc:
            self._start_over(slot, sealed, str(exc))
        except BaseException as exc:  # the thread that trains must learn of it
            sealed.arrival.set_exception(exc)

    def _receive_standing(
        self, slot: IslandFragment, sealed: UpdateInFlight, sync_state: FragmentSync
    ) -> None:
        """Take outcomes until one is the receipt, and those that are over by then.

        An island that leaves takes those that are over, without waiting.
        """
        while sealed.receipt is None:
            is_last_look = self._stops
            wait_s = 0.0 if is_last_look else POLL_S
            has_taken = self._receipts.take_next(
                slot, sealed, sync_state, wait_s=wait_s
            )
            if is_last_look and not has_taken:
                return
            if sealed.receipt is not None:
                break
            if self._pass_requests() or self._waits_elsewhere(sealed):
                self._receiver.submit(self.receive, slot, sealed, sync_state)
                return
        self._receipts.take_rest(slot, sealed, sync_state)
        with slot.turn:
            receipt = sealed.receipt
            sealed.held_at_s = self._runtime.now_s()
            sealed.arrival.set_result(receipt)
        if receipt.position is not None:
            for fragment in receipt.position.lost:
                self._sender.submit(self._publish_lost_state, self._slots[fragment])

    def _outcomes(
        self, slot: IslandFragment, sealed: UpdateInFlight
    ) -> list[Outcome] | None:
        """Return the outcomes of the sealed round and of all rounds since.

        An outcome without a body is the last: the state is fetched instead. A round
        that was over when this incarnation resumed is returned alone. An island that
        leaves polls once, without waiting. None: another update goes first.
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
                if not outcomes and (
                    self._pass_requests() or self._waits_elsewhere(sealed)
                ):
                    return None
                continue
            outcomes.append(outcome)
            header = outcome.agreed.header
            if not outcome.has_body:
                return outcomes
            with span("digest"):
                wire.verify_body(header, outcome.agreed.body)
            self._counters.bytes_down += wire.frame_bytes(header)
            is_last = outcome.position.rounds[slot.index] <= header.round + 1
            if is_last or slot.is_over(sealed.round):
                return outcomes

    def _report_waiting(self, sealed: UpdateInFlight) -> None:
        """Tell the run immediately that training waits."""
        waiting = self._waiting
        if waiting and waiting[0] is sealed and not sealed.arrival.done():
            with suppress(
                AtollError
            ):  # the receiver gets the same error, and reports it
                self._exchange.heartbeat(waiting[1], at_once=True)

    def _waits_elsewhere(self, sealed: UpdateInFlight) -> bool:
        """Return whether training waits for another update than this one."""
        waiting = self._waiting
        return waiting is not None and waiting[0] is not sealed

    def _pass_requests(self) -> bool:
        """Pass requests of the run for other fragments to the waiting thread.

        The thread that trains waits for an outcome that cannot come before the run has
        these fragments. Return whether there was such a request.
        """
        waiting = self._waiting
        if waiting is None:
            return False
        sealed, beat = waiting
        position = self._exchange.heartbeat(self.renewed(beat))
        self.publish_lost(position)
        wanted = {
            index: position.rounds[index]
            for index in position.wanted
            if not self._is_on_its_way(self._slots[index], position.rounds[index])
        }
        if not wanted.items() - sealed.summoned or sealed.arrival.done():
            return False
        sealed.summoned |= wanted.items()
        self._waiting = None
        self._void_waits(wanted)
        answered, sealed.arrival = sealed.arrival, self._runtime.future()
        answered.set_result(FragmentsWanted(replace(position, wanted=tuple(wanted))))
        return True

    def _is_on_its_way(self, slot: IslandFragment, round: int) -> bool:
        """Return whether this incarnation has an update for a round, or its outcome.

        An asynchronous update without a receipt may count in any later round.
        """
        sealed = slot.sealed
        if sealed is None:
            return False
        if self._is_async and not sealed.is_awaited:
            return sealed.round <= round and not sealed.arrival.done()
        if sealed.round != round:
            return False
        return not sealed.is_awaited or sealed.arrival.done()

    def _void_waits(self, wanted: Mapping[int, int]) -> None:
        """End the waits for requested rounds: the earlier incarnation's is lost."""
        for index, round in wanted.items():
            sealed = self._slots[index].sealed
            if sealed is not None and sealed.round == round:
                sealed.is_void = True

    def publish_lost(self, position: protocol.Position) -> None:
        """Publish the states that the run has lost."""
        for fragment in position.lost:
            self._publish_state(self._slots[fragment])

    def _publish_lost_state(self, slot: IslandFragment) -> None:
        """Publish a state in background; on failure the run tries another island."""
        try:
            self._publish_state(slot)
        except AtollError as exc:
            log.warning(
                "the state of fragment %d was not published: %s", slot.index, exc
            )

    def _publish_state(self, slot: IslandFragment) -> None:
        """Publish a state that the run has lost: the last outcomes, then the state.

        The run ignores it if this island has reached another round since its heartbeat.
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
        sync_state: FragmentSync,
        outcomes: list[Outcome],
    ) -> None:
        first, last = outcomes[0].agreed.header, outcomes[-1].agreed.header
        assert first.roster is not None
        window = self._window_in(outcomes)
        digest, base = b"nothing", slot.state.digest
        if sealed.frame is not None:
            digest, base = (
                wire.update_digest(sealed.frame.header),
                sealed.frame.header.base,
            )
        verdict = protocol.verdict_of(first.roster, self._joined.island, digest)
        entry = first.roster.entry(self._joined.island)
        reason = entry.reason if entry else ""
        fresh = None
        if first.base != base or not outcomes[-1].has_body:
            fresh = fetch_state(self._exchange, slot.index)
        through = fresh.round if fresh else last.round
        decision, residual = (
            protocol.decide(sync_state, verdict, through=through),
            verdict,
        )
        if spent := reason_counted_already(
            slot, sealed, entry, digest, through=through
        ):
            # All of the work is in the anchor already, and the residual with it.
            decision, verdict, reason = (
                protocol.WorkDecision.DROP,
                wire.Verdict.COUNTED,
                spent,
            )
            residual = wire.Verdict.REFUSED
        with slot.turn:
            if decision is protocol.WorkDecision.CARRY:
                self._memory.keep_loaded(slot, sealed)
            if fresh is not None:
                self._replace_state(slot, fresh)
            else:
                self._apply_or_fetch(slot, outcomes)
            self._memory.settle(slot, sealed, residual)
            judge_held_back(self._memory, slot, first, island=self._joined.island)
            sealed.held_at_s = self._runtime.now_s()
            sealed.arrival.set_result(
                AppliedOutcome(
                    decision=decision,
                    verdict=verdict,
                    reason=reason,
                    through=slot.state.round,
                    position=outcomes[-1].position,
                    window=window,
                )
            )

    def _window_in(self, outcomes: list[Outcome]) -> int | None:
        """Return the window in the last roster that lists the island, if one does.

        None without dynamic local updates.
        """
        if not self._joined.settings.sync.dynamic_local_updates:
            return None
        for outcome in reversed(outcomes):
            roster = outcome.agreed.header.roster
            assert roster is not None
            if (entry := roster.entry(self._joined.island)) is not None:
                return entry.window
        return None

    def _start_over(
        self, slot: IslandFragment, sealed: UpdateInFlight, reason: str
    ) -> None:
        """Take the run's state: it is unknown whether the update counted.

        The work must not count twice, so the update is treated as refused.
        """
        fresh = fetch_state(self._exchange, slot.index)
        with slot.turn:
            self._replace_state(slot, fresh)
            self._memory.settle(slot, sealed, wire.Verdict.REFUSED)
            slot.held_back = None
            sealed.arrival.set_result(
                AppliedOutcome(
                    decision=protocol.WorkDecision.REFUSE,
                    verdict=wire.Verdict.REFUSED,
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
        """Apply the outer steps; if one does not match, fetch the run's state."""
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


def reason_counted_already(
    slot: IslandFragment,
    sealed: UpdateInFlight,
    entry: wire.RosterEntry | None,
    digest: bytes,
    *,
    through: int,
) -> str:
    """Return why the work of an update is in the anchor already; empty if it is not.

    `digest` is that of the update, and `through` the last round applied with it.
    """
    if not slot.origin:
        return ""
    if sealed.round < slot.counted_through <= through:
        return (
            f"rounds up to {through} are applied together, because their outcomes are "
            f"no longer stored, and round {slot.counted_through} counted an earlier "
            "incarnation"
        )
    is_another = entry is not None and entry.digest != digest
    if entry is None or not is_another or entry.verdict is not wire.Verdict.COUNTED:
        return ""
    if entry.incarnation < slot.origin:
        return ""
    return (
        f"round {sealed.round} counted another update of incarnation "
        f"{entry.incarnation}: this incarnation did not make the same update again"
    )


def position_at_outcome(
    position: protocol.Position,
    slots: Sequence[IslandFragment],
    sync_states: Sequence[FragmentSync],
    outcome: protocol.OutcomeTaken,
) -> protocol.Position:
    """Return the run's position at the time the earlier incarnation took an outcome.

    For a round that is made again, the rounds after it are not known yet.
    """
    if not any(slot.over_through for slot in slots):
        return position
    rounds = list(position.rounds)
    for slot, sync_state in zip(slots, sync_states, strict=True):
        round = sync_state.flight.round if sync_state.flight else sync_state.taken + 1
        if slot.index == outcome.fragment:
            round = outcome.through + 1
        if slot.is_over(round):
            rounds[slot.index] = min(rounds[slot.index], round)
    return replace(position, rounds=tuple(rounds))
