"""A whole run inside one process: the coordinator's machine on a clock that stands.

A round closes when every island that was a member at its opening has published or
left, never by time: no lease and no deadline expires. So the same islands give the
same bits. Islands may be threads.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from atoll import weights
from atoll.bundle import Bundle, defined_by
from atoll.data import Ask, Claim, DataSpec
from atoll.exchange.base import Constants, Frame, Outcome, verified
from atoll.protocol import (
    Heartbeat,
    JoinReply,
    JoinRequest,
    ModelSpec,
    Position,
    Reception,
    events,
)
from atoll.protocol.coordinator import advance
from atoll.protocol.coordinator_state import (
    CoordinatorState,
    TokenBucket,
    require_fragment,
    require_own,
)
from atoll.protocol.join_leave import reply_to, require_plausible
from atoll.protocol.model import to_bring
from atoll.settings import RunSettings
from atoll.wire import FrameKind, verify_body

NOW_S = 0.0
"""The time of every event."""

ANY_JOINS = TokenBucket.full(math.inf, per_s=0.0)
"""Joins of one process are not limited: none of them is a durable record."""


class MemoryRun:
    """A run that lives as long as this object. Implements `Exchange`."""

    def __init__(
        self, settings: RunSettings | None = None, *, bundle: Bundle | None = None
    ) -> None:
        self.bundle = bundle
        """The bundle that defines the model, if there is one."""

        self.settings = defined_by(bundle, settings or RunSettings())
        self.settings.require_synchronous("a MemoryRun")
        self.id = f"{self.settings.run.name}-{self.settings.fingerprint[:12]}"
        self._changed = threading.Condition()
        self._joins = 0
        self._begin()

    def _begin(self) -> None:
        """Let the next island found the run."""
        self._state = CoordinatorState.begin(
            self.id, self.settings, joins=ANY_JOINS, trusts_names=True
        )
        self._fragments: list[MemoryFragment] = []
        self._updates: dict[tuple[int, int], dict[str, Frame]] = {}
        """Staged updates by fragment and round, then by island."""

        self._beats: dict[str, Heartbeat] = {}
        """Heartbeats since the last event."""

        self._closing: list[events.CloseRound] = []
        """Rounds that are closed, and not committed yet."""

        self._constants: dict[str, bytes] = {}
        self._position = self._state.position(NOW_S)

    @property
    def model(self) -> ModelSpec | None:
        """The model that islands must have; None while the run has no weights."""
        return self._state.model

    @property
    def constants(self) -> Mapping[str, bytes]:
        """The constants of its model that the run keeps, by digest."""
        return self._constants

    def join(self, request: JoinRequest) -> JoinReply:
        with self._changed:
            self._changed.wait_for(lambda: self._state.founding is None)
            before = self._state.members.known.get(request.island or "")
            request = replace(
                request,
                incarnation=None,
                holds=(),
                after=before.incarnation if before else 0,
            )
            fragments = self._fragments or self._empty_fragments(request.model)
            self._joins += 1
            key = b"%d" % self._joins  # a live island's name is refused to all others
            actions = self._advance(events.JoinRequested(request, key, key))
            self._fragments = fragments
            welcome = next(
                action for action in actions if isinstance(action, events.Welcome)
            )
            return reply_to(self._state, welcome)

    def heartbeat(self, beat: Heartbeat, *, at_once: bool = False) -> Position:
        if beat.waits_for is None:
            # No lock: a step that synchronises nothing must not wait for a reduction.
            state = self._state
            state.members.require(beat.island, beat.incarnation)
            require_plausible(state, beat)
            self._beats[beat.island] = beat
            return self._position
        with self._changed:
            position = self._answer(events.HeartbeatReceived(beat))
            assert isinstance(position, Position)
            return position

    def publish(self, frame: Frame) -> Reception:
        header = frame.header
        verify_body(header, frame.body)
        with self._changed:
            if header.kind is FrameKind.STATE:
                self._found(frame)
                return Reception.STAGED
            reception = self._answer(events.UpdateOffered(header))
            if reception is Reception.WANTED:
                fragment = self._fragments[header.fragment]
                weights.require_update(
                    header, frame.body, fragment.layout, fragment.terms
                )
                updates = self._updates.setdefault((header.fragment, header.round), {})
                updates[header.island] = frame
                reception = self._answer(events.UpdateStored(header))
            assert isinstance(reception, Reception)
            return reception

    def keep(self, joined: JoinReply, model: ModelSpec, constants: Constants) -> None:
        """Keep the founder's constants, as a copy. Implements `ConstantsUploader`."""
        received = {
            constant.digest: b"".join(verified(constant, constants.parts(constant)))
            for constant in to_bring(model, self.settings)
        }
        with self._changed:
            self._state.founding_of(joined.island, joined.incarnation)
            self._constants = received

    def outcome(
        self, fragment: int, round: int, *, wait_s: float, has_body: bool = True
    ) -> Outcome | None:
        with self._changed:
            self._state.round(fragment)
            outcomes = self._fragments[fragment].outcomes
            self._changed.wait_for(
                lambda: (
                    round in outcomes
                    or self._state.never_opens(round, fragment=fragment)
                ),
                wait_s,
            )
            if round in outcomes:
                self._apply_beats()
                return Outcome(outcomes[round], self._position)
            self._state.require_opens(round, fragment=fragment)
            return None

    def state(self, fragment: int) -> Frame:
        with self._changed:
            require_fragment(fragment, len(self._fragments))
            return self._fragments[fragment].state_frame()

    def leave(self, island: str, incarnation: int) -> None:
        with self._changed:
            member = self._state.members.known.get(island)
            if member is None or member.incarnation != incarnation or member.has_left:
                return
            self._advance(events.Leave(island, incarnation))
            if self._state.model is None:
                self._begin()  # the founder left too early, and never took part

    def open_data(self, island: str, incarnation: int, data: DataSpec) -> DataSpec:
        """Describe an island's data to the run. Implements `Dealer`."""
        with self._changed:
            answer = self._answer(events.DataOpened(island, incarnation, data))
            assert isinstance(answer, DataSpec)
            return answer

    def claim(self, ask: Ask) -> Claim:
        """Return rows of the run that now belong to the island."""
        with self._changed:
            answer = self._answer(events.RowsClaimed(ask))
            assert isinstance(answer, Claim)
            return answer

    def _empty_fragments(self, model: ModelSpec) -> list[MemoryFragment]:
        return [
            MemoryFragment(self.id, index, layout, self.settings)
            for index, layout in enumerate(weights.lay_out(model, self.settings))
        ]

    def _found(self, frame: Frame) -> None:
        """Take a fragment's first weights; with the last of them the run begins."""
        header = frame.header
        self._state.members.require(header.island, header.incarnation)
        require_own(header, run=self.id, num_fragments=len(self._fragments))
        self._state.founding_of(header.island, header.incarnation)
        self._fragments[header.fragment].found(frame)
        if all(fragment.is_founded for fragment in self._fragments):
            digests = tuple(fragment.state.digest for fragment in self._fragments)
            outers = tuple(fragment.terms.outer for fragment in self._fragments)
            founded = events.Founded(header.island, header.incarnation, digests, outers)
            self._advance(founded)

    def _answer(self, event: events.Event) -> events.Answer:
        """Apply an event, and return the response to its sender."""
        return next(
            action.answer
            for action in self._advance(event)
            if isinstance(action, events.Respond)
        )

    def _advance(self, event: events.Event) -> list[events.Action]:
        """Apply an event, and commit the rounds that close; wake all threads."""
        self._commit_closing()  # if the last call's commit failed
        self._apply_beats()
        actions = self._apply(event)
        self._commit_closing()
        return actions

    def _apply(self, event: events.Event) -> list[events.Action]:
        """Apply an event; the rounds that it closes are to be committed."""
        self._state, actions = advance(self._state, event, NOW_S)
        self._closing += [
            action for action in actions if isinstance(action, events.CloseRound)
        ]
        self._position = self._state.position(NOW_S)
        self._changed.notify_all()
        return actions

    def _commit_closing(self) -> None:
        """Commit the rounds that close; a commit may close the next round.

        A round whose commit fails keeps its updates, and stays the first.
        """
        while self._closing:
            close = self._closing[0]
            key = close.fragment, close.round
            updates = self._updates[key]
            committed = self._fragments[close.fragment].commit(close, updates)
            del self._closing[0], self._updates[key]
            self._apply(committed)

    def _apply_beats(self) -> None:
        beats, self._beats = self._beats, {}
        for beat in list(beats.values()):
            member = self._state.members.known.get(beat.island)
            if member is None or member.has_left:
                continue
            if member.incarnation == beat.incarnation:
                event = events.HeartbeatReceived(beat, is_asking=False)
                self._state, _ = advance(self._state, event, NOW_S)
        self._position = self._state.position(NOW_S)


