"""A whole run inside one process: settings, membership, rounds and weights.

A round closes when every island that was a member at its opening has published or
left, never by time: so the same islands give the same bits. Islands may be threads.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from statistics import median_high

import numpy as np

from atoll import weights
from atoll.bundle import Bundle, defined_by
from atoll.errors import LeaseLost, Refused, RunEnded, UsageError
from atoll.exchange.base import Constants, Frame, Outcome, verified
from atoll.protocol import (
    Heartbeat,
    JoinReply,
    JoinRequest,
    ModelSpec,
    Position,
    Reception,
    judge_updates,
)
from atoll.protocol.membership import max_schedule_step
from atoll.protocol.messages import CountedWork
from atoll.protocol.model import to_bring
from atoll.protocol.rounds import Norms, norms_after
from atoll.settings import RunSection, RunSettings
from atoll.wire import FrameKind, Roster, update_digest, verify_body
from atoll.wire.roster import new_name_fault


class MemoryRun:
    """A run that lives as long as this object. Implements `Exchange`."""

    def __init__(
        self, settings: RunSettings | None = None, *, bundle: Bundle | None = None
    ) -> None:
        self.bundle = bundle
        """The bundle that defines the model, if there is one."""

        self.settings = defined_by(bundle, settings or RunSettings())
        self.id = f"{self.settings.run.name}-{self.settings.fingerprint[:12]}"
        self._changed = threading.Condition()
        self._members = MemoryMembers(self.settings.run)
        self._model: ModelSpec | None = None
        self._layout: weights.Layout = ()
        self._fragments: list[MemoryFragment] = []
        self._constants: dict[str, bytes] = {}
        self._last_round = self.settings.run.end_rounds
        self._position = self._current_position()

    @property
    def model(self) -> ModelSpec | None:
        """The model that islands must have; None while the run has no weights."""
        with self._changed:
            return self._model if self._is_founded else None

    def join(self, request: JoinRequest) -> JoinReply:
        with self._changed:
            self._changed.wait_for(lambda: self._model is None or self._is_founded)
            is_founder = self._model is None
            request.require_bundle(self.settings)
            layout = weights.lay_out(request.model, self.settings)
            if self._model is not None:
                request.model.require_same(self._model)
            position = self._current_position()
            was_started = self._members.has_started
            member = self._members.add(request.island, step=position.step)
            if is_founder:
                self._model, self._layout = request.model, layout
                self._fragments = self._empty_fragments()
                position = self._current_position()
            if not was_started:
                for fragment in self._fragments:
                    fragment.candidates.add(member.island)
            return JoinReply(
                run=self.id,
                island=member.island,
                incarnation=member.incarnation,
                slot=member.slot,
                settings=self.settings,
                epoch=0,
                position=position,
                is_founder=is_founder,
                inner_steps=self._counted(member.island)[0],
                tokens=self._counted(member.island)[1],
                spoken_for=tuple(
                    fragment.index
                    for fragment in self._fragments
                    if member.island in fragment.staged
                ),
                counted=tuple(
                    fragment.last_counted(member.island) for fragment in self._fragments
                ),
            )

    def heartbeat(self, beat: Heartbeat, *, at_once: bool = False) -> Position:
        # No lock: a step that synchronises nothing must not wait for a reduction.
        self._members.require(beat.island, beat.incarnation)
        last_step = max_schedule_step(self._position.rounds, self.settings)
        if beat.step > last_step:
            raise Refused(
                f"Island {beat.island!r} reports step {beat.step}, but no island can "
                f"be beyond {last_step} now. Join again."
            )
        self._members.steps[beat.island] = beat.step
        if beat.waits_for is None:
            self._members.waits.pop(beat.island, None)
            return self._position
        with self._changed:
            self._members.waits[beat.island] = beat.waits_for
            return replace(self._position, wanted=self._wanted(beat.island))

    def publish(self, frame: Frame) -> Reception:
        header = frame.header
        verify_body(header, frame.body)
        with self._changed:
            self._members.require(header.island, header.incarnation)
            fragment = self._fragment(header.run, header.fragment)
            reception = Reception.STAGED
            if header.kind is FrameKind.STATE:
                fragment.found(frame)
            elif self._never_opens(header.round):
                reception = Reception.COMMITTED
            else:
                reception = fragment.stage(frame)
            self._settle()
            return reception

    def keep(self, joined: JoinReply, model: ModelSpec, constants: Constants) -> None:
        """Keep the founder's constants, as a copy. Implements `Keeper`."""
        received = {
            constant.digest: b"".join(verified(constant, constants.parts(constant)))
            for constant in to_bring(model, self.settings)
        }
        with self._changed:
            self._members.require(joined.island, joined.incarnation)
            self._constants = received

    @property
    def constants(self) -> Mapping[str, bytes]:
        """The constants of its model that the run keeps, by digest."""
        return self._constants

    def outcome(self, fragment: int, round: int, *, wait_s: float) -> Outcome | None:
        with self._changed:
            rounds = self._fragment(self.id, fragment)
            self._changed.wait_for(
                lambda: round in rounds.outcomes or self._never_opens(round), wait_s
            )
            if round in rounds.outcomes:
                return Outcome(rounds.outcomes[round], self._current_position())
            if self._never_opens(round):
                raise RunEnded(
                    f"Round {round} will not open: the run ended with round "
                    f"{self._last_round}."
                )
            return None

    def state(self, fragment: int) -> Frame:
        with self._changed:
            return self._fragment(self.id, fragment).state_frame()

    def leave(self, island: str, incarnation: int) -> None:
        with self._changed:
            if not self._members.remove(island, incarnation):
                return
            for fragment in self._fragments:
                fragment.candidates.discard(island)
            if self._model is not None and not self._is_founded:
                self._forget_founding()
                self._members.forget(island)
            self._settle()

    def _wanted(self, island: str) -> tuple[int, ...]:
        """Return the fragments this island must publish, if all islands are blocked."""
        live, quorum = self._members.live, self.settings.run.quorum
        if not self._members.has_started:
            return ()  # all wait for islands that have not joined yet, not for updates
        if len(live) < quorum or not all(map(self._is_blocked, live)):
            return ()
        return tuple(
            fragment.index
            for fragment in self._fragments
            if not self._never_opens(fragment.open_round)
            and island not in fragment.staged
            and (island in fragment.candidates or len(fragment.staged) < quorum)
        )

    def _is_blocked(self, island: str) -> bool:
        fragment, round = self._members.waits.get(island, (0, 0))
        waited = self._fragments[fragment]
        return waited.open_round == round and island in waited.staged

    @property
    def _is_founded(self) -> bool:
        return all(fragment.is_founded for fragment in self._fragments)

    def _empty_fragments(self) -> list[MemoryFragment]:
        return [
            MemoryFragment(self.id, index, layout, self.settings)
            for index, layout in enumerate(self._layout)
        ]

    def _forget_founding(self) -> None:
        """Let the next island found the run: the founder left too early."""
        self._model, self._layout, self._fragments = None, (), []
        self._constants = {}

    def _settle(self) -> None:
        """Close every round that can close, and wake all waiting threads."""
        is_open = self._is_founded and self._members.has_started
        for fragment in self._fragments if is_open else ():
            while fragment.can_close(self._last_round):
                fragment.close(self._members.live)
                self._end_by_tokens()
        self._position = self._current_position()
        self._changed.notify_all()

    def _end_by_tokens(self) -> None:
        limit, last = self.settings.run.end_tokens, self._last_round
        if limit is None or self._tokens() < limit:
            return
        furthest = max(fragment.highest_staged for fragment in self._fragments)
        self._last_round = furthest if last is None else min(last, furthest)

    def _tokens(self) -> int:
        names = set().union(*(fragment.counted for fragment in self._fragments))
        return sum(
            min(fragment.counted.get(name, (0, 0))[1] for fragment in self._fragments)
            for name in names
        )

    def _counted(self, island: str) -> tuple[int, int]:
        """Return the inner steps and tokens of an island that have counted so far."""
        no_work = (0, 0)
        return max(
            (fragment.counted.get(island, no_work) for fragment in self._fragments),
            default=no_work,
        )

    def _current_position(self) -> Position:
        steps = list(self._members.steps.values())
        return Position(
            step=median_high(steps) if steps and self._members.has_started else 0,
            rounds=tuple(fragment.open_round for fragment in self._fragments),
            last_round=self._last_round,
            tokens=self._tokens() if self._fragments else 0,
            decay_round=self.settings.run.decay_round,
            end_tokens=self.settings.run.end_tokens,
        )

    def _never_opens(self, round: int) -> bool:
        return self._last_round is not None and round > self._last_round

    def _fragment(self, run: str, index: int) -> MemoryFragment:
        if run != self.id:
            raise Refused(
                f"The frame belongs to run {run!r}, and this is {self.id!r}. "
                "Join this run first."
            )
        if not 0 <= index < len(self._fragments):
            raise Refused(
                f"Fragment {index} does not exist: the run has "
                f"{len(self._fragments)}. Take the settings from the run."
            )
        return self._fragments[index]


