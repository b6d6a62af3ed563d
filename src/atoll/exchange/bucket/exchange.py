"""A run in a bucket, for one island. Implements `Exchange`.

An update is put once; then the island polls the open round, with pauses that grow, and
closes it when it is due, by a roster that is put once. A wait of a minute costs about
thirty polls, and each later minute twenty more: a poll is one request to list a round,
and new objects are read once.

Rule 1: any island that has published for a round may close it; the conditional put of
        the roster decides between several. Only such an island knows the base of the
        round, and its own work is in the roster. With `store.decider`, only the island
        of that name may.
Rule 2: a decision uses objects that were read within the last seconds; an island that
        stood still reads again.
Rule 3: controls of operators are read before a round is closed.
Rule 4: if islands start from several states, the run's own is computed from the bucket.

In an asynchronous run an update counts in the round that is open when it is read:
Rule 5: a poll is two requests: a get of the open round's roster, and a list of the
        fragment's updates.
Rule 6: a round stays open for a grace from its first update, by the clock of the
        island that closes it.
Rule 7: an island that returns waits until rosters list the updates of its earlier
        incarnations: two of them never have updates that stand at the same time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from atoll import protocol, wire
from atoll.data import Ask, Claim, DataSpec
from atoll.errors import AtollError, CorruptError, RunMoved
from atoll.exchange.base import Constants, Frame, Outcome
from atoll.exchange.bucket import documents, keys, means
from atoll.exchange.bucket.create import BucketFounder
from atoll.exchange.bucket.dealer import StoreDealer
from atoll.exchange.bucket.member import WATCH_S, LateUpdates, MemberEntry, MemberLease
from atoll.exchange.bucket.outcomes import Outcomes
from atoll.exchange.bucket.own_past import OwnPastWriter
from atoll.exchange.bucket.reader import BucketReader
from atoll.exchange.bucket.states import STATE_ROUNDS, States
from atoll.exchange.bucket.view import BEAT_S
from atoll.protocol import rows
from atoll.protocol.coordinator import buffer_of
from atoll.protocol.events import Welcome
from atoll.protocol.join_leave import reply_to
from atoll.protocol.rounds import Round, another_stands
from atoll.weights.reduce import with_share

log = logging.getLogger("atoll")


class StoreExchange:
    """An `Exchange` for one incarnation of one island.

    With `unix_s`, which returns the Unix time, it puts the island's past.
    """

    def __init__(
        self,
        reader: BucketReader,
        *,
        key: bytes,
        nonce: bytes,
        beat_s: float = BEAT_S,
        state_rounds: int = STATE_ROUNDS,
        unix_s: Callable[[], float] | None = None,
    ) -> None:
        self._reader, self._beat_s = reader, beat_s
        reader.stops_for_moves = True
        self._store, self._runtime = reader.store, reader.runtime
        self._outcomes = Outcomes(reader, None)
        self._states = States(reader, self._outcomes, every_rounds=state_rounds)
        self._lease = MemberLease(reader)
        self._lease.wants = self._outcomes.wants
        if unix_s is not None:
            self._lease.past = OwnPastWriter(self._store, unix_s)
        self._closer = RoundCloser(reader, self._states)
        self._entry = MemberEntry(reader, self._states, key=key, nonce=nonce)
        self._dealer = StoreDealer(
            self._lease,
            close_all=self._closer.close_all,
            end_with_data=self._closer.end_with_data,
        )
        self._request: protocol.JoinRequest | None = None
        self._backoff = PollBackoff()
        self._founder = BucketFounder(reader, nonce.hex())
        self._publisher = UpdatePublisher(
            self._lease, self._closer, self._outcomes, self._backoff
        )

    @property
    def stats(self) -> Callable[[], protocol.Stats] | None:
        """Returns the island's statistics for users; called for each heartbeat."""
        return self._lease.stats

    @stats.setter
    def stats(self, stats: Callable[[], protocol.Stats] | None) -> None:
        self._lease.stats = stats

    @property
    def unconfirmed(self) -> dict[tuple[int, int], Frame]:
        """The island's updates without an outcome, by fragment and round."""
        return self._outcomes.own_updates

    @property
    def moved(self) -> Callable[[RunMoved], None] | None:
        """Called in the background when the run is found to be elsewhere."""
        return self._lease.moved

    @moved.setter
    def moved(self, moved: Callable[[RunMoved], None] | None) -> None:
        self._lease.moved = moved

    def join(self, request: protocol.JoinRequest) -> protocol.JoinReply:
        self._reader.wait_while_moving()
        was_founded = self._reader.read_founding()
        member = self._lease.member
        if member is None:
            self._lease.member = member = self._entry.enter(request)
            self._outcomes.island = self._closer.island = member.beat.island
            self._runtime.every(self._beat_s, self._lease.beat_in_background)
            self._runtime.every(self._beat_s, self._repair_in_background)
            # A move that began meanwhile may have read the members before this one.
            self._reader.wait_while_moving()
            if self._reader.view.is_async:
                EarlierUpdates(self._lease, self._states, self._closer).wait()
                member = self._lease.require()
        self._request = request
        is_founder = self._is_founder(member)
        if not is_founder:
            assert self._reader.founded is not None
            request.model.require_same(self._reader.founded.model)
            if not was_founded:  # the others may have closed rounds since
                for fragment in range(len(self._reader.view.layout)):
                    self._states.begin(fragment)
            self._dealer.enter(member)
        return self._reply(member, is_founder=is_founder)

    def _is_founder(self, member: documents.MemberDocument) -> bool:
        """Return whether this member is to found the run; wait for another if not."""
        decider = self._reader.view.settings.store.decider
        if decider is None:
            return self._entry.is_founder(member)
        while not self._reader.read_founding():
            if member.beat.island == decider:
                return True
            self._runtime.sleep(WATCH_S)
        return False

    def _reply(
        self, member: documents.MemberDocument, *, is_founder: bool
    ) -> protocol.JoinReply:
        held_rows = self._dealer.held_rows(member)
        with self._reader.lock:
            view, beat = self._reader.view, member.beat
            position = view.position(self._runtime.now_s())
            if self._request is None or self._request.incarnation is None:
                # The step before this join, which may itself start the run by
                # reaching `start_islands`.
                position = replace(position, step=beat.step)
            self._lease.position = position
            spoken_for = tuple(
                update.fragment
                for update in member.stands
                if update.round == position.rounds[update.fragment]
                and not view.is_async
            )
            member_seen = view.state.members.require_life(beat.island, beat.incarnation)
            welcome = Welcome(member_seen, position, is_founder, spoken_for)
            return replace(reply_to(view.state, welcome), held_rows=held_rows)

    def heartbeat(
        self, beat: protocol.Heartbeat, *, at_once: bool = False
    ) -> protocol.Position:
        self._lease.note(beat)
        if at_once:
            self._lease.beat()
        return self._lease.update_position() if beat.waits_for else self._lease.position

    def keep(
        self,
        joined: protocol.JoinReply,
        model: protocol.ModelSpec,
        constants: Constants,
    ) -> None:
        """Put the founder's constants. Implements `ConstantsUploader`."""
        self._founder.keep(model, constants)

    def publish(self, frame: Frame) -> protocol.Reception:
        match frame.header.kind:
            case wire.FrameKind.STATE if frame.header.round:
                self._outcomes.states_wanted.discard(frame.header.fragment)
                self._states.write(frame)
            case wire.FrameKind.STATE:
                self._founder.put_state(frame, self._request)
            case wire.FrameKind.AGREED:
                pass  # rosters are never lost here
            case _:
                return self._publisher.publish(frame)
        return protocol.Reception.STAGED

    def outcome(
        self, fragment: int, round: int, *, wait_s: float, has_body: bool = True
    ) -> Outcome | None:
        if not self._is_over(fragment, round):
            self._wait(fragment, wait_s)
        if not self._is_over(fragment, round):
            self._reader.require_here()
            self._reader.view.state.require_opens(round, fragment=fragment)
            return None
        agreed = self._outcomes.frame(fragment, round)
        self._outcomes.confirm(agreed.header)
        island, position = self._lease.island, self._lease.update_position()
        is_due = island is not None and self._is_state_due(fragment, island)
        position = replace(position, lost=(fragment,) if is_due else ())
        return Outcome(agreed, position, is_made_of_updates=True)

    def _is_state_due(self, fragment: int, island: str) -> bool:
        """Return whether this island is to write a state now."""
        is_wanted = fragment in self._outcomes.states_wanted
        return is_wanted or self._states.is_due(fragment, island)

    def _repair_in_background(self) -> None:
        """Put copies that other islands ask for, and log a failure."""
        try:
            self._outcomes.repair()
        except AtollError as exc:
            log.warning("a copy of a damaged update was not put: %s", exc)

    def _is_over(self, fragment: int, round: int) -> bool:
        with self._reader.lock:
            return round < self._reader.view.number(fragment)

    def _wait(self, fragment: int, wait_s: float) -> None:
        """Poll a round if its pause is over; otherwise wait, at most `wait_s`."""
        now_s = self._runtime.now_s()
        pause_s = self._backoff.remaining_s(fragment, now_s) if wait_s else 0.0
        if pause_s > 0.0:
            nap_s = min(pause_s, max(wait_s, 0.5))
            self._runtime.sleep(nap_s)
            self._backoff.paused(fragment, pause_s - nap_s, self._runtime.now_s())
        if pause_s <= max(wait_s, 0.5):
            self._closer.close_if_due(fragment)
            self._backoff.polled(fragment, self._runtime.now_s())

    def state(self, fragment: int) -> Frame:
        self._closer.close_if_due(fragment)
        self._reader.require_here()
        state = self._states.read(fragment)
        with self._reader.lock:
            outer = self._reader.view.terms(fragment).outer
            base = protocol.HeldRound(state.round, state.digest)
            self._reader.base_view.note_held(fragment, base, self._runtime.now_s())
        header, body = state.to_frame(
            run=self._reader.run, fragment=fragment, outer=outer
        )
        return Frame(header, body)

    def leave(self, island: str, incarnation: int) -> None:
        if self._lease.member is None or self._lease.member.has_left:
            return
        self._reader.wait_while_moving()
        if not self._lease.leave(self._standing):
            return
        # A move that began meanwhile may have found neither the farewell nor the last
        # update: then this island brings that update along.
        self._reader.wait_while_moving()
        for round in self._reader.view.state.rounds:
            if island in round.staged:
                # The remaining islands would close it; there may be none.
                self._closer.close_if_due(round.fragment)
        if self._reader.rows is not None:
            self._close_last_rounds()
            self._closer.end_with_data()

    def _close_last_rounds(self) -> None:
        """Close the rounds that no other island will close, after their grace.

        The rows of the last islands would stay in updates that no roster lists.
        """
        view, now_s = self._reader.view, self._runtime.now_s()
        members, settings = view.state.members, view.settings
        graces_s = [round.grace_s(members, settings) for round in view.state.rounds]
        until_s = now_s + FRESH_S + (max(graces_s) if view.is_async else 0.0)
        while self._runtime.now_s() <= until_s:
            with self._reader.lock:
                has_others = bool(view.live(self._runtime.now_s()))
                stands = any(round.staged for round in view.state.rounds)
            if has_others or not stands:
                return
            self._closer.close_all()
            self._runtime.sleep(FIRST_S)

    def open_data(self, island: str, incarnation: int, data: DataSpec) -> DataSpec:
        """Describe an island's data to the run. Implements `Dealer`."""
        return self._dealer.open_data(island, incarnation, data)

    def claim(self, ask: Ask) -> Claim:
        """Return rows of the run that now belong to the island."""
        return self._dealer.claim(ask)

    def _standing(
        self, member: documents.MemberDocument
    ) -> tuple[documents.StandingUpdate, ...]:
        """Return the updates that a leaving island has in open rounds.

        The closing island reads them by their keys: a list that was made before the
        farewell was read would not show them. A round may have closed since the
        departing update was put: other islands find out whether its roster lists it.
        """
        earlier = [
            update
            for update in member.stands
            if self._may_count(member, update.fragment, update.round)
        ]
        own_updates = [
            documents.StandingUpdate(
                fragment=fragment, round=round, incarnation=member.beat.incarnation
            )
            for fragment, round in list(self._outcomes.own_updates)
            if self._may_count(member, fragment, round)
            or (fragment, round) in self._publisher.departed
        ]
        return (*earlier, *own_updates)

    def _may_count(
        self, member: documents.MemberDocument, fragment: int, round: int
    ) -> bool:
        """Return whether a round that was not read yet may list an update."""
        view, beat = self._reader.view, member.beat
        if view.is_async:
            update = keys.UpdateKey.of(round, beat.island, beat.incarnation)
            return not view.is_over(fragment, beat.island, update)
        return round >= view.number(fragment)


