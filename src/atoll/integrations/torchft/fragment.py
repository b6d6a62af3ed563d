"""One fragment that torchft reduces: its updates, and the means of its rounds.

The run's anchor is bookkeeping here: it starts at zero, every mean is subtracted from
it, and its digest is the base that updates name. Training gets the mean itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from atoll import wire
from atoll.errors import NonFinite, OutcomeLost, Refused, Unreachable
from atoll.exchange import Exchange, Frame, Outcome
from atoll.island.entry import fetch_state, state_frame
from atoll.island.identity import update_seed
from atoll.protocol import (
    Heartbeat,
    HeldRound,
    JoinReply,
    Position,
    Reception,
    verdict_of,
)
from atoll.weights import FragmentLayout, FragmentState, Terms, seal, terms_of
from atoll.weights.layout import F32
from atoll.weights.reduce import mean_reader

ABSTAINS = "torchft: has the state, and contributes from the next round on"
"""The reason of a refused update: the island holds the state already."""

POLL_S = 0.1
"""Time that one poll for an outcome waits before `gives_up` is checked again."""


def never() -> bool:
    """Return False: do not give up."""
    return False


def roster_of(agreed: wire.Header) -> wire.Roster:
    """Return the roster that every agreed frame has."""
    assert agreed.roster is not None
    return agreed.roster


@dataclass(frozen=True)
class RoundResult:
    """The outcome of the round of one step."""

    agreed: wire.Header
    mean: F32 | None
    """None: the round is void."""

    has_counted: bool
    """Whether this island's own values are in the mean."""

    reason: str
    """The roster's reason why they are not; empty if they are."""