KEPT_BODIES = 2
"""Agreed bodies kept for late islands; rosters are kept permanently."""


class MemoryFragment:
    """State and rounds of one fragment. The run's lock guards every call."""

    def __init__(
        self,
        run: str,
        index: int,
        layout: weights.FragmentLayout,
        settings: RunSettings,
    ) -> None:
        self.run, self.index, self.layout, self.settings = run, index, layout, settings
        self.terms = weights.terms_of(layout, settings)
        self.candidates: set[str] = set()
        self.outcomes: dict[int, Frame] = {}
        self.counted_in: dict[str, int] = {}
        """The last round that counted each island."""
        self.counted: dict[str, tuple[int, int]] = {}
        """Inner steps and tokens of each island that ever counted, cumulative."""
        self._staged: dict[int, dict[str, Frame]] = {}
        self._state: weights.FragmentState | None = None
        self._bases: set[bytes] = set()
        self._norms: Norms = {}

    @property
    def is_founded(self) -> bool:
        return self._state is not None

    @property
    def state(self) -> weights.FragmentState:
        assert self._state is not None
        return self._state

    @property
    def open_round(self) -> int:
        return (self._state.round if self._state else 0) + 1

    @property
    def staged(self) -> Collection[str]:
        """The islands that have published for the open round."""
        return self._staged.get(self.open_round, {}).keys()

    @property
    def highest_staged(self) -> int:
        return max([self.open_round - 1, *(n for n, s in self._staged.items() if s)])

    def found(self, frame: Frame) -> None:
        """Take the founder's weights as round 0."""
        if self._state is not None:
            raise Refused(
                f"Fragment {self.index} has been founded. Join again to take its state."
            )
        weights.require_state(frame.header, self.layout, self.terms, round=0)
        self._state = weights.FragmentState.from_frame(frame.header, frame.body.copy())
        self._bases.add(self._state.digest)

    def last_counted(self, island: str) -> CountedWork | None:
        """Return the last update of an island that counted, if any has."""
        if island not in self.counted_in:
            return None
        inner_steps, tokens = self.counted[island]
        return CountedWork(
            round=self.counted_in[island], inner_steps=inner_steps, tokens=tokens
        )

    def state_frame(self) -> Frame:
        return Frame(
            *self.state.to_frame(
                run=self.run, fragment=self.index, outer=self.terms.outer
            )
        )

    def stage(self, frame: Frame) -> Reception:
        """Hold an update for its round, and return its reception.

        An update changes nothing if its round is over, or if an earlier incarnation of
        its island has published for the round: the earlier update stays.
        """
        header = frame.header
        if header.round < self.open_round:
            return Reception.COMMITTED
        furthest = self.open_round + (header.kind is FrameKind.DEPARTING)
        if header.round > furthest:
            raise Refused(
                f"Round {header.round} of fragment {self.index} cannot be published "
                f"yet: round {self.open_round} is open."
            )
        staged = self._staged.setdefault(header.round, {})
        if header.island not in staged:
            weights.require_update(header, frame.body, self.layout, self.terms)
        standing = staged.setdefault(header.island, frame)
        if standing.header.incarnation < header.incarnation:
            return Reception.SPOKEN_FOR
        if update_digest(standing.header) != update_digest(header):
            raise Refused(
                f"Another update of island {header.island!r} stands for round "
                f"{header.round} of fragment {self.index}. Wait for its outcome."
            )
        return Reception.STAGED

    def can_close(self, last_round: int | None) -> bool:
        """Return whether every candidate has published, and a quorum has."""
        staged = self._staged.get(self.open_round, {})
        if last_round is not None and self.open_round > last_round:
            return False
        has_quorum = len(staged) >= self.settings.run.quorum
        return has_quorum and self.candidates <= staged.keys()

    def close(self, live: frozenset[str]) -> None:
        """Commit the open round, and open the next one for `live`."""
        staged = self._staged[self.open_round]
        roster = judge_updates(
            (frame.header for frame in staged.values()),
            base=self.state.digest,
            known_bases=self._bases,
            norms=self._norms,
            counted=self.last_counted,
            settings=self.settings,
        )
        outcome = self._agree(roster, staged)
        assert outcome.header.roster is not None
        self._norms = norms_after(
            self._norms,
            (frame.header for frame in staged.values()),
            outcome.header.roster,
        )
        self.state.apply(outcome.header, outcome.body)
        del self._staged[outcome.header.round]
        self._bases.add(self.state.digest)
        self._record(outcome)
        self.candidates = set(live)

    def _record(self, outcome: Frame) -> None:
        self.outcomes[outcome.header.round] = outcome
        old = outcome.header.round - KEPT_BODIES
        if old in self.outcomes:
            self.outcomes[old] = Frame(self.outcomes[old].header, np.empty(0, np.uint8))
        assert outcome.header.roster is not None
        for entry in outcome.header.roster.counted:
            self.counted[entry.island] = (entry.inner_steps, entry.tokens)
            self.counted_in[entry.island] = outcome.header.round

    def _agree(self, roster: Roster, staged: dict[str, Frame]) -> Frame:
        return Frame(
            *weights.agree(
                self.layout,
                self.terms,
                roster,
                {name: (frame.header, frame.body) for name, frame in staged.items()},
                run=self.run,
                fragment=self.index,
                round=self.open_round,
                base=self.state.digest,
                outer=self.terms.outer,
            )
        )


