"""A run in a bucket, for one island. Implements `Exchange`.

An update is put once; then the island polls the open round, with pauses that grow, and
closes it when it is due. A wait of a minute costs about thirty polls, and each minute
after it twenty more: a poll is one request to list a round, and new objects are read
once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from atoll.errors import AtollError, CorruptError, Refused, RunEnded, RunMoved
from atoll.exchange.base import Constants, Frame, Outcome
from atoll.exchange.bucket import keys
from atoll.exchange.bucket.create import BucketFounder
from atoll.exchange.bucket.documents import MemberDocument, Stand
from atoll.exchange.bucket.member import WATCH_S, MemberEntry, MemberLease
from atoll.exchange.bucket.outcomes import Outcomes
from atoll.exchange.bucket.reader import BucketReader
from atoll.exchange.bucket.round_closer import RoundCloser
from atoll.exchange.bucket.states import STATE_ROUNDS, States
from atoll.exchange.bucket.view import BEAT_S
from atoll.protocol import (
    Heartbeat,
    HeldRound,
    JoinReply,
    JoinRequest,
    ModelSpec,
    Position,
    Reception,
    Stats,
)
from atoll.store import RetryPolicy
from atoll.wire import FrameKind, Header, pack, update_digest, verify_body

log = logging.getLogger("atoll")


class StoreExchange:
    """An `Exchange` for one life of one island."""

    def __init__(
        self,
        lookout: BucketReader,
        *,
        key: bytes,
        nonce: bytes,
        beat_s: float = BEAT_S,
        state_rounds: int = STATE_ROUNDS,
    ) -> None:
        self._lookout, self._beat_s = lookout, beat_s
        self._store, self._timing = lookout.store, lookout.timing
        self._outcomes = Outcomes(lookout, None)
        self._states = States(lookout, self._outcomes, every_rounds=state_rounds)
        self._living = MemberLease(lookout)
        self._living.wants = self._outcomes.wants
        self._closing = RoundCloser(lookout, self._states)
        self._entering = MemberEntry(lookout, self._states, key=key, nonce=nonce)
        self._request: JoinRequest | None = None
        self._pauses = PollBackoff()
        self._founder = BucketFounder(lookout, nonce.hex())
        self._publishing = UpdatePublisher(
            self._living, self._closing, self._outcomes, self._pauses
        )

    @property
    def stats(self) -> Callable[[], Stats] | None:
        """What people are told of the island, asked for when it is sent."""
        return self._living.stats

    @stats.setter
    def stats(self, told: Callable[[], Stats] | None) -> None:
        self._living.stats = told

    @property
    def moved(self) -> Callable[[RunMoved], None] | None:
        """Told in the background that the run is elsewhere, for who follows it."""
        return self._living.moved

    @moved.setter
    def moved(self, told: Callable[[RunMoved], None] | None) -> None:
        self._living.moved = told

    def join(self, request: JoinRequest) -> JoinReply:
        self._lookout.require_staying()
        was_founded = self._lookout.look_founding()
        member = self._living.member
        if member is None:
            self._living.member = member = self._entering.enter(request)
            self._outcomes.island = self._closing.island = member.beat.island
            self._timing.every(self._beat_s, self._living.beat_quietly)
            self._timing.every(self._beat_s, self._repair_quietly)
            # Who takes the run elsewhere may have read who is here before this.
            self._lookout.require_staying()
        self._request = request
        is_founder = self._is_founder(member)
        if not is_founder:
            assert self._lookout.founded is not None
            request.model.require_same(self._lookout.founded.model)
            if not was_founded:  # the others have not waited for who waited
                for fragment in range(len(self._lookout.sight.layout)):
                    self._states.begin(fragment)
        return self._reply(member, is_founder=is_founder)

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
            position = sight.position(self._timing.now_s())
            if self._request is None or self._request.incarnation is None:
                # As the run was before it: who makes up `start_islands` begins it.
                position = replace(position, step=beat.step)
            self._living.position = position
            return JoinReply(
                run=self._lookout.run,
                island=beat.island,
                incarnation=beat.incarnation,
                slot=member.slot,
                settings=sight.settings,
                epoch=sight.state.epoch,
                position=position,
                is_founder=is_founder,
                inner_steps=max([each.inner_steps for each in counted], default=0),
                tokens=max([each.tokens for each in counted], default=0),
                spoken_for=tuple(
                    stand.fragment
                    for stand in member.stands
                    if stand.round == position.rounds[stand.fragment]
                ),
                counted=sight.state.counted.by_fragment(
                    beat.island, len(position.rounds)
                ),
            )

    def heartbeat(self, beat: Heartbeat, *, at_once: bool = False) -> Position:
        self._lookout.require_here()
        self._living.note(beat)
        if at_once:
            self._living.beat()
        return self._living.look() if beat.waits_for else self._living.position

    def keep(self, joined: JoinReply, model: ModelSpec, constants: Constants) -> None:
        """Put the founder's constants. Implements `Keeper`."""
        self._lookout.require_here()
        self._founder.keep(model, constants)

    def publish(self, frame: Frame) -> Reception:
        self._lookout.require_here()
        match frame.header.kind:
            case FrameKind.STATE if frame.header.round:
                self._states.write(frame)
            case FrameKind.STATE:
                self._founder.bring(frame, self._request)
            case FrameKind.AGREED:
                pass  # rosters are never lost here
            case _:
                return self._publishing.publish(frame)
        return Reception.STAGED

    def outcome(self, fragment: int, round: int, *, wait_s: float) -> Outcome | None:
        if not self._is_over(fragment, round):
            self._wait(fragment, wait_s)
        if not self._is_over(fragment, round):
            self._lookout.require_here()
            if self._lookout.sight.never_opens(round):
                raise RunEnded(
                    f"Round {round} will not open: the run ended with round "
                    f"{self._lookout.sight.state.last_round}."
                )
            return None
        agreed = self._outcomes.frame(fragment, round)
        self._outcomes.own.pop((fragment, round), None)
        island, position = self._living.island, self._living.look()
        is_due = island is not None and self._is_state_due(fragment, island)
        return Outcome(agreed, replace(position, lost=(fragment,) if is_due else ()))

    def _is_state_due(self, fragment: int, island: str) -> bool:
        """Return whether this island is to write a state now."""
        if fragment in self._outcomes.states_wanted:
            self._outcomes.states_wanted.discard(fragment)
            return True
        return self._states.is_due(fragment, island)

    def _repair_quietly(self) -> None:
        """Put again in the background what others cannot verify."""
        try:
            self._outcomes.repair()
        except AtollError as exc:
            log.warning("a copy of a damaged update was not put: %s", exc)

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
            self._closing.settle(fragment)
            self._pauses.looked(fragment, self._timing.now_s())

    def state(self, fragment: int) -> Frame:
        self._closing.settle(fragment)
        self._lookout.require_here()
        state = self._states.read(fragment)
        with self._lookout.lock:
            outer = self._lookout.sight.terms(fragment).outer
            self._lookout.known_bases.see_held(
                fragment, HeldRound(state.round, state.digest)
            )
        header, body = state.to_frame(
            run=self._lookout.run, fragment=fragment, outer=outer
        )
        return Frame(header, body)

    def leave(self, island: str, incarnation: int) -> None:
        if self._living.member is None or self._living.member.has_left:
            return
        self._lookout.require_staying()
        if not self._living.leave(self._left_behind):
            return
        # A move that began meanwhile may have found neither the farewell nor what was
        # left: then it is for this island to bring it along.
        self._lookout.require_staying()
        for round in self._lookout.sight.state.rounds:
            if island in round.staged:
                # Whoever is left would close it; if nobody is, it is for us to do.
                self._closing.settle(round.fragment)

    def _left_behind(self, member: MemberDocument) -> tuple[Stand, ...]:
        """Return what stands in open rounds of an island that leaves.

        Whoever closes them looks for it by its key: a list that was made before the
        farewell was seen would not show it. A round may have closed since it took what
        departs: whether it lists that, others find out.
        """
        incarnation, number = member.beat.incarnation, self._lookout.sight.number
        stands = [each for each in member.stands if each.round >= number(each.fragment)]
        own = [
            Stand(fragment=fragment, round=round, incarnation=incarnation)
            for fragment, round in list(self._outcomes.own)
            if round >= number(fragment)
            or (fragment, round) in self._publishing.departed
        ]
        return (*stands, *own)


