"""A coordinator without HTTP: the state machine, its journal and its weights.

The service handles one call at a time. A reply's promises are durable before it is
returned. After a crash in between, the journal restores the state, and an island that
repeats the call gets the same answer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace

from atoll.coordinator.commit import (
    Committer,
    ReceiptIssuer,
    RunConcurrently,
    WriteAhead,
)
from atoll.coordinator.commit import PendingOutcome as PendingOutcome
from atoll.coordinator.restore import Key, record_of, restore
from atoll.coordinator.submissions import (
    CollectiveClose,
    CollectiveRound,
    founding_states,
    header_bytes,
    is_same_founding,
    lost_outcomes,
    require_sound,
    reserve_bytes,
    states_bytes,
    verified_state,
)
from atoll.disk import Disk
from atoll.disk.space import RECORDS_BYTES
from atoll.errors import DiskError, Refused, Unreachable
from atoll.exchange import Frame, Outcome, calls
from atoll.journal import (
    CreatedRecord,
    Journal,
)
from atoll.journal.files import key_of
from atoll.protocol import (
    Heartbeat,
    HeldRound,
    JoinReply,
    Phase,
    Reception,
    TensorSpec,
    events,
)
from atoll.protocol.coordinator import advance, wakes_at
from atoll.protocol.join_leave import reply_to
from atoll.protocol.model import ConstantCatalogue, keepable, to_bring
from atoll.protocol.operators import require_staying
from atoll.settings import RunSettings
from atoll.weights import Layout, UpdateCheck, lay_out, require_state, terms_of
from atoll.wire import FrameKind, Header, OuterValues, blake3_digest, verify_body

RETRY_S = 1.0
"""Delay before a record that the disk refused is written again."""

MAX_REFUSALS = 100
"""Number of refusals kept until the watcher reads them."""

Defer = Callable[[events.CloseRound], None]
"""Queues a closing round for `agree`, then `commit`."""


class Service:
    """Handles the calls of islands for one run. One caller at a time, except `agree`.

    A round is reduced and committed in the call that closes it; a host with threads
    defers that: see `defer_to`.
    """

    def __init__(self, journal: Journal, *, now_s: float) -> None:
        restored = restore(journal, now_s=now_s)
        self.journal = journal
        self.state = restored.state
        self.weights = restored.weights
        self._layout = restored.layout
        self._keep_reserve()
        self._spool = restored.spool
        self._committer = Committer(journal, self.weights, self._spool)
        self.write_ahead = WriteAhead(journal, self._spool)
        self.defer: Defer | None = None
        self.after_block: Callable[[], None] | None = None
        """Called while updates are reduced, when a block of each has been read."""
        self.failing: Callable[[str], None] = lambda reason: None
        """Called with the reason when the disk fails, with an empty string when it
        works."""
        self.refusals: deque[tuple[Header, str]] = deque(maxlen=MAX_REFUSALS)
        """Updates with invalid values, and the reasons, for the watcher."""
        self.receipts = ReceiptIssuer(journal)
        self.recoveries: deque[tuple[str, int, int]] = deque(maxlen=MAX_REFUSALS)
        """Island, fragment and round of recovered states."""
        self.damage: list[str] = []
        """Damage found on the disk, in sentences."""

    @classmethod
    def create(
        cls, disk: Disk, settings: RunSettings, *, run: str, now_s: float
    ) -> Service:
        """Begin a run on an empty disk."""
        created = CreatedRecord(
            run=run, settings=settings.to_dict(), fingerprint=settings.fingerprint
        )
        return cls(Journal.create(disk, created), now_s=now_s)

    @classmethod
    def open(cls, disk: Disk, *, now_s: float) -> Service:
        """Resume the run whose journal is on a disk."""
        return cls(Journal.open(disk), now_s=now_s)

    def defer_to(self, defer: Defer, *, run_concurrently: RunConcurrently) -> None:
        """Pass closing rounds to a host with threads.

        `run_concurrently` writes an outcome while its outer step is taken.
        """
        self.defer, self._committer.run_concurrently = defer, run_concurrently

    def use_threads(self, threads: int) -> None:
        """Set the number of threads that reduce and step a round."""
        self._committer.threads = threads

    def handle(self, call: calls.Call, now_s: float) -> calls.Reply:
        """Return the answer to a call; repeating a call is the same call.

        Raises:
            AtollError: the call is refused, and nothing has changed.
            RunEnded: the requested round will never open.
        """
        self.state.require_here()
        match call:
            case calls.JoinCall(request, key, nonce):
                digest = blake3_digest(key)
                return self._join(events.JoinRequested(request, digest, nonce), now_s)
            case calls.FoundCall():
                return self._found(call, now_s)
            case calls.KeepCall():
                return self._keep(call)
            case calls.RecoverCall():
                return self._recover(call, now_s)
            case calls.HeartbeatCall(beat):
                return self._beat(beat, now_s)
            case calls.OfferCall(header):
                return self._advance(events.UpdateOffered(header), now_s)
            case calls.PublishCall(frame, beat):
                return self._publish(frame, now_s, beat=beat)
            case calls.AgreedCall():
                return self._agreed(call, now_s)
            case calls.OutcomeCall(beat=beat):
                position = self._beat(beat, now_s) if beat else None
                return self._outcome(call, now_s) or position
            case calls.StateCall(fragment):
                return self.state_frame(fragment)
            case calls.DataCall(island, incarnation, data):
                return self._advance(
                    events.DataOpened(island, incarnation, data), now_s
                )
            case calls.ClaimCall(ask):
                return self._advance(events.RowsClaimed(ask), now_s)
            case calls.LeaveCall(island, incarnation):
                self._leave(island, incarnation, now_s)
                return None

    @property
    def staged(self) -> Mapping[Key, Frame]:
        """The updates of open rounds, by fragment, round and island."""
        return self._spool

    def tick(self, now_s: float) -> float:
        """Process expired deadlines, and return when to call again."""
        for pending in self._committer.pending:
            self.commit(pending, now_s)
        if self.defer is None:
            self.compact()
        is_behind = self._committer.is_behind
        try:
            self._advance(events.Tick(), now_s)
        except DiskError as exc:  # the end of the run could not be recorded
            self.failing(str(exc))
            is_behind = True
        retry_s = now_s + RETRY_S if is_behind else float("inf")
        return min(wakes_at(self.state, now_s), retry_s)

    def compact(self) -> None:
        """Write states where means have piled up; the next call retries failures.

        May run concurrently with all other calls.
        """
        self.seal()
        self.damage += self._committer.compact()

    def seal(self) -> None:
        """Copy the end of the log to a second file; the next call retries a failure."""
        with suppress(DiskError):
            self.journal.seal()

    def change(self, event: events.Event, now_s: float) -> calls.Reply:
        """Apply an operator's command."""
        return self._advance(event, now_s)

    def _beat(
        self, beat: Heartbeat, now_s: float, *, is_asking: bool = True
    ) -> events.Answer | None:
        """Process a heartbeat whose holdings are proven; any other is refused."""
        self.state.members.require(beat.island, beat.incarnation)
        proven = self.receipts.proven_beat(beat, self.state.rounds)
        return self._advance(
            events.HeartbeatReceived(proven, is_asking=is_asking), now_s
        )

    def _join(self, event: events.JoinRequested, now_s: float) -> JoinReply:
        members, request = self.state.members.known, event.request
        if request.holds:
            name = request.island or ""
            holds = self.receipts.proven(name, request.holds, self.state.rounds)
            event = replace(event, request=replace(request, holds=holds))
        state, actions = advance(self.state, event, now_s)
        welcome = next(
            action for action in actions if isinstance(action, events.Welcome)
        )
        member = welcome.member
        before = members.get(member.island)
        self._keep_updates_of(member.island, welcome.spoken_for)
        if before is None or before.incarnation != member.incarnation:
            self.journal.note(record_of(member))
        self.state = state
        self._perform(actions, now_s)
        return reply_to(self.state, welcome)

    def _keep_updates_of(self, island: str, spoken_for: tuple[int, ...]) -> None:
        """Make an earlier incarnation's updates durable: it cannot send them again."""
        for fragment in spoken_for:
            self._committer.keep(self.state.rounds[fragment].staged[island])

    def _found(self, call: calls.FoundCall, now_s: float) -> calls.Reply:
        if self.state.model is not None and is_same_founding(
            call, self.journal.recorded
        ):
            return self.state.position(now_s)
        founding = self.state.founding_of(call.island, call.incarnation)
        layout = lay_out(founding.model, self.state.settings)
        weights = founding_states(call, layout, self.state.settings)
        outers = tuple(
            terms_of(fragment, self.state.settings).outer for fragment in layout
        )
        digests = tuple(state.digest for state in weights)
        event = events.Founded(call.island, call.incarnation, digests, outers)
        advanced, actions = advance(self.state, event, now_s)
        self.journal.found(
            founding.model, [(frame.header, frame.body) for frame in call.states]
        )
        self.state, self._layout = advanced, layout
        self._keep_reserve()
        self.weights[:] = weights
        self.journal.constants.keep_only(keepable(founding.model))
        return self._perform(actions, now_s)

    def _keep_reserve(self) -> None:
        """Reserve disk space for the next commits."""
        needed = reserve_bytes(self._layout, self.state.settings)
        self.journal.room.reserve_bytes = RECORDS_BYTES + needed

    def _keep(self, call: calls.KeepCall) -> calls.KeepReply:
        """Store a part of a constant that the founder uploads."""
        constant = self.awaited_constant(call.island, call.incarnation, call.digest)
        return calls.KeepReply(
            self.journal.constants.take(constant, call.first, call.part)
        )

    def awaited_constant(
        self, island: str, incarnation: int, digest: str
    ) -> TensorSpec:
        """Return a constant that a founder may bring.

        Removes constants of another founder that this one's model does not have.

        Raises:
            FoundingLost: this island does not found the run.
            UsageError: its constants are more than the run keeps.
            Refused: its model has no such constant, or the run keeps none.
        """
        model = self.state.founding_of(island, incarnation).model
        awaited = {
            constant.digest: constant
            for constant in to_bring(model, self.state.settings)
        }
        if digest not in awaited:
            raise Refused(
                f"No constant with the digest {digest[:12]} is expected: the model of "
                f"{island!r} has {len(awaited)} constants for this run."
            )
        self.journal.constants.keep_only(awaited)
        return awaited[digest]

    @property
    def catalogue(self) -> ConstantCatalogue:
        """The constants of the run's model, and which of them are stored."""
        return ConstantCatalogue.of(self.state.model, self.journal.constants.complete)

    def states_bytes(self, island: str, incarnation: int) -> int:
        """Return the size of the states that an island may upload.

        Raises:
            FoundingLost, LeaseLost: this island may not upload states.
        """
        layout = self.brought_layout(island, incarnation)
        return states_bytes(layout, self.state.settings)

    def brought_layout(self, island: str, incarnation: int) -> Layout:
        """Return the layout of the states that an island may upload.

        Raises:
            FoundingLost, LeaseLost: it may upload none.
        """
        if self.state.model is None:
            model = self.state.founding_of(island, incarnation).model
            return lay_out(model, self.state.settings)
        self.state.members.require(island, incarnation)
        return self._layout

    def header_bytes(self, fragment: int) -> int:
        """Return the largest size of an update's header."""
        sizes = [fragment_layout.elements for fragment_layout in self._layout]
        selected = sizes[fragment : fragment + 1]
        return header_bytes(max(selected or sizes, default=0))

    def awaits_state(self, header: Header, now_s: float) -> bool:
        """Return whether a state is the one that the run has lost."""
        if header.fragment >= len(self.state.rounds):
            return False
        lost = self.state.lost_state(header.fragment, now_s)
        return lost == HeldRound(header.round, header.base)

    def _recover(self, call: calls.RecoverCall, now_s: float) -> calls.Reply:
        """Restore a lost state; any other state changes nothing."""
        frame = call.state
        header, fragment = frame.header, frame.header.fragment
        require_staying(self.state)
        self.state.members.require(call.island, call.incarnation)
        self.receipts.require_recovery(call, self.state.round(fragment).number)
        lost = self.state.lost_state(fragment, now_s)
        if lost is None or lost != HeldRound(header.round, header.base):
            return self.state.position(now_s)
        if self.defer and not self._committer.is_pending(fragment):
            self.settled_round(fragment)
        terms = terms_of(self._layout[fragment], self.state.settings)
        require_state(header, self._layout[fragment], terms, round=lost.round)
        state = verified_state(frame)
        committed = self.journal.recorded.fragments[fragment].round
        outcomes = lost_outcomes(call, committed, lost.round)
        self.journal.recover((header, frame.body), outcomes)
        self.weights[fragment] = state
        rosters = tuple(
            (outcome.round, outcome.roster) for outcome in outcomes if outcome.roster
        )
        event = events.Recovered(fragment, lost, rosters, terms.outer)
        self.recoveries.append((call.island, fragment, lost.round))
        actions = self._change(event, now_s)
        self._committer.end(self.state.rounds[fragment])
        return self._perform(actions, now_s)

    def offer(
        self, header: Header, now_s: float, *, beat: Heartbeat | None = None
    ) -> Reception:
        """Return the reception of an update, by its header alone."""
        if beat:
            self._beat(beat, now_s, is_asking=False)
        reception = self._advance(events.UpdateOffered(header), now_s)
        assert isinstance(reception, Reception)
        if reception is Reception.STAGED and header.kind is FrameKind.DEPARTING:
            self._committer.keep(header)
        if reception is Reception.WANTED:
            self._require_room(header)
        return reception

    def _require_room(self, header: Header) -> None:
        """Check that a round has room for an update, before its body is read.

        Every island that the round has waited for since it opened has room. The others
        share `run.max_islands` slots: names that come and go cannot fill the disk.

        Raises:
            Unreachable: there is no room: ask again, in the next round.
        """
        round = self.state.rounds[header.fragment]
        standing = round.updates_beside(header)
        if header.island in standing or header.island in round.candidates:
            return
        others = len(standing.keys() - round.candidates)
        max_islands = self.state.settings.run.most_islands
        if others >= max_islands:
            raise Unreachable(
                f"Round {header.round} of fragment {header.fragment} holds {others} "
                f"updates of islands that joined after it opened, and takes "
                f"{max_islands} (run.max_islands). Ask again when it is over."
            )

    def check_of(self, header: Header) -> UpdateCheck:
        """Return the check for the body of a wanted update."""
        layout = self._layout[header.fragment]
        return UpdateCheck(
            header,
            layout,
            terms_of(layout, self.state.settings),
            on_refused=lambda reason: self.refusals.append((header, reason)),
        )

    def take(self, frame: Frame, now_s: float) -> Reception:
        """Stage an update whose body is received and checked, if it is still wanted."""
        # A header is judged three times. When it is offered, so that no body is sent
        # that is not wanted. Here, because the body was received and checked outside of
        # the lock since: the round may have closed, or another update of the island may
        # have come. And by the machine when it is stored, which relies on no host.
        reception = self.offer(frame.header, now_s)
        return self._stage(frame, now_s) if reception is Reception.WANTED else reception

    def _stage(self, frame: Frame, now_s: float) -> Reception:
        header = frame.header
        if header.kind is FrameKind.DEPARTING:
            self.journal.stage(header, frame.body)
        self._spool[key_of(header)] = frame
        reception = self._advance(events.UpdateStored(header), now_s)
        assert isinstance(reception, Reception)
        if reception is not Reception.STAGED:
            # Its fragment has ended with the round that closed when it was offered.
            self._spool.pop(key_of(header), None)
        return reception

    def _publish(
        self, frame: Frame, now_s: float, *, beat: Heartbeat | None
    ) -> calls.Reply:
        reception = self.offer(frame.header, now_s, beat=beat)
        if reception is not Reception.WANTED:
            return reception
        verify_body(frame.header, frame.body)
        check = self.check_of(frame.header)
        check.decoded(frame.body, frame.header.elements)
        check.finish()
        return self._stage(frame, now_s)

    def _agreed(self, call: calls.AgreedCall, now_s: float) -> calls.Reply:
        if call.agreed is not None:
            require_sound(call.agreed)
        result = self.gather(call, now_s)
        if isinstance(result, events.CloseRound):
            self.commit(self.agree(result), now_s)
            result = self.gather(call, now_s)
            assert not isinstance(result, events.CloseRound)
        return result

    def gather(
        self, call: calls.AgreedCall, now_s: float
    ) -> calls.Reply | events.CloseRound:
        """Return the outcome of updates that a collective reduces, or their reception.

        An agreed frame with a sound body closes the round: on a `CloseRound` the caller
        runs `agree` and `commit`, then calls again.

        Raises:
            Refused: the agreed frame is not the outcome of the round.
            Unreachable: no round closes now: ask again.
        """
        self.state.members.require(call.island, call.incarnation)
        question = calls.OutcomeCall(call.fragment, call.round, has_body=False)
        over = self._outcome(question, now_s)
        if over is not None:
            is_theirs = call.agreed and call.agreed.header == over.agreed.header
            return over if is_theirs else Reception.COMMITTED
        self.settled_round(call.fragment)
        collective_round = self._collective_round(call.fragment)
        result = collective_round.judge(call, self.state, now_s)
        if not isinstance(result, CollectiveClose):
            return result
        assert call.agreed is not None
        self._committer.collective_outcomes[call.fragment] = call.agreed
        self.state = result.state
        self._perform(result.others, now_s)
        return result.close

    def _collective_round(self, fragment: int) -> CollectiveRound:
        layout = self._layout[fragment]
        terms = terms_of(layout, self.state.settings)
        return CollectiveRound(layout, terms, base=self.weights[fragment].digest)

    def agreed_bytes(self, fragment: int) -> int:
        """Return the largest size of a round that a collective has reduced."""
        self.state.round(fragment)
        return self._collective_round(fragment).most_bytes(
            len(self.state.members.known)
        )

    def _outcome(self, call: calls.OutcomeCall, now_s: float) -> Outcome | None:
        if call.round < self.state.round(call.fragment).number:
            agreed = self._committer.outcome(
                call.fragment, call.round, has_body=call.has_body
            )
            return self.receipts.with_receipts(agreed, self.state.position(now_s))
        self.state.require_opens(call.round, fragment=call.fragment)
        return None

    def settled_round(self, fragment: int) -> int:
        """Return the round of a fragment's state, which no thread is changing.

        Raises:
            Unreachable: a round is being committed: ask again.
        """
        if self.state.round(fragment).phase is Phase.CLOSING:
            raise Unreachable(
                f"A round of fragment {fragment} waits for the coordinator's disk. "
                "Ask again."
            )
        return self.weights[fragment].round

    def state_frame(self, fragment: int) -> Frame:
        """Return a copy of a fragment's state.

        Raises:
            Unreachable: a round is being committed: ask again.
        """
        self.settled_round(fragment)
        state = self.weights[fragment]
        return Frame(
            *state.to_frame(
                run=self.state.run, fragment=fragment, outer=self.outer_of(fragment)
            ),
            receipt=self.receipts.of_state(fragment, state.round, state.digest),
        )

    def outer_of(self, fragment: int) -> OuterValues:
        """Return the current values of a fragment's outer optimizer."""
        return terms_of(self._layout[fragment], self.state.settings).outer

    def _leave(self, island: str, incarnation: int, now_s: float) -> None:
        member = self.state.members.known.get(island)
        if member and member.incarnation == incarnation and member.has_left:
            return
        self._advance(events.Leave(island, incarnation), now_s)

    def _advance(self, event: events.Event, now_s: float) -> events.Answer | None:
        return self._perform(self._change(event, now_s), now_s)

    def _change(self, event: events.Event, now_s: float) -> list[events.Action]:
        """Advance the state machine durably; return the actions still to perform.

        Raises:
            DiskError: nothing has changed; safe to repeat.
        """
        state, actions = advance(self.state, event, now_s)
        for action in actions:
            if isinstance(action, events.Persist):
                self.journal.note(record_of(action.change))
        self.state = state
        return actions

    def _perform(
        self, actions: list[events.Action], now_s: float
    ) -> events.Answer | None:
        reply = None
        for action in actions:
            match action:
                case events.Respond(answer):
                    reply = answer
                case events.CloseRound() if self.defer:
                    self.defer(action)
                case events.CloseRound():
                    self.commit(self.agree(action), now_s)
                case events.Persist() | events.Welcome():
                    pass
        return reply

    def agree(self, close: events.CloseRound) -> PendingOutcome:
        """Return the outcome of a closing round, and take its outer step.

        May run concurrently: no other call reads a fragment that is closing.
        """
        layout = self._layout[close.fragment]
        return self._committer.agree(
            close,
            layout,
            terms_of(layout, self.state.settings),
            run=self.state.run,
            after_block=self.after_block,
        )

    def commit(self, pending: PendingOutcome, now_s: float) -> None:
        """Make an outcome durable, and open the next round.

        After a disk error the next tick retries; no island sees the outcome before.
        """
        fragment, roster = pending.close.fragment, pending.header.roster
        assert roster is not None
        digest, outer = self.weights[fragment].digest, self.outer_of(fragment)
        try:
            self._committer.commit(pending)
            event = events.Committed(fragment, roster, digest, outer)
            actions = self._change(event, now_s)
        except DiskError as exc:
            self.failing(str(exc))
            return
        self.failing("")
        self._committer.end(self.state.rounds[fragment])
        self._perform(actions, now_s)