@dataclass(frozen=True, kw_only=True)
class MemoryMember:
    """One incarnation of one island."""

    island: str
    incarnation: int
    slot: int


class MemoryMembers:
    """Live islands, and the slots and incarnations of all that ever joined."""

    def __init__(self, settings: RunSection) -> None:
        self._settings = settings
        self._joined: dict[str, MemoryMember] = {}
        self._live: dict[str, MemoryMember] = {}
        self.steps: dict[str, int] = {}
        """The schedule step each live island reported last."""

        self.waits: dict[str, tuple[int, int]] = {}
        """The fragment and round whose outcome an island waits for."""

    @property
    def live(self) -> frozenset[str]:
        return frozenset(self._live)

    @property
    def has_started(self) -> bool:
        """True from the moment `start_islands` have joined, though some have left."""
        return len(self._joined) >= self._settings.start_islands

    def forget(self, island: str) -> None:
        """Free a name whose island never took part."""
        del self._joined[island]

    def add(self, name: str | None, *, step: int) -> MemoryMember:
        """Make `name` live at a schedule step; None takes the first free `island-<n>`.

        Raises:
            UsageError: a live island has the name, no frame could carry it, or the
                run is full.
        """
        if name is not None and (fault := new_name_fault(name, field="island")):
            raise UsageError(f"{fault}. Give this island another name.")
        if name in self._live:
            raise UsageError(
                f"Island {name!r} is live in this run already. "
                "Give this island another name, or let that one leave first."
            )
        limit = self._settings.most_islands
        if len(self._live) >= limit:
            raise UsageError(
                f"The run has {len(self._live)} islands, and max_islands={limit}. "
                "Wait for one to leave, or raise run.max_islands in a new run."
            )
        member = self._next_incarnation(name if name is not None else self._free_name())
        self._joined[member.island] = self._live[member.island] = member
        self.steps[member.island] = step
        return member

    def remove(self, island: str, incarnation: int) -> bool:
        """Forget a live member; return False when it was not live."""
        member = self._live.get(island)
        if member is None or member.incarnation != incarnation:
            return False
        del self._live[island], self.steps[island]
        self.waits.pop(island, None)
        return True

    def require(self, island: str, incarnation: int) -> None:
        """Return if this incarnation of the island is live.

        Raises:
            LeaseLost: it has left, or a later one has replaced it.
        """
        member = self._live.get(island)
        if member is None or member.incarnation != incarnation:
            raise LeaseLost(
                f"Island {island!r} is not live as incarnation {incarnation}. "
                "Join again to continue."
            )

    def _next_incarnation(self, name: str) -> MemoryMember:
        before = self._joined.get(name)
        if before is None:
            return MemoryMember(island=name, incarnation=1, slot=len(self._joined))
        return MemoryMember(
            island=name, incarnation=before.incarnation + 1, slot=before.slot
        )

    def _free_name(self) -> str:
        number = 0
        while f"island-{number}" in self._joined:
            number += 1
        return f"island-{number}"