class UpdatePublisher:
    """Puts the updates of one incarnation of an island."""

    def __init__(
        self,
        lease: MemberLease,
        closer: RoundCloser,
        outcomes: Outcomes,
        backoff: PollBackoff,
    ) -> None:
        self._lease, self._closer = lease, closer
        self._outcomes, self._backoff = outcomes, backoff
        self._reader = lease.reader
        self._store, self._runtime = lease.reader.store, lease.reader.runtime
        self.departed: set[tuple[int, int]] = set()
        """Fragments and rounds whose departing update will count, as was promised."""

    def publish(self, frame: Frame) -> protocol.Reception:
        """Put an update, and close its round if that is due.

        Raises:
            Refused: another update was published, or its round cannot be open yet.
            CorruptError: the body does not verify.
            LeaseLost: a later incarnation has the name.
            RunMoved: the update departs, and the run is elsewhere.
        """
        header = frame.header
        is_departing = header.kind is wire.FrameKind.DEPARTING
        member = self._lease.require()
        self._reader.view.state.round_of(header)
        wire.verify_body(header, frame.body)
        if header.round > self._reader.view.number(header.fragment) + is_departing:
            self._reader.read_round(header.fragment)
        reception = self._reception(header)
        if reception not in (protocol.Reception.WANTED, protocol.Reception.STAGED):
            return reception
        if not self._reader.view.is_async and any(
            (update.fragment, update.round) == (header.fragment, header.round)
            for update in member.stands
        ):
            return protocol.Reception.OTHER_STAGED
        self.put(frame)
        self._closer.close_if_due(header.fragment)
        if is_departing:
            # No later call finds out: a list may not show the roster yet, and a move
            # that began before the put may have missed this update.
            self._reader.wait_while_moving()
            self._reader.read_rosters(header.fragment)
        if self._reception(header) is protocol.Reception.COMMITTED:
            return protocol.Reception.COMMITTED
        if is_departing:
            self.departed.add((header.fragment, header.round))
        return protocol.Reception.STAGED

    def _reception(self, header: wire.Header) -> protocol.Reception:
        with self._reader.lock:
            return self._reader.view.reception(header)

    def put(self, frame: Frame) -> None:
        """Put an update at its key. Safe to repeat with the same update."""
        header = frame.header
        fragment, round = header.fragment, header.round
        update = keys.UpdateKey.of(round, header.island, header.incarnation)
        key = self._reader.view.key_of(fragment, update)
        if not self._store.put_new(key, [wire.pack(header), frame.body.data]):
            self._require_same(key, header)
        self._outcomes.own_updates.setdefault((fragment, round), frame)
        self._backoff.begin(fragment, self._runtime.now_s())
        self._reader.updates.add(header)

    def _require_same(self, key: str, header: wire.Header) -> None:
        """Return if the object at the key is this update."""
        try:
            existing, _ = self._reader.updates.read(key, 2**62)
        except CorruptError as exc:
            raise CorruptError(
                f"{key} holds no update, and that of this island cannot be put there: "
                f"{exc} Remove that object, and start the island again."
            ) from exc
        if wire.update_digest(existing) != wire.update_digest(header):
            raise another_stands(header, suffix=f", at {key}")