class UpdatePublisher:
    """Puts the updates of one life of an island."""

    def __init__(
        self,
        living: MemberLease,
        closing: RoundCloser,
        outcomes: Outcomes,
        pauses: PollBackoff,
    ) -> None:
        self._living, self._closing = living, closing
        self._outcomes, self._pauses = outcomes, pauses
        self._lookout = living.lookout
        self._store, self._timing = living.lookout.store, living.lookout.timing
        self.departed: set[tuple[int, int]] = set()
        """Where this life was promised that what it leaves will count."""

    def publish(self, frame: Frame) -> Reception:
        """Make an update known to the run, and look who else has published.

        Raises:
            Refused: another one stands, or its round cannot be open yet.
            CorruptError: the body does not verify.
            LeaseLost: a later life has the name.
            RunMoved: it departs, and the run is elsewhere.
        """
        header = frame.header
        member = self._living.require()
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
        self.put(frame)
        self._closing.settle(header.fragment)
        if header.kind is FrameKind.DEPARTING:
            # Nobody is left to find out later: a list may not have the roster yet.
            self._lookout.follow(header.fragment)
            self._require_taken(header.fragment)
        with self._lookout.lock:
            known = self._lookout.sight.reception(header)
        if header.kind is FrameKind.DEPARTING and known is None:
            self.departed.add((header.fragment, header.round))
        return known or Reception.STAGED

    def _require_taken(self, fragment: int) -> None:
        """Return if what was put stays here: who goes elsewhere may have left it out.

        Raises:
            RunMoved: the run is elsewhere, and the update is to be published there.
        """
        if self._lookout.sight.state.move is not None:
            self._lookout.require_staying()
            self._lookout.follow(fragment)

    def put(self, frame: Frame) -> None:
        """Put an update where there is none; the same one again is the same."""
        header = frame.header
        where = (header.fragment, header.round)
        key = keys.update(*where, header.island, header.incarnation)
        if not self._store.put_new(key, [pack(header), frame.body.data]):
            self._require_same(key, header)
        self._outcomes.own.setdefault(where, frame)
        self._pauses.begin(header.fragment, self._timing.now_s())
        self._lookout.updates.keep(header)

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
        return header.round > open_round + (header.kind is FrameKind.DEPARTING)

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


