"""A coordinator without a socket: the machine, its journal and its weights.

One call is handled at a time. What a reply promises is durable before it is returned;
whatever dies in between is found again when the journal is opened, and the island's
repeat of the call gets the same answer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace

from atoll.coordinator.brought import (
    founding_states,
    header_bytes,
    is_same_founding,
    lost_outcomes,
    reserve_bytes,
    states_bytes,
    verified_state,
)
from atoll.coordinator.committing import Beside, Committing
from atoll.coordinator.committing import Pending as Pending
from atoll.coordinator.drafting import Drafting
from atoll.coordinator.gathered import Closing, Gathering, require_sound
from atoll.coordinator.receipts import ReceiptIssuer
from atoll.coordinator.remembering import record_of
from atoll.coordinator.restore import Key, restore
from atoll.disk import Disk
from atoll.disk.room import RECORDS_BYTES
from atoll.errors import DiskError, Refused, RunEnded, Unreachable
from atoll.exchange import (
    AgreedCall,
    Call,
    FoundCall,
    Frame,
    HeartbeatCall,
    JoinCall,
    KeepCall,
    Kept,
    LeaveCall,
    OfferCall,
    Outcome,
    OutcomeCall,
    PublishCall,
    RecoverCall,
    Reply,
    StateCall,
)
from atoll.journal import Created, Journal
from atoll.protocol import (
    Beat,
    Holding,
    JoinReply,
    Phase,
    Position,
    Reception,
    TensorSpec,
)
from atoll.protocol.constants import Catalogue, keepable, to_bring
from atoll.protocol.coordinator import advance, wakes_at
from atoll.protocol.events import (
    Action,
    Beaten,
    Close,
    Committed,
    Event,
    Founded,
    Joining,
    Leave,
    Offered,
    Recovered,
    Remember,
    Say,
    Stored,
    Tick,
    Welcome,
)
from atoll.protocol.moving import require_here, require_staying
from atoll.protocol.presence import reply_to
from atoll.settings import RunSettings
from atoll.weights import Layout, UpdateCheck, lay_out, require_state, terms_of
from atoll.wire import Header, Kind, OuterValues, blake3_digest, verify_body

RETRY_S = 1.0
"""How soon a record that the disk refused is tried again."""

MAX_REFUSALS = 100
"""How many are remembered until somebody looks."""

Defer = Callable[[Close], None]
"""Takes note of a round that is to be reduced: by `agree`, then `commit`."""


class Service:
    """Handles the calls of islands for one run. One caller at a time, but for `agree`.

    A round is reduced and committed where it closes; a host with threads does it
    elsewhere: see `defer_to`.
    """

    def __init__(self, journal: Journal, *, now_s: float) -> None:
        restored = restore(journal, now_s=now_s)
        self.journal = journal
        self.state = restored.state
        self.weights = restored.weights
        self._layout = restored.layout
        self._keep_reserve()
        self._spool = restored.spool
        self._committing = Committing(journal, self.weights, self._spool)
        self.drafting = Drafting(journal, self._spool)
        self.defer: Defer | None = None
        self.after_block: Callable[[], None] | None = None
        """Called while updates are reduced, when a block of each has been read."""
        self.failing: Callable[[str], None] = lambda said: None
        """Told why the disk takes nothing, and an empty sentence when it does again."""
        self.refusals: deque[tuple[Header, str]] = deque(maxlen=MAX_REFUSALS)
        """Updates that were sealed with values that cannot count, for who looks on."""
        self.receipts = ReceiptIssuer(journal)
        self.recoveries: deque[tuple[str, int, int]] = deque(maxlen=MAX_REFUSALS)
        """Island, fragment and round of states that were brought back."""
        self.damage: list[str] = []
        """What was found to be wrong on the disk, in sentences."""

    @classmethod
    def create(
        cls, disk: Disk, settings: RunSettings, *, run: str, now_s: float
    ) -> Service:
        """Begin a run on an empty disk."""
        created = Created(
            run=run, settings=settings.to_dict(), fingerprint=settings.fingerprint
        )
        return cls(Journal.create(disk, created), now_s=now_s)

    @classmethod
    def open(cls, disk: Disk, *, now_s: float) -> Service:
        """Go on with the run whose journal is on a disk."""
        return cls(Journal.open(disk), now_s=now_s)

    def defer_to(self, defer: Defer, *, beside: Beside) -> None:
        """Leave the rounds that close to a host with threads.

        By `beside` an outcome is written while its outer step is taken.
        """
        self.defer, self._committing.beside = defer, beside

    def use_threads(self, threads: int) -> None:
        """Let rounds be reduced and stepped by so many threads at once."""
        self._committing.threads = threads

    def handle(self, call: Call, now_s: float) -> Reply:
        """Return the answer to a call; repeating a call is the same call.

        Raises:
            AtollError: the call is refused, and nothing has changed.
            RunEnded: the round that is asked for will never open.
        """
        require_here(self.state)
        match call:
            case JoinCall(request, key, nonce):
                digest = blake3_digest(key)
                return self._join(Joining(request, digest, nonce), now_s)
            case FoundCall():
                return self._found(call, now_s)
            case KeepCall():
                return self._keep(call)
            case RecoverCall():
                return self._recover(call, now_s)
            case HeartbeatCall(beat):
                return self._beat(beat, now_s)
            case OfferCall(header):
                return self._advance(Offered(header), now_s)
            case PublishCall(frame, beat):
                return self._publish(frame, now_s, beat=beat)
            case AgreedCall():
                return self._agreed(call, now_s)
            case OutcomeCall(beat=beat):
                position = self._beat(beat, now_s) if beat else None
                return self._outcome(call, now_s) or position
            case StateCall(fragment):
                return self.state_frame(fragment)
            case LeaveCall(island, incarnation):
                self._leave(island, incarnation, now_s)
                return None

    @property
    def staged(self) -> Mapping[Key, Frame]:
        """The updates of open rounds, by fragment, round and island."""
        return self._spool

    def tick(self, now_s: float) -> float:
        """Do what time alone makes due, and return when to call again."""
        for pending in self._committing.pending:
            self.commit(pending, now_s)
        if self.defer is None:
            self.compact()
        self._advance(Tick(), now_s)
        retry_s = now_s + RETRY_S if self._committing.is_behind else float("inf")
        return min(wakes_at(self.state, now_s), retry_s)

    def compact(self) -> None:
        """Write states where means have piled up; what fails is tried again.

        May run beside everything else, in a thread of its own.
        """
        self.seal()
        self.damage += self._committing.compact()

    def seal(self) -> None:
        """Have the end of the log in a second place; what fails is tried again."""
        with suppress(DiskError):
            self.journal.seal()

    def change(self, event: Event, now_s: float) -> Reply:
        """Carry out what an operator asks for."""
        return self._advance(event, now_s)

    def _beat(
        self, beat: Beat, now_s: float, *, is_asking: bool = True
    ) -> Position | Reception | None:
        """Take a beat whose holdings are proven; any other is refused."""
        self.state.members.require(beat.island, beat.incarnation)
        proven = self.receipts.proven_beat(beat, self.state.rounds)
        return self._advance(Beaten(proven, is_asking=is_asking), now_s)

    def _join(self, event: Joining, now_s: float) -> JoinReply:
        known, request = self.state.members.known, event.request
        if request.holds:
            who = request.island or ""
            holds = self.receipts.proven(who, request.holds, self.state.rounds)
            event = replace(event, request=replace(request, holds=holds))
        state, actions = advance(self.state, event, now_s)
        welcome = next(each for each in actions if isinstance(each, Welcome))
        member = welcome.member
        before = known.get(member.island)
        self._keep_updates_of(member.island, welcome.spoken_for)
        if before is None or before.incarnation != member.incarnation:
            self.journal.note(record_of(member))
        self.state = state
        self._perform(actions, now_s)
        return reply_to(self.state, welcome)

    def _keep_updates_of(self, island: str, spoken_for: tuple[int, ...]) -> None:
        """Make an earlier life's updates durable: nobody is left to send them again."""
        for fragment in spoken_for:
            number = self.state.rounds[fragment].number
            self._committing.keep(fragment, number, island)

    def _found(self, call: FoundCall, now_s: float) -> Reply:
        if self.state.model is not None and is_same_founding(
            call, self.journal.recorded
        ):
            return self.state.position(now_s)
        founding = self.state.founding_of(call.island, call.incarnation)
        layout = lay_out(founding.model, self.state.settings)
        weights = founding_states(call, layout, self.state.settings)
        outers = tuple(terms_of(each, self.state.settings).outer for each in layout)
        digests = tuple(state.digest for state in weights)
        event = Founded(call.island, call.incarnation, digests, outers)
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
        """Keep what the next commits need free on the disk."""
        needed = reserve_bytes(self._layout, self.state.settings)
        self.journal.room.reserve_bytes = RECORDS_BYTES + needed

    def _keep(self, call: KeepCall) -> Kept:
        """Take a part of a constant from who founds the run."""
        constant = self.awaited_constant(call.island, call.incarnation, call.digest)
        return Kept(self.journal.constants.take(constant, call.first, call.part))

    def awaited_constant(
        self, island: str, incarnation: int, digest: str
    ) -> TensorSpec:
        """Return a constant that a founder may bring.

        What another founder has brought, and this one's model has not, goes.

        Raises:
            FoundingLost: this island does not found the run.
            UsageError: its constants are more than the run keeps.
            Refused: its model has no such constant, or the run keeps none.
        """
        model = self.state.founding_of(island, incarnation).model
        awaited = {each.digest: each for each in to_bring(model, self.state.settings)}
        if digest not in awaited:
            raise Refused(
                f"Nothing with the digest {digest[:12]} is to be brought: the model of "
                f"{island!r} has {len(awaited)} constants for this run."
            )
        self.journal.constants.keep_only(awaited)
        return awaited[digest]

    @property
    def catalogue(self) -> Catalogue:
        """The constants of the run's model, and which of them are here."""
        return Catalogue.of(self.state.model, self.journal.constants.kept)

    def states_bytes(self, island: str, incarnation: int) -> int:
        """Return what the states of all fragments take, for who may bring them.

        Raises:
            FoundingLost, LeaseLost: this island may not.
        """
        layout = self.brought_layout(island, incarnation)
        return states_bytes(layout, self.state.settings)

    def brought_layout(self, island: str, incarnation: int) -> Layout:
        """Return the layout of the states that an island may bring.

        Raises:
            FoundingLost, LeaseLost: it may bring none.
        """
        if self.state.model is None:
            model = self.state.founding_of(island, incarnation).model
            return lay_out(model, self.state.settings)
        self.state.members.require(island, incarnation)
        return self._layout

    def header_bytes(self, fragment: int) -> int:
        """Return what the header of an update may take, at the most."""
        sizes = [each.elements for each in self._layout]
        known = sizes[fragment : fragment + 1]
        return header_bytes(max(known or sizes, default=0))

    def awaits_state(self, header: Header, now_s: float) -> bool:
        """Return whether a state is the one that the run has lost."""
        if header.fragment >= len(self.state.rounds):
            return False
        lost = self.state.lost_state(header.fragment, now_s)
        return lost == Holding(header.round, header.base)

    def _recover(self, call: RecoverCall, now_s: float) -> Reply:
        """Take a state that only islands have; one that is not lost changes nothing."""
        frame = call.state
        header, fragment = frame.header, frame.header.fragment
        require_staying(self.state)
        self.state.members.require(call.island, call.incarnation)
        self.receipts.require_recovery(call, self._open_round(fragment))
        lost = self.state.lost_state(fragment, now_s)
        if lost is None or lost != Holding(header.round, header.base):
            return self.state.position(now_s)
        if self.defer and not self._committing.is_pending(fragment):
            self.settled_round(fragment)
        terms = terms_of(self._layout[fragment], self.state.settings)
        require_state(header, self._layout[fragment], terms, round=lost.round)
        state = verified_state(frame)
        committed = self.journal.recorded.fragments[fragment].round
        outcomes = lost_outcomes(call, committed, lost.round)
        self.journal.recover((header, frame.body), outcomes)
        self.weights[fragment] = state
        self._committing.end(fragment, lost.round)
        rosters = tuple((each.round, each.roster) for each in outcomes if each.roster)
        event = Recovered(fragment, lost, rosters, terms.outer)
        self.recoveries.append((call.island, fragment, lost.round))
        return self._advance(event, now_s)

    def offer(
        self, header: Header, now_s: float, *, beat: Beat | None = None
    ) -> Reception:
        """Return whether an update is wanted, by its header alone."""
        if beat:
            self._beat(beat, now_s, is_asking=False)
        reception = self._advance(Offered(header), now_s)
        assert isinstance(reception, Reception)
        if reception is Reception.STAGED and header.kind is Kind.DEPARTING:
            self._committing.keep(header.fragment, header.round, header.island)
        if reception is Reception.WANTED:
            self._require_place(header)
        return reception

    def _require_place(self, header: Header) -> None:
        """Return if a round has a place for an update, before its body is read.

        Islands the round has waited for since it opened have one. Others share as many
        as the run may have islands: names that come and go cannot fill the disk.

        Raises:
            Unreachable: there is none: ask again, in the next round.
        """
        round = self.state.rounds[header.fragment]
        standing = round.staged if header.round == round.number else round.ahead
        if header.island in standing or header.island in round.candidates:
            return
        others = len(standing.keys() - round.candidates)
        most = self.state.settings.run.most_islands
        if others >= most:
            raise Unreachable(
                f"Round {header.round} of fragment {header.fragment} holds {others} "
                f"updates of islands that joined after it opened, and takes {most} "
                "(run.max_islands). Ask again when it is over."
            )

    def check_of(self, header: Header) -> UpdateCheck:
        """Return what judges the body of an update that is wanted."""
        layout = self._layout[header.fragment]
        return UpdateCheck(
            header,
            layout,
            terms_of(layout, self.state.settings),
            on_refused=lambda reason: self.refusals.append((header, reason)),
        )

    def take(self, frame: Frame, now_s: float) -> Reception:
        """Stage an update whose body is here and judged, if it is wanted still."""
        reception = self.offer(frame.header, now_s)
        return self._stage(frame, now_s) if reception is Reception.WANTED else reception

    def _stage(self, frame: Frame, now_s: float) -> Reception:
        header = frame.header
        if header.kind is Kind.DEPARTING:
            self.journal.stage(header, frame.body)
        self._spool[header.fragment, header.round, header.island] = frame
        reception = self._advance(Stored(header), now_s)
        assert isinstance(reception, Reception)
        return reception

    def _publish(self, frame: Frame, now_s: float, *, beat: Beat | None) -> Reply:
        reception = self.offer(frame.header, now_s, beat=beat)
        if reception is not Reception.WANTED:
            return reception
        verify_body(frame.header, frame.body)
        check = self.check_of(frame.header)
        check.decoded(frame.body, frame.header.elements)
        check.finish()
        return self._stage(frame, now_s)

    def _agreed(self, call: AgreedCall, now_s: float) -> Reply:
        if call.agreed is not None:
            require_sound(call.agreed)
        found = self.gather(call, now_s)
        if isinstance(found, Close):
            self.commit(self.agree(found), now_s)
            found = self.gather(call, now_s)
            assert not isinstance(found, Close)
        return found

    def gather(self, call: AgreedCall, now_s: float) -> Reply | Close:
        """Return what updates come to that their islands reduce, or why they may not.

        What they have agreed on, whose body is sound, closes the round: whoever gets
        a `Close` has it agreed and committed, then asks again.

        Raises:
            Refused: it is not what the round comes to.
            Unreachable: no round closes now: ask again.
        """
        require_here(self.state)
        self.state.members.require(call.island, call.incarnation)
        question = OutcomeCall(call.fragment, call.round, has_body=False)
        over = self._outcome(question, now_s)
        if over is not None:
            is_theirs = call.agreed and call.agreed.header == over.agreed.header
            return over if is_theirs else Reception.COMMITTED
        self.settled_round(call.fragment)
        gathering = self._gathering(call.fragment)
        found = gathering.judge(call, self.state, now_s)
        if not isinstance(found, Closing):
            return found
        assert call.agreed is not None
        self._committing.brought[call.fragment] = call.agreed
        self.state = found.state
        self._perform(found.others, now_s)
        return found.close

    def _gathering(self, fragment: int) -> Gathering:
        layout = self._layout[fragment]
        terms = terms_of(layout, self.state.settings)
        return Gathering(layout, terms, base=self.weights[fragment].digest)

    def agreed_bytes(self, fragment: int) -> int:
        """Return what islands may bring at most of a round that they have reduced."""
        self._open_round(fragment)
        return self._gathering(fragment).most_bytes(len(self.state.members.known))

    def _outcome(self, call: OutcomeCall, now_s: float) -> Outcome | None:
        last = self.state.last_round
        if call.round < self._open_round(call.fragment):
            agreed = self._committing.outcome(
                call.fragment, call.round, has_body=call.has_body
            )
            return self.receipts.with_receipts(agreed, self.state.position(now_s))
        if last is not None and call.round > last:
            raise RunEnded(
                f"Round {call.round} will not open: round {last} was the last."
            )
        return None

    def settled_round(self, fragment: int) -> int:
        """Return the round of a fragment's state, which nobody is changing.

        Raises:
            Unreachable: a round is being committed: ask again.
        """
        self._open_round(fragment)
        if self.state.rounds[fragment].phase is Phase.CLOSING:
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
        """Return what a fragment's outer optimizer is set to now."""
        return terms_of(self._layout[fragment], self.state.settings).outer

    def _open_round(self, fragment: int) -> int:
        if not 0 <= fragment < len(self.state.rounds):
            raise Refused(
                f"Fragment {fragment} does not exist: the run has "
                f"{len(self.state.rounds)}."
            )
        return self.state.rounds[fragment].number

    def _leave(self, island: str, incarnation: int, now_s: float) -> None:
        member = self.state.members.known.get(island)
        if member and member.incarnation == incarnation and member.has_left:
            return
        self._advance(Leave(island, incarnation), now_s)

    def _advance(self, event: Event, now_s: float) -> Position | Reception | None:
        state, actions = advance(self.state, event, now_s)
        for action in actions:
            if isinstance(action, Remember):
                self.journal.note(record_of(action.what))
        self.state = state
        return self._perform(actions, now_s)

    def _perform(
        self, actions: list[Action], now_s: float
    ) -> Position | Reception | None:
        said = None
        for action in actions:
            match action:
                case Say(answer):
                    said = answer
                case Close() if self.defer:
                    self.defer(action)
                case Close():
                    self.commit(self.agree(action), now_s)
                case Remember() | Welcome():
                    pass
        return said

    def agree(self, close: Close) -> Pending:
        """Return the outcome of a closing round, and take its outer step.

        May run beside other calls: nobody else looks at a fragment that is closing.
        """
        layout = self._layout[close.fragment]
        return self._committing.agree(
            close,
            layout,
            terms_of(layout, self.state.settings),
            run=self.state.run,
            after_block=self.after_block,
        )

    def commit(self, pending: Pending, now_s: float) -> None:
        """Make an outcome durable, and open the next round.

        A disk that refuses is tried again: nobody learns of the outcome before.
        """
        try:
            self._committing.commit(pending)
        except DiskError as exc:
            self.failing(str(exc))
            return
        self.failing("")
        fragment, roster = pending.close.fragment, pending.agreed.header.roster
        assert roster is not None
        digest, outer = self.weights[fragment].digest, self.outer_of(fragment)
        self._advance(Committed(fragment, roster, digest, outer), now_s)