class EarlierUpdates:
    """Waits until no update of an island's earlier incarnations stands."""

    def __init__(self, lease: MemberLease, states: States, closer: RoundCloser) -> None:
        self._lease, self._states, self._closer = lease, states, closer
        self._reader, self._runtime = lease.reader, lease.reader.runtime

    def wait(self) -> None:
        """Return when rosters list them, or can no longer list them.

        Other islands close the rounds, or this one does, if there are none.

        Raises:
            LeaseLost: a later incarnation has the name.
        """
        pause_s = FIRST_S
        while standing := self._standing():
            for fragment in sorted({update.fragment for update in standing}):
                self._closer.close_if_due(fragment)
                self._states.take_base(fragment)
            self._runtime.sleep(pause_s)
            pause_s = min(pause_s * GROWTH, LONGEST_S)
            self._note_waiting(standing[0].fragment)
        self._lease.note(replace(self._lease.require().beat, waits_for=None))

    def _standing(self) -> list[documents.StandingUpdate]:
        view, member = self._reader.view, self._lease.require()
        with self._reader.lock:
            return [
                update
                for update in member.stands
                if not view.state.never_opens(
                    view.number(update.fragment), fragment=update.fragment
                )
                and not view.is_over(
                    update.fragment,
                    member.beat.island,
                    keys.UpdateKey.of(
                        update.round, member.beat.island, update.incarnation
                    ),
                )
            ]

    def _note_waiting(self, fragment: int) -> None:
        """Show other islands that this one waits: if all do, the run is stuck."""
        waits_for = (fragment, self._reader.view.number(fragment))
        self._lease.note(replace(self._lease.require().beat, waits_for=waits_for))