FIRST_S, GROWTH, LONGEST_S = 0.05, 1.4, 3.0

TRIES = RetryPolicy(max_tries=40)
"""How often an island asks a store that does not answer: for some five minutes.

What it had under way is not lost meanwhile, and the others fare alike.
"""


class PollBackoff:
    """The pauses between the looks at each fragment's open round."""

    def __init__(self) -> None:
        self._next: dict[int, tuple[float, float]] = {}
        """When to look next, and the pause after that."""

    def begin(self, fragment: int, now_s: float) -> None:
        """Start over: this island has published, and others soon will have."""
        self._next[fragment] = (now_s + FIRST_S, FIRST_S * GROWTH)

    def left_s(self, fragment: int, now_s: float) -> float:
        """Return how long it is until the next look."""
        due_s, _ = self._next.get(fragment, (now_s, FIRST_S))
        return max(0.0, due_s - now_s)

    def paused(self, fragment: int, left_s: float, now_s: float) -> None:
        """Take note of what is left after a pause, though the clock may have stood."""
        due_s, pause_s = self._next.get(fragment, (now_s, FIRST_S))
        self._next[fragment] = (min(due_s, now_s + left_s), pause_s)

    def looked(self, fragment: int, now_s: float) -> None:
        """Take note of a look: the next one is further away."""
        _, pause_s = self._next.get(fragment, (now_s, FIRST_S))
        longer_s = min(pause_s * GROWTH, LONGEST_S)
        self._next[fragment] = (now_s + pause_s, longer_s)
