"""One fragment of what is reduced: the update that goes, and the mean that comes.

The run's anchor is bookkeeping here: it begins at zero, every mean is taken from it,
and its digest is the base that updates name. What training gets is the mean itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from atoll.errors import NonFinite, OutcomeLost
from atoll.exchange import Frame, Outcome
from atoll.integrations.torchft.voice import Voice
from atoll.integrations.torchft.wants import ABSTAINS, roster_of
from atoll.island.entry import fetch_state
from atoll.island.identity import update_seed
from atoll.protocol import verdict_of
from atoll.weights import FragmentLayout, FragmentState, seal, terms_of
from atoll.weights.layout import F32
from atoll.wire import Header, Verdict, as_reason, codec, update_digest, with_body


@dataclass(frozen=True)
class Taken:
    """What one step's round came to."""

    agreed: Header
    mean: F32 | None
    """None: the round is void."""

    has_counted: bool
    """Whether this island's own values are in the mean."""

    reason: str
    """Why they are not, as the roster says; nothing when they are."""


class Lane:
    """State and residual of one fragment. One thread at a time touches it."""

    def __init__(
        self, voice: Voice, index: int, layout: FragmentLayout, state: FragmentState
    ) -> None:
        self._voice, self.index, self.layout = voice, index, layout
        self._terms = terms_of(layout, voice.joined.settings)
        self._decay = voice.joined.settings.wire.error_feedback_decay
        self.state = state
        voice.hold(index, state)
        self.round = state.round + 1
        """The next round whose mean training takes; the state may be ahead of it."""

        self.standing = 0
        """The last round in which something of this life stands: it said its word."""

        self.abstains_through = 0
        """Up to this round the weights hold another island's work, which it counts."""

        self._residual = self._residual_after = None
        if self._terms.has_feedback:
            self._residual = np.zeros(layout.elements, np.float32)
            self._residual_after = np.zeros(layout.elements, np.float32)
        self._sent = b""

    def publish(self, values: F32, *, step: int) -> None:
        """Contribute to the next round; nothing, if this life has spoken in it."""
        if self.standing >= self.round:
            return
        is_behind = self.state.round != self.round - 1
        if is_behind or self.round <= self.abstains_through:
            self._voice.refuse(self.index, self.round, ABSTAINS, inner_steps=step + 1)
        else:
            frame = self._seal(values, step)
            self._sent = update_digest(frame.header)
            self._voice.publish(frame)
        self.standing = self.round

    def take(self, outcome: Outcome) -> Taken:
        """Return the mean of the round, and go on to the next.

        Raises:
            OutcomeLost: the run keeps the mean no more.
        """
        agreed, body = outcome.agreed.header, outcome.agreed.body
        if not outcome.has_body:
            raise OutcomeLost(
                f"Round {agreed.round} of fragment {self.index} is over, and the run "
                "keeps its mean no more. Take the state of another island."
            )
        mean = None
        if agreed.elements:
            mean = np.empty(self.layout.elements, np.float32)
            codec(agreed.codec).decode(body, mean)
        self._follow(outcome)
        name, roster = self._voice.joined.island, roster_of(agreed)
        verdict = verdict_of(roster, name, self._sent)
        self._settle_residual(verdict)
        entry = roster.entry(name)
        return Taken(
            agreed,
            mean,
            has_counted=verdict is Verdict.COUNTED,
            reason=entry.reason if entry else "it came late",
        )

    def start_over(self) -> None:
        """Take the run's own state of the fragment."""
        self.state = fetch_state(self._voice.exchange, self.index)
        self._voice.hold(self.index, self.state)

    def pass_void(self, agreed: Header) -> None:
        """Go on past a round that moved nothing."""
        if self.state.round == agreed.round - 1:
            self.state.apply(agreed, np.empty(0, np.uint8))
            self._voice.hold(self.index, self.state)
        self.round = agreed.round + 1

    def _follow(self, outcome: Outcome) -> None:
        """Keep the base of the next update; one that is wrong is taken from the run."""
        agreed = outcome.agreed.header
        self.round = agreed.round + 1
        if self.state.round >= agreed.round:
            return
        if (self.state.round + 1, self.state.digest) == (agreed.round, agreed.base):
            self.state.apply(agreed, outcome.agreed.body)
        else:
            self.start_over()
        self._voice.hold(self.index, self.state)
        self._voice.bring(outcome.position, self.index, self.state, self._terms)

    def _seal(self, values: F32, step: int) -> Frame:
        joined, up = self._voice.joined, self._terms.up
        seed = update_seed(joined.run, self.index, self.round, joined.island)
        body = np.empty(up.body_bytes(self.layout.elements), np.uint8)
        said: dict[str, object] = {
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
            said["refused"], body = as_reason(str(exc)), np.empty(0, np.uint8)
        else:
            said |= {"elements": self.layout.elements, "norm": norm}
        header = self._voice.header(
            self.index, self.round, inner_steps=step + 1, tokens=0, **said
        )
        return Frame(with_body(header, body) if body.size else header, body)

    def _settle_residual(self, verdict: Verdict) -> None:
        """Keep what the codec left over if the update counted, else what was before."""
        if self._residual is None or self._residual_after is None:
            return
        if verdict is Verdict.COUNTED:
            self._residual, self._residual_after = self._residual_after, self._residual
        elif verdict is Verdict.REFUSED and self._sent:
            self._residual[:] = 0.0
        self._sent = b""