FRESH_S = 5.0
"""A round is closed only by objects that were read no longer ago than this."""


class RoundCloser:
    """Reads open rounds, and closes those that are due, as one island."""

    def __init__(self, reader: BucketReader, states: States) -> None:
        self._reader, self._states = reader, states
        self._store, self._runtime = reader.store, reader.runtime
        self._late_updates = LateUpdates(reader)
        self.island: str | None = None
        """Name of the closing island; None for read-only observers."""

    def close_if_due(self, fragment: int, *, has_work: bool = True) -> None:
        """Read the open round of a fragment, and close it if that is due.

        With `has_work` False also one that this island has not published for.
        """
        # A slow first read has cached the objects: the second one is quick.
        is_fresh = self._read(fragment) or self._read(fragment)
        if not is_fresh or self._due(fragment, has_work=has_work) is None:
            return
        read_s = self._runtime.now_s()
        # A stop or a pause since the last heartbeat: others may have applied it.
        self._reader.poll_controls()
        ledger = self._reader.rows
        if ledger is not None:
            ledger.read()  # the judge knows which island holds which rows
        is_old = self._runtime.now_s() - read_s > FRESH_S
        if self._prove_base(fragment) or is_old:
            if not self._read(fragment):
                return
            if ledger is not None:
                ledger.read()  # never older than the updates that it judges
        document = self._due(fragment, has_work=has_work)
        if ledger is not None and not ledger.is_current(fragment):
            return
        if document is not None:
            self._close(document)

    def close_all(self) -> None:
        """Close the rounds that are due, as an island that waits for rows.

        Rows of islands that have left are free when no update of them stands.
        """
        for fragment in range(len(self._reader.view.layout)):
            self._states.take_base(fragment)
            self.close_if_due(fragment, has_work=False)

    def end_with_data(self) -> None:
        """End the run if its data is over, and nothing else ends it."""
        if self._reader.rows is not None:
            self._reader.rows.read()
        self._end_if_data_is_over()

    def _end_if_data_is_over(self) -> None:
        if self._reader.rows is None:
            return
        with self._reader.lock:
            state, now_s = self._reader.view.state, self._runtime.now_s()
            is_over = state.last_round is None and rows.is_over(state, now_s)
        if is_over and self._reader.view.is_async:
            self._end_each()
        elif is_over:
            self._stop(self._reader.furthest_round())

    def _prove_base(self, fragment: int) -> bool:
        """Compute the run's own base, if islands start from several states."""
        with self._reader.lock:
            is_disputed = self._reader.base_view.is_disputed(fragment)
        if is_disputed:
            log.warning(
                "islands start round %d of fragment %d from several states; "
                "the run's own is made from its bucket",
                self._reader.view.number(fragment),
                fragment,
            )
            state = self._states.read(fragment)
            with self._reader.lock:
                base = protocol.HeldRound(state.round, state.digest)
                now_s = self._runtime.now_s()
                self._reader.base_view.note_proven(fragment, base, now_s)
        return is_disputed

    def _due(
        self, fragment: int, *, has_work: bool = True
    ) -> documents.RosterDocument | None:
        """Return the roster that this island may put now."""
        if self.island is None:
            return None
        with self._reader.lock:
            if self._late_updates.unseen(fragment):
                return None  # a farewell was read since: the next read republishes
            now_s = self._runtime.now_s()
            due = self._reader.update_view.closable(
                fragment, self.island, now_s, has_work=has_work
            )
            return roster_document(self._reader, *due, now_s) if due else None

    def _read(self, fragment: int) -> bool:
        """Read a round and its missing islands; False: the result is old by now.

        A request may be repeated for minutes, and a process may stand still: an update
        that was put meanwhile would be left out of the roster.
        """
        begun_s = self._runtime.now_s()
        self._reader.read_round(fragment)
        if self.island is not None:
            self._reader.members.read_missing(fragment)
            self._reader.read_standing(fragment)
            self._late_updates.republish(fragment)
        return self._runtime.now_s() - begun_s <= FRESH_S

    def _close(self, document: documents.RosterDocument) -> None:
        """Put a roster; the first one that is put closes the round."""
        put_roster(self._reader, document)
        with self._reader.lock:
            is_to_end = self._reader.update_view.is_to_end()
            has_ended = self._reader.update_view.ended_by_tokens() is not None
        if is_to_end:
            self._end_each()
        elif has_ended and not self._reader.view.is_async:
            self._stop(self._reader.furthest_round())
        else:
            self._end_if_data_is_over()

    def _stop(self, last_round: int) -> None:
        """Put the control that ends the run, unless it ends as early already."""
        control = documents.ControlDocument(
            run=self._reader.run, action="stop", values={}, last_round=last_round
        )
        self._reader.read_controls()
        current = self._reader.view.state.last_round
        if current is None or last_round < current:
            self._put_control(control)

    def _end_each(self) -> None:
        """Put the control that makes the open round of each fragment its last."""
        last_rounds = self._reader.last_rounds()
        control = documents.ControlDocument(
            run=self._reader.run, action="stop", values={}, last_rounds=last_rounds
        )
        self._reader.read_controls()
        if self._reader.view.state.last_rounds is None:
            self._put_control(control)

    def _put_control(self, control: documents.ControlDocument) -> None:
        """Put the next control, unless another one is put first."""
        key = keys.control(len(self._reader.view.controls) + 1)
        self._store.put_new(key, documents.packed(documents.CONTROL, control, key))
        self._reader.read_controls()