KEPT_BODIES = 2
"""Agreed bodies kept for late islands; rosters are kept permanently."""


class MemoryFragment:
    """State and outcomes of one fragment. The run's lock guards every call."""

    def __init__(
        self,
        run: str,
        index: int,
        layout: weights.FragmentLayout,
        settings: RunSettings,
    ) -> None:
        self.run, self.index, self.layout = run, index, layout
        self.terms = weights.terms_of(layout, settings)
        self.outcomes: dict[int, Frame] = {}
        self._state: weights.FragmentState | None = None

    @property
    def is_founded(self) -> bool:
        return self._state is not None

    @property
    def state(self) -> weights.FragmentState:
        assert self._state is not None
        return self._state

    def found(self, frame: Frame) -> None:
        """Take the founder's weights as round 0."""
        weights.require_state(frame.header, self.layout, self.terms, round=0)
        self._state = weights.FragmentState.from_frame(frame.header, frame.body.copy())

    def state_frame(self) -> Frame:
        return Frame(
            *self.state.to_frame(
                run=self.run, fragment=self.index, outer=self.terms.outer
            )
        )

    def commit(
        self, close: events.CloseRound, updates: Mapping[str, Frame]
    ) -> events.Committed:
        """Reduce the updates of a closing round, and take the outer step."""
        framed = {name: (frame.header, frame.body) for name, frame in updates.items()}
        header, body = weights.agree(
            self.layout,
            self.terms,
            close.roster,
            framed,
            run=self.run,
            fragment=self.index,
            round=close.round,
            epoch=close.epoch,
            base=self.state.digest,
            outer=close.outer,
            buffer=close.buffer,
        )
        self.state.apply(header, body)
        if (gathered := weights.gather(header, self.terms, framed)) is not None:
            header, body = gathered[0], np.concatenate(gathered[1])
        self.outcomes[close.round] = Frame(header, body)
        old = self.outcomes.get(close.round - KEPT_BODIES)
        if old is not None:
            empty = Frame(old.header, np.empty(0, np.uint8))
            self.outcomes[close.round - KEPT_BODIES] = empty
        assert header.roster is not None
        return events.Committed(
            self.index, header.roster, self.state.digest, self.terms.outer
        )
