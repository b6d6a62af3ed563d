"""A whole run inside one process: settings, membership, rounds and weights.

A round closes when every island that was a member at its opening has published or
left, never by time: so the same islands give the same bits. Islands may be threads.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from statistics import median_high

from atoll.bundle import Bundle, defined_by
from atoll.errors import Refused, RunEnded
from atoll.exchange.base import Frame, Outcome
from atoll.exchange.constants import Constants, verified
from atoll.exchange.fragment import RunFragment
from atoll.exchange.members import Members
from atoll.protocol import (
    Beat,
    JoinReply,
    JoinRequest,
    ModelSpec,
    Position,
    Reception,
)
from atoll.protocol.constants import to_bring
from atoll.protocol.plausible import max_schedule_step
from atoll.settings import RunSettings
from atoll.weights import Layout, lay_out
from atoll.wire import Kind, verify_body


class MemoryRun:
    """A run that lives as long as this object. Implements `Exchange`."""

    def __init__(
        self, settings: RunSettings | None = None, *, bundle: Bundle | None = None
    ) -> None:
        self.bundle = bundle
        """What defines the model, if anything does."""

        self.settings = defined_by(bundle, settings or RunSettings())
        self.id = f"{self.settings.run.name}-{self.settings.fingerprint[:12]}"
        self._changed = threading.Condition()
        self._members = Members(self.settings.run)
        self._model: ModelSpec | None = None
        self._layout: Layout = ()
        self._fragments: list[RunFragment] = []
        self._constants: dict[str, bytes] = {}
        self._last_round = self.settings.run.end_rounds
        self._position = self._where()

    @property
    def model(self) -> ModelSpec | None:
        """What islands must have; None while the run has no weights."""
        with self._changed:
            return self._model if self._is_founded else None

    def join(self, request: JoinRequest) -> JoinReply:
        with self._changed:
            self._changed.wait_for(lambda: self._model is None or self._is_founded)
            is_founder = self._model is None
            request.require_bundle(self.settings)
            layout = lay_out(request.model, self.settings)
            if self._model is not None:
                request.model.require_same(self._model)
            position = self._where()
            was_started = self._members.has_started
            member = self._members.add(request.island, step=position.step)
            if is_founder:
                self._model, self._layout = request.model, layout
                self._fragments = self._empty_fragments()
                position = self._where()
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

    def heartbeat(self, beat: Beat, *, at_once: bool = False) -> Position:
        # No lock: a step that synchronises nothing must not wait for a reduction.
        self._members.require(beat.island, beat.incarnation)
        last_step = max_schedule_step(self._position.rounds, self.settings)
        if beat.step > last_step:
            raise Refused(
                f"Island {beat.island!r} says that it has made step {beat.step}, and "
                f"no island gets beyond {last_step} now. Join again."
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
            if header.kind is Kind.STATE:
                fragment.found(frame)
            elif self._never_opens(header.round):
                reception = Reception.COMMITTED
            else:
                reception = fragment.stage(frame)
            self._settle()
            return reception

    def keep(self, joined: JoinReply, model: ModelSpec, constants: Constants) -> None:
        """Keep the founder's constants, as a copy. Implements `Keeper`."""
        brought = {
            each.digest: b"".join(verified(each, constants.parts(each)))
            for each in to_bring(model, self.settings)
        }
        with self._changed:
            self._members.require(joined.island, joined.incarnation)
            self._constants = brought

    @property
    def constants(self) -> Mapping[str, bytes]:
        """What the run keeps of its model's constants, by digest."""
        return self._constants

    def outcome(self, fragment: int, round: int, *, wait_s: float) -> Outcome | None:
        with self._changed:
            rounds = self._fragment(self.id, fragment)
            self._changed.wait_for(
                lambda: round in rounds.outcomes or self._never_opens(round), wait_s
            )
            if round in rounds.outcomes:
                return Outcome(rounds.outcomes[round], self._where())
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
        """Return what this island must publish, when every island waits for another."""
        live, quorum = self._members.live, self.settings.run.quorum
        if not self._members.has_started:
            return ()  # nobody waits for another: all wait for who has yet to join
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

    def _empty_fragments(self) -> list[RunFragment]:
        return [
            RunFragment(self.id, index, layout, self.settings)
            for index, layout in enumerate(self._layout)
        ]

    def _forget_founding(self) -> None:
        """Let the next island found the run: this one left before it had."""
        self._model, self._layout, self._fragments = None, (), []
        self._constants = {}

    def _settle(self) -> None:
        """Close every round that can close, and tell who waits."""
        is_open = self._is_founded and self._members.has_started
        for fragment in self._fragments if is_open else ():
            while fragment.can_close(self._last_round):
                fragment.close(self._members.live)
                self._end_by_tokens()
        self._position = self._where()
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
        """Return the inner steps and tokens that earlier lives have counted."""
        nothing = (0, 0)
        return max(
            (fragment.counted.get(island, nothing) for fragment in self._fragments),
            default=nothing,
        )

    def _where(self) -> Position:
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

    def _fragment(self, run: str, index: int) -> RunFragment:
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