class RoundClient:
    """Publishes for one incarnation of an island, and polls for outcomes."""

    def __init__(self, exchange: Exchange, joined: JoinReply) -> None:
        self.exchange, self.joined = exchange, joined
        self.stops = threading.Event()
        self.schedule_step = joined.position.step
        self._held_rounds: dict[int, HeldRound] = {}

    def position(self, waits_for: tuple[int, int] | None = None) -> Position:
        """Return the run's position as far as it is known without a request."""
        beat = Heartbeat(
            island=self.joined.island,
            incarnation=self.joined.incarnation,
            step=self.schedule_step,
            waits_for=waits_for,
            holds=tuple(
                held_round for _, held_round in sorted(self._held_rounds.items())
            ),
        )
        return self.exchange.heartbeat(beat)

    def hold(self, fragment: int, state: FragmentState) -> None:
        """Report the round of a fragment's state with the next heartbeat.

        Only an island that holds the state of a fragment closes its round.
        """
        self._held_rounds[fragment] = HeldRound(state.round, state.digest)

    def bring(
        self, position: Position, fragment: int, state: FragmentState, terms: Terms
    ) -> None:
        """Publish the state of a fragment if the run reports it as lost."""
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
        **fields: object,
    ) -> wire.Header:
        """Return the header of an update of this island."""
        joined = self.joined
        return wire.Header(
            kind=wire.FrameKind.UPDATE,
            run=joined.run,
            fragment=fragment,
            round=round,
            island=joined.island,
            incarnation=joined.incarnation,
            epoch=joined.epoch,
            progress=wire.TrainingProgress(inner_steps=inner_steps, tokens=tokens),
            **fields,  # type: ignore[arg-type] # judged by the header itself
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
        """Publish an update without a contribution, so that the round can close."""
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
        """Return the verified outcome of a round, or None if it is still open."""
        outcome = self.exchange.outcome(fragment, round, wait_s=wait_s)
        if outcome is not None and outcome.has_body:
            wire.verify_body(outcome.agreed.header, outcome.agreed.body)
        return outcome

    def outcome(
        self, fragment: int, round: int, *, gives_up: Callable[[], bool] = never
    ) -> Outcome:
        """Return the outcome of a round; wait for it without a time limit.

        Raises:
            Unreachable: the island leaves, or `gives_up` returned True.
        """
        while True:
            outcome = self.look(fragment, round, wait_s=POLL_S)
            if outcome is not None:
                return outcome
            if self.stops.is_set() or gives_up():
                raise Unreachable(
                    f"Round {round} of fragment {fragment} had no outcome before the "
                    "timeout. The update that was sent for it may still count."
                )


class ReducedFragment:
    """State and residual of one fragment. One thread at a time touches it."""

    def __init__(
        self,
        client: RoundClient,
        index: int,
        layout: FragmentLayout,
        state: FragmentState,
    ) -> None:
        self._client, self.index, self.layout = client, index, layout
        self._terms = terms_of(layout, client.joined.settings)
        self._decay = client.joined.settings.wire.error_feedback_decay
        self.state = state
        client.hold(index, state)
        self.round = state.round + 1
        """The next round whose mean training takes; the state may be ahead of it."""

        self.last_published = 0
        """The last round with an update of this incarnation, refused ones included."""

        self.abstains_through = 0
        """Up to this round the weights hold another island's work, which it counts."""

        self._residual = self._residual_after = None
        if self._terms.has_feedback:
            self._residual = np.zeros(layout.elements, np.float32)
            self._residual_after = np.zeros(layout.elements, np.float32)
        self._sent_digest = b""

    def publish(self, values: F32, *, step: int) -> None:
        """Contribute to the next round, unless this incarnation has published in it."""
        if self.last_published >= self.round:
            return
        is_behind = self.state.round != self.round - 1
        if is_behind or self.round <= self.abstains_through:
            self._client.refuse(self.index, self.round, ABSTAINS, inner_steps=step + 1)
        else:
            frame = self._seal(values, step)
            self._sent_digest = wire.update_digest(frame.header)
            self._client.publish(frame)
        self.last_published = self.round

    def take(self, outcome: Outcome) -> RoundResult:
        """Return the mean of the round, and advance to the next round.

        Raises:
            OutcomeLost: the run no longer keeps the mean.
        """
        agreed, body = outcome.agreed.header, outcome.agreed.body
        if not outcome.has_body:
            raise OutcomeLost(
                f"Round {agreed.round} of fragment {self.index} is over, and the run "
                "no longer keeps its mean. Take the state of another island."
            )
        mean = None
        if agreed.elements:
            mean = np.empty(self.layout.elements, np.float32)
            mean_reader(agreed, body, self.layout)(0, mean)
        self._follow(outcome)
        name, roster = self._client.joined.island, roster_of(agreed)
        verdict = verdict_of(roster, name, self._sent_digest)
        self._settle_residual(verdict)
        entry = roster.entry(name)
        return RoundResult(
            agreed,
            mean,
            has_counted=verdict is wire.Verdict.COUNTED,
            reason=entry.reason if entry else "it came late",
        )

    def start_over(self) -> None:
        """Replace the state by the run's own state of the fragment."""
        self.state = fetch_state(self._client.exchange, self.index)
        self._client.hold(self.index, self.state)

    def pass_void(self, agreed: wire.Header) -> None:
        """Advance past a round that changed nothing."""
        if self.state.round == agreed.round - 1:
            self.state.apply(agreed, np.empty(0, np.uint8))
            self._client.hold(self.index, self.state)
        self.round = agreed.round + 1

    def _follow(self, outcome: Outcome) -> None:
        """Update the base of the next update; fetch it if the outcome does not fit."""
        agreed = outcome.agreed.header
        self.round = agreed.round + 1
        if self.state.round >= agreed.round:
            return
        if (self.state.round + 1, self.state.digest) == (agreed.round, agreed.base):
            self.state.apply(agreed, outcome.agreed.body, layout=self.layout)
        else:
            self.start_over()
        self._client.hold(self.index, self.state)
        self._client.bring(outcome.position, self.index, self.state, self._terms)

    def _seal(self, values: F32, step: int) -> Frame:
        joined, up = self._client.joined, self._terms.up
        seed = update_seed(joined.run, self.index, self.round, joined.island)
        body = np.empty(up.body_bytes(self.layout.elements), np.uint8)
        fields: dict[str, object] = {
            "codec": up.name,
            "seed": seed,
            "base": self.state.digest,
        }
        try:
            norm = seal(
                self.layout,
                None,
                values,
                body,
                up=up,
                seed=seed,
                residual=self._residual,
                residual_after=self._residual_after,
                decay=self._decay,
            )
        except NonFinite as exc:
            fields["refused"], body = wire.as_reason(str(exc)), np.empty(0, np.uint8)
        else:
            fields |= {"elements": self.layout.elements, "norm": norm}
        header = self._client.header(
            self.index, self.round, inner_steps=step + 1, tokens=0, **fields
        )
        return Frame(wire.with_body(header, body) if body.size else header, body)

    def _settle_residual(self, verdict: wire.Verdict) -> None:
        """Take the new residual if the update counted; clear it if it was refused."""
        if self._residual is None or self._residual_after is None:
            return
        if verdict is wire.Verdict.COUNTED:
            self._residual, self._residual_after = self._residual_after, self._residual
        elif verdict is wire.Verdict.REFUSED and self._sent_digest:
            self._residual[:] = 0.0
        self._sent_digest = b""
