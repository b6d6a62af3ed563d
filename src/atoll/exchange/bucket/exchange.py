"""A run in a bucket, as one island sees and moves it. Implements `Exchange`.

Theory of operation. `publish` puts an update and looks who else has. Whoever finds that
nobody is worth waiting for puts the round's roster; put-if-absent picks one. From then
on the outcome is a function of what is in the bucket, and everybody reads or makes it.
A heartbeat in the background overwrites the island's document, and reads the others'
and what operators have said. All asking is bounded: pauses between two looks grow, so
that a wait costs requests by its logarithm first, and one in some seconds then.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from atoll.errors import (
    AtollError,
    CorruptError,
    FoundingLost,
    LeaseLost,
    NoSuchObject,
    Refused,
    RunEnded,
    RunMoved,
    Unreachable,
)
from atoll.exchange.base import Frame, Outcome
from atoll.exchange.bucket import documents, keys, means
from atoll.exchange.bucket.documents import (
    ControlDocument,
    MemberDocument,
    RosterDocument,
    RunDocument,
    Stand,
    packed,
)
from atoll.exchange.bucket.entering import WATCH_S, Entering
from atoll.exchange.bucket.lookout import Lookout
from atoll.exchange.bucket.outcomes import Outcomes
from atoll.exchange.bucket.pauses import Pauses
from atoll.exchange.bucket.sight import BEAT_S
from atoll.exchange.bucket.states import STATE_ROUNDS, States
from atoll.protocol import (
    Beat,
    Holding,
    JoinReply,
    JoinRequest,
    Position,
    Reception,
    Stats,
)
from atoll.protocol.rounds import Round
from atoll.weights import lay_out, require_state, terms_of
from atoll.wire import Header, Kind, Roster, pack, update_digest, verify_body

_FAREWELL_LOOKS, _FAREWELL_S = 40, 0.05
"""How long a farewell waits for a heartbeat that is under way."""

log = logging.getLogger("atoll")

FRESH_S = 5.0
"""A round is closed by what was seen no longer ago than this."""


class StoreExchange:
    """An `Exchange` for one life of one island."""

    def __init__(
        self,
        lookout: Lookout,
        *,
        key: bytes,
        nonce: bytes,
        beat_s: float = BEAT_S,
        state_rounds: int = STATE_ROUNDS,
    ) -> None:
        self._lookout, self._beat_s = lookout, beat_s
        self._store, self._timing = lookout.store, lookout.timing
        self.stats: Callable[[], Stats] | None = None
        """What people are told of the island, asked for when it is sent."""

        self.moved: Callable[[RunMoved], None] | None = None
        """Told in the background that the run is elsewhere, for who follows it."""

        self._outcomes = Outcomes(lookout, None)
        self._states = States(lookout, self._outcomes, every_rounds=state_rounds)
        self._entering = Entering(lookout, self._states, key=key, nonce=nonce)
        self._nonce = nonce.hex()
        self._request: JoinRequest | None = None
        self._member: MemberDocument | None = None
        self._lost: LeaseLost | None = None
        self._position = Position(step=0, rounds=())
        self._pauses = Pauses()
        self._founding: set[int] = set()
        self._is_beating = False

    def join(self, request: JoinRequest) -> JoinReply:
        was_founded = self._lookout.look_founding()
        if self._member is None:
            self._member = self._entering.enter(request)
            self._outcomes.island = self._member.beat.island
            self._timing.every(self._beat_s, self._beat_quietly)
        self._request = request
        is_founder = self._is_founder(self._member)
        if not is_founder:
            assert self._lookout.founded is not None
            request.model.require_same(self._lookout.founded.model)
            if not was_founded:  # the others have not waited for who waited
                for fragment in range(len(self._lookout.sight.layout)):
                    self._states.begin(fragment)
        return self._reply(self._member, is_founder=is_founder)

    def _is_founder(self, member: MemberDocument) -> bool:
        """Return whether this member is to found the run; wait for another if not."""
        decider = self._lookout.sight.settings.store.decider
        if decider is None:
            return self._entering.is_founder(member)
        while not self._lookout.look_founding():
            if member.beat.island == decider:
                return True
            self._timing.pause(WATCH_S)
        return False

    def _reply(self, member: MemberDocument, *, is_founder: bool) -> JoinReply:
        with self._lookout.lock:
            sight, beat = self._lookout.sight, member.beat
            counted = sight.state.counted.of(beat.island)
            self._position = sight.position(self._timing.now_s())
            opened = self._position.rounds
            return JoinReply(
                run=self._lookout.run,
                island=beat.island,
                incarnation=beat.incarnation,
                slot=member.slot,
                settings=sight.settings,
                epoch=sight.state.epoch,
                position=self._position,
                is_founder=is_founder,
                inner_steps=max([each.inner_steps for each in counted], default=0),
                tokens=max([each.tokens for each in counted], default=0),
                spoken_for=tuple(
                    stand.fragment
                    for stand in member.stands
                    if stand.round == opened[stand.fragment]
                ),
            )

    def heartbeat(self, beat: Beat, *, at_once: bool = False) -> Position:
        if self._lost is not None:
            raise self._lost
        self._note(beat)
        if at_once:
            self._keep_alive()
        if beat.waits_for is not None:
            self._position = self._where()
        return self._position

    def _note(self, beat: Beat) -> None:
        """Take note of where this island is, and of what it holds."""
        with self._lookout.lock:
            member = self._require_member()
            self._member = member = replace(member, beat=beat)
            if beat.waits_for is not None:
                now_s = self._timing.now_s()
                self._lookout.sight.see_member(member, now_s)
            for fragment, held in enumerate(beat.holds):
                self._lookout.sight.see_held(fragment, held)

    def publish(self, frame: Frame) -> Reception:
        match frame.header.kind:
            case Kind.STATE if frame.header.round:
                self._states.write(frame)
            case Kind.STATE:
                self._found(frame)
            case Kind.AGREED:
                pass  # rosters are never lost here
            case _:
                return self._publish(frame)
        return Reception.STAGED

    def _found(self, frame: Frame) -> None:
        """Put a first state; the last one makes this a run, if no other has."""
        header, request = frame.header, self._request
        assert request is not None
        layout = lay_out(request.model, self._lookout.sight.settings)[header.fragment]
        terms = terms_of(layout, self._lookout.sight.settings)
        require_state(header, layout, terms, round=0)
        self._founding.add(header.fragment)
        key = keys.founding(self._nonce, header.fragment)
        self._store.put(key, [pack(header), frame.body.data])
        settings = self._lookout.sight.settings
        if len(self._founding) < len(lay_out(request.model, settings)):
            return
        document = RunDocument(
            run=self._lookout.run,
            fingerprint=settings.fingerprint,
            founding=self._nonce,
            model=request.model,
        )
        self._founding.clear()
        is_first = self._store.put_new(keys.RUN, packed(documents.RUN, document))
        self._lookout.look_founding()
        if not is_first:
            raise FoundingLost(
                "Another island has founded the run. Join again to take its weights."
            )

    def _publish(self, frame: Frame) -> Reception:
        header = frame.header
        member = self._require_member()
        self._require_own(frame)
        verify_body(header, frame.body)
        if self._is_ahead(frame):
            self._lookout.look_round(header.fragment)
        with self._lookout.lock:
            known = self._lookout.sight.reception(header)
        if known is not None:
            return known
        if self._is_ahead(frame):
            raise Refused(
                f"Round {header.round} of fragment {header.fragment} cannot be "
                "published yet: another is open. Wait for its outcome."
            )
        if any(
            (stand.fragment, stand.round) == (header.fragment, header.round)
            for stand in member.stands
        ):
            return Reception.SPOKEN_FOR
        self._put(frame)
        self._settle(header.fragment)
        if header.kind is Kind.DEPARTING:
            # Nobody is left to find out later: a list may not have the roster yet.
            self._lookout.follow(header.fragment)
        with self._lookout.lock:
            return self._lookout.sight.reception(header) or Reception.STAGED

    def _put(self, frame: Frame) -> None:
        """Put an update where there is none; the same one again is the same."""
        header = frame.header
        where = (header.fragment, header.round)
        key = keys.update(*where, header.island, header.incarnation)
        if self._store.put_new(key, [pack(header), frame.body.data]):
            self._lookout.keep(header)
        else:
            self._require_same(key, header)
        self._outcomes.own.setdefault(where, frame)
        self._pauses.begin(header.fragment, self._timing.now_s())
        self._lookout.keep_update(header)

    def _require_same(self, key: str, header: Header) -> None:
        """Return if this very update stands at its key already."""
        try:
            standing, _ = self._lookout.read_update(key, 2**62)
        except CorruptError as exc:
            raise CorruptError(
                f"{key} holds no update, and that of this island cannot be put there: "
                f"{exc} Remove that object, and start the island again."
            ) from exc
        if update_digest(standing) != update_digest(header):
            raise Refused(
                f"Another update of island {header.island!r} stands for round "
                f"{header.round} of fragment {header.fragment}, at {key}. Wait for its "
                "outcome."
            )

    def _is_ahead(self, frame: Frame) -> bool:
        header = frame.header
        with self._lookout.lock:
            open_round = self._lookout.sight.number(header.fragment)
        return header.round > open_round + (header.kind is Kind.DEPARTING)

    def _require_own(self, frame: Frame) -> None:
        header, rounds = frame.header, self._lookout.sight.state.rounds
        if header.run != self._lookout.run:
            raise Refused(
                f"The frame belongs to run {header.run!r}, and this is "
                f"{self._lookout.run!r}. Join this run first."
            )
        if not 0 <= header.fragment < len(rounds):
            raise Refused(
                f"Fragment {header.fragment} does not exist: the run has "
                f"{len(rounds)}. Take the settings from the run."
            )

    def outcome(self, fragment: int, round: int, *, wait_s: float) -> Outcome | None:
        if not self._is_over(fragment, round):
            self._wait(fragment, wait_s)
        if not self._is_over(fragment, round):
            if self._lookout.sight.never_opens(round):
                raise RunEnded(
                    f"Round {round} will not open: the run ended with round "
                    f"{self._lookout.sight.state.last_round}."
                )
            return None
        agreed = self._outcomes.frame(fragment, round)
        self._outcomes.own.pop((fragment, round), None)
        self._position = self._where()
        member = self._member
        is_due = member and self._states.is_due(fragment, member.beat.island)
        lost = (fragment,) if is_due else ()
        return Outcome(agreed, replace(self._position, lost=lost))

    def _is_over(self, fragment: int, round: int) -> bool:
        with self._lookout.lock:
            return round < self._lookout.sight.number(fragment)

    def _wait(self, fragment: int, wait_s: float) -> None:
        """Look at a round if it is time to, or let a little time pass."""
        now_s = self._timing.now_s()
        pause_s = self._pauses.left_s(fragment, now_s) if wait_s else 0.0
        if pause_s > 0.0:
            nap_s = min(pause_s, max(wait_s, 0.5))
            self._timing.pause(nap_s)
            self._pauses.paused(fragment, pause_s - nap_s, self._timing.now_s())
        if pause_s <= max(wait_s, 0.5):
            self._settle(fragment)
            self._pauses.looked(fragment, self._timing.now_s())

    def state(self, fragment: int) -> Frame:
        self._settle(fragment)
        state = self._states.read(fragment)
        with self._lookout.lock:
            outer = self._lookout.sight.terms(fragment).outer
            self._lookout.sight.see_held(fragment, Holding(state.round, state.digest))
        header, body = state.to_frame(
            run=self._lookout.run, fragment=fragment, outer=outer
        )
        return Frame(header, body)

    def leave(self, island: str, incarnation: int) -> None:
        with self._lookout.lock:
            member = self._member
            if member is None or member.has_left:
                return
            gone = replace(
                member,
                beats=member.beats + 1,
                has_left=True,
                beat=replace(member.beat, stats=self.stats() if self.stats else None),
                stands=self._left_behind(member),
            )
            self._member = gone
        for _ in range(_FAREWELL_LOOKS):
            if not self._is_beating:
                break
            self._timing.pause(_FAREWELL_S)  # a heartbeat would undo it
        self._put_member(gone)
        with self._lookout.lock:
            self._lookout.sight.see_member(gone, self._timing.now_s())
        for round in self._lookout.sight.state.rounds:
            if island in round.staged:
                # Whoever is left would close it; if nobody is, it is for us to do.
                self._settle(round.fragment)

    def _left_behind(self, member: MemberDocument) -> tuple[Stand, ...]:
        """Return what stands in open rounds of an island that leaves.

        Whoever closes them looks for it by its key: a list that was made before the
        farewell was seen would not show it.
        """
        incarnation, number = member.beat.incarnation, self._lookout.sight.number
        own = [
            Stand(fragment=fragment, round=round, incarnation=incarnation)
            for fragment, round in list(self._outcomes.own)
        ]
        return tuple(
            each
            for each in [*member.stands, *own]
            if each.round >= number(each.fragment)
        )

    def _settle(self, fragment: int) -> None:
        """Look at the open round of a fragment, and close it if that is due."""
        # What took long was read once: a second look is quick.
        is_fresh = self._look(fragment) or self._look(fragment)
        if not is_fresh or self._due(fragment) is None:
            return
        # A stop or a pause since the last heartbeat: others may heed it already.
        self._lookout.heed_controls()
        if self._prove_base(fragment) and not self._look(fragment):
            return
        document = self._due(fragment)
        if document is not None:
            self._close(document)

    def _prove_base(self, fragment: int) -> bool:
        """If islands start from several states, find out which is the run's."""
        with self._lookout.lock:
            is_disputed = self._lookout.sight.is_disputed(fragment)
        if is_disputed:
            log.warning(
                "islands start round %d of fragment %d from several states; "
                "the run's own is made from its bucket",
                self._lookout.sight.number(fragment),
                fragment,
            )
            state = self._states.read(fragment)
            with self._lookout.lock:
                held = Holding(state.round, state.digest)
                self._lookout.sight.see_proven(fragment, held)
        return is_disputed

    def _due(self, fragment: int) -> RosterDocument | None:
        """Return the roster that this island may put now."""
        member, now_s = self._member, self._timing.now_s()
        if member is None:
            return None
        with self._lookout.lock:
            due = self._lookout.sight.closing(fragment, member.beat.island, now_s)
            return self._roster_document(*due) if due else None

    def _look(self, fragment: int) -> bool:
        """Look at a round and at who is missing; False: what was seen is old by now.

        A request may be repeated for minutes, and a process may stand still: what has
        come to be there meanwhile would be left out.
        """
        begun_s = self._timing.now_s()
        self._lookout.look_round(fragment)
        if self._member is not None:
            self._lookout.look_missing(fragment)
            self._lookout.look_stands(fragment)
        return self._timing.now_s() - begun_s <= FRESH_S

    def _close(self, document: RosterDocument) -> None:
        """Put a roster; whoever was first has closed the round."""
        key = keys.roster(document.fragment, document.round)
        self._store.put_new(key, packed(documents.ROSTER, document))
        self._lookout.follow(document.fragment)
        with self._lookout.lock:
            has_ended = self._lookout.sight.ended_by_tokens() is not None
        if has_ended:
            self._stop(self._lookout.furthest())

    def _roster_document(self, round: Round, roster: Roster) -> RosterDocument:
        sight = self._lookout.sight
        departing = frozenset(
            name
            for name, header in round.staged.items()
            if header.kind is Kind.DEPARTING
        )
        return RosterDocument(
            run=self._lookout.run,
            fragment=round.fragment,
            round=round.number,
            epoch=sight.state.epoch,
            base=round.base,
            outer=round.outer,
            shards=means.owners(roster, departing, sight.terms(round.fragment).merge),
            roster=roster,
        )

    def _stop(self, last_round: int) -> None:
        """Say that the run ends: the first word of it is the one that counts."""
        said = ControlDocument(
            run=self._lookout.run, action="stop", values={}, last_round=last_round
        )
        self._lookout.look_controls()
        if self._lookout.sight.state.last_round is None:
            number = len(self._lookout.sight.controls) + 1
            self._store.put_new(keys.control(number), packed(documents.CONTROL, said))
            self._lookout.look_controls()

    def _beat_quietly(self) -> None:
        """Beat in the background: what fails is met again by who waits for it."""
        try:
            self._keep_alive()
        except LeaseLost as exc:
            self._lost = exc
        except (CorruptError, NoSuchObject, Unreachable) as exc:
            if not (self._member and self._member.has_left):
                log.warning("a heartbeat has failed: %s", exc)
        except AtollError as exc:
            log.error("heartbeats fail: %s", exc)
        except Exception:  # a life that says nothing any more would be given up
            log.exception("heartbeats fail")

    def _keep_alive(self) -> None:
        member = self._member
        if member is None or member.has_left:
            return
        stats = self.stats() if self.stats is not None else member.beat.stats
        with self._lookout.lock:
            member = self._require_member()
            self._member = member = replace(
                member, beats=member.beats + 1, beat=replace(member.beat, stats=stats)
            )
        self._put_beat(member)
        with suppress(NoSuchObject):
            self._lookout.heed_controls()
            self._lookout.look_members()
            if member.beat.waits_for is not None:
                # Whether everybody waits is told by the others' open rounds: if so,
                # nobody moves until somebody is asked to.
                for round in self._lookout.sight.state.rounds:
                    self._lookout.look_round(round.fragment)
        self._require_latest(member)
        self._position = self._where()

    def _put_beat(self, member: MemberDocument) -> None:
        """Put a heartbeat; if the island has left meanwhile, its farewell again."""
        self._is_beating = True
        try:
            self._put_member(member)
            latest = self._member
            if latest is not None and latest.has_left:
                self._put_member(latest)
        finally:
            self._is_beating = False

    def _put_member(self, member: MemberDocument) -> None:
        key = keys.member(member.beat.island, member.beat.incarnation)
        self._store.put(key, packed(documents.MEMBER, member))

    def _require_latest(self, member: MemberDocument) -> None:
        """Raise LeaseLost if a later life has this island's name, or it is evicted."""
        with self._lookout.lock:
            self._lookout.sight.state.members.require(
                member.beat.island, member.beat.incarnation
            )

    def _require_member(self) -> MemberDocument:
        if self._lost is not None:
            raise self._lost
        member = self._member
        assert member is not None
        if member.has_left:
            raise LeaseLost(
                f"Incarnation {member.beat.incarnation} of island "
                f"{member.beat.island!r} has left the run. Join again to go on."
            )
        return member

    def _where(self) -> Position:
        island = self._member.beat.island if self._member else None
        with self._lookout.lock:
            return self._lookout.sight.position(self._timing.now_s(), island=island)