def roster_document(
    reader: BucketReader, round: Round, roster: wire.Roster, now_s: float
) -> documents.RosterDocument:
    """Return the document that closes an open round with a roster."""
    view = reader.view
    departing = frozenset(
        name
        for name, header in round.staged.items()
        if header.kind is wire.FrameKind.DEPARTING
    )
    layout, terms = view.layout[round.fragment], view.terms(round.fragment)
    return documents.RosterDocument(
        run=view.state.run,
        fragment=round.fragment,
        round=round.number,
        epoch=view.state.epoch,
        base=round.base,
        outer=with_share(
            round.outer,
            roster,
            staleness=terms.staleness,
            buffer=buffer_of(view.state, round, now_s),
        ),
        shards=means.owners(roster, departing, layout, terms),
        roster=roster,
        before=view.heads[round.fragment].digest,
        controls=len(view.controls),
        claims=reader.rows.number or None if reader.rows is not None else None,
    )


def put_roster(reader: BucketReader, document: documents.RosterDocument) -> None:
    """Put a roster, and read the one that closes the round: the first that was put."""
    key = keys.roster(document.fragment, document.round)
    reader.store.put_new(key, documents.packed(documents.ROSTER, document, key))
    reader.read_rosters(document.fragment)


FIRST_S, GROWTH, LONGEST_S = 0.05, 1.4, 3.0
"""The first pause between two polls, its growth per poll, and the longest pause."""


class PollBackoff:
    """The pauses between two polls of each fragment's open round."""

    def __init__(self) -> None:
        self._next: dict[int, tuple[float, float]] = {}
        """When to poll next, and the pause after that."""

    def begin(self, fragment: int, now_s: float) -> None:
        """Start with short pauses: this island has published, others soon will."""
        self._next[fragment] = (now_s + FIRST_S, FIRST_S * GROWTH)

    def remaining_s(self, fragment: int, now_s: float) -> float:
        """Return the seconds until the next poll."""
        due_s, _ = self._next.get(fragment, (now_s, FIRST_S))
        return max(0.0, due_s - now_s)

    def paused(self, fragment: int, remaining_s: float, now_s: float) -> None:
        """Record the rest of a pause, even if the clock did not advance."""
        due_s, pause_s = self._next.get(fragment, (now_s, FIRST_S))
        self._next[fragment] = (min(due_s, now_s + remaining_s), pause_s)

    def polled(self, fragment: int, now_s: float) -> None:
        """Record a poll: the next pause is longer."""
        _, pause_s = self._next.get(fragment, (now_s, FIRST_S))
        longer_s = min(pause_s * GROWTH, LONGEST_S)
        self._next[fragment] = (now_s + pause_s, longer_s)
