"""How one life of an island speaks in the rounds of a run, and listens."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from atoll.errors import Refused, Unreachable
from atoll.exchange import Exchange, Frame, Outcome
from atoll.island.entry import state_frame
from atoll.protocol import Heartbeat, HeldRound, JoinReply, Position, Reception
from atoll.weights import FragmentState, Terms
from atoll.wire import FrameKind, Header, TrainingProgress, verify_body

POLL_S = 0.1
"""How long a question for an outcome waits before it looks whether to go on."""


def never() -> bool:
    """Give up at no time."""
    return False


class Voice:
    """Publishes for one island, and asks for outcomes."""

    def __init__(self, exchange: Exchange, joined: JoinReply) -> None:
        self.exchange, self.joined = exchange, joined
        self.stops = threading.Event()
        self.schedule_step = joined.position.step
        self._holds: dict[int, HeldRound] = {}

    def position(self, waits_for: tuple[int, int] | None = None) -> Position:
        """Return where the run is, as far as that is known without asking."""
        beat = Heartbeat(
            island=self.joined.island,
            incarnation=self.joined.incarnation,
            step=self.schedule_step,
            waits_for=waits_for,
            holds=tuple(held for _, held in sorted(self._holds.items())),
        )
        return self.exchange.heartbeat(beat)

    def hold(self, fragment: int, state: FragmentState) -> None:
        """Say what is known here of a fragment: only who knows it closes its round."""
        self._holds[fragment] = HeldRound(state.round, state.digest)

    def bring(
        self, position: Position, fragment: int, state: FragmentState, terms: Terms
    ) -> None:
        """Give the run the state of a fragment, if it says that it lacks one."""
        if fragment in position.lost:
            frame = state_frame(self.joined, fragment, state, terms.outer)
            self.exchange.publish(frame)

    def header(
        self,
        fragment: int,
        round: int,
        *,
        inner_steps: int,
        tokens: int,
        **more: object,
    ) -> Header:
        """Return the header of an update of this island."""
        joined = self.joined
        return Header(
            kind=FrameKind.UPDATE,
            run=joined.run,
            fragment=fragment,
            round=round,
            island=joined.island,
            incarnation=joined.incarnation,
            epoch=joined.epoch,
            progress=TrainingProgress(inner_steps=inner_steps, tokens=tokens),
            **more,  # type: ignore[arg-type] # judged by the header itself
        )

    def refuse(
        self,
        fragment: int,
        round: int,
        reason: str,
        *,
        inner_steps: int = 0,
        tokens: int = 0,
    ) -> Reception:
        """Take part in a round without a contribution: nobody waits for one."""
        header = self.header(
            fragment, round, inner_steps=inner_steps, tokens=tokens, refused=reason
        )
        return self.publish(Frame(header, np.empty(0, np.uint8)))

    def publish(self, frame: Frame) -> Reception:
        """Publish an update.

        Raises:
            Refused: the run has lost rounds that this island has taken.
        """
        self.position()
        reception = self.exchange.publish(frame)
        if reception is Reception.EARLY:
            raise Refused(
                f"The run has lost the rounds before round {frame.header.round} of "
                f"fragment {frame.header.fragment}, and an island of torchft keeps no "
                "state of the run to bring. Start a new run from a checkpoint."
            )
        return reception

    def look(self, fragment: int, round: int, *, wait_s: float = 0.0) -> Outcome | None:
        """Return what a round came to, verified, or None if it goes on."""
        outcome = self.exchange.outcome(fragment, round, wait_s=wait_s)
        if outcome is not None and outcome.has_body:
            verify_body(outcome.agreed.header, outcome.agreed.body)
        return outcome

    def outcome(
        self, fragment: int, round: int, *, gives_up: Callable[[], bool] = never
    ) -> Outcome:
        """Return what a round came to, however long that takes.

        Raises:
            Unreachable: the island leaves, or `gives_up` says so.
        """
        while True:
            outcome = self.look(fragment, round, wait_s=POLL_S)
            if outcome is not None:
                return outcome
            if self.stops.is_set() or gives_up():
                raise Unreachable(
                    f"Round {round} of fragment {fragment} had no outcome in the time "
                    "that was given. What was sent for it may still count."
                )
