"""A state goes from one island to others, through rounds of its own fragment.

Rule 1: the donor contributes one parcel per round, and everyone else takes part with
        an update that it refuses itself, so that nobody is waited for in vain.
Rule 2: every update names its handover, so that whoever comes late to one finds where
        it began, and passes by those of others.
Rule 3: a round without a parcel is tried again once: a donor that was late in one round
        is waited for in the next. After two, the donor has gone, and everyone goes on.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from atoll.errors import CorruptError
from atoll.exchange import Frame, Outcome
from atoll.integrations.torchft.parcels import Gathering, cut
from atoll.integrations.torchft.voice import Voice
from atoll.integrations.torchft.wants import roster_of
from atoll.island.entry import fetch_state
from atoll.weights import FragmentLayout, FragmentState, Terms, seal, terms_of
from atoll.weights.layout import F32
from atoll.wire import Header, codec, with_body

NOTHING = "torchft: another island gives its state"
PATIENT_ROUNDS = 2
"""So many rounds without a parcel end a handover."""


@dataclass
class Passage:
    """The fragment through which states go, as one island follows it."""

    voice: Voice
    index: int
    layout: FragmentLayout
    round: int
    """The next round of it that this island knows nothing of."""

    @property
    def max_bytes(self) -> int:
        """The largest state that is given or taken."""
        return self.voice.joined.settings.limits.max_body_bytes

    @property
    def _terms(self) -> Terms:
        return terms_of(self.layout, self.voice.joined.settings)

    def give(self, data: bytes, *, handover: int) -> None:
        """Send a state. Afterwards every island that took part has it, or has gone."""
        parcels = cut(data, elements=self.layout.elements, max_bytes=self.max_bytes)
        state = self._begin()
        self.round, missed = state.round + 1, 0
        while parcels and missed < PATIENT_ROUNDS:
            remaining = len(parcels) - 1
            frame = self._frame(parcels[0], state.digest, handover, remaining)
            self.voice.publish(frame)
            outcome = self.voice.outcome(self.index, self.round)
            self._follow(state, outcome)
            self.round += 1
            missed += 1
            if outcome.agreed.header.elements:
                parcels.pop(0)
                missed = 0

    def attend(self, *, handover: int) -> None:
        """Stand by while another island gives its state to third ones."""
        state, missed = self._begin(), 0
        while missed < PATIENT_ROUNDS:
            agreed = self._next(state, handover).agreed.header
            if _number_of(agreed) != handover:
                continue
            missed = 0 if agreed.elements else missed + 1
            if agreed.elements and _remaining(agreed) == 0:
                return

    def take(self, *, handover: int) -> bytes | None:
        """Return the state that is given; None: its donor has gone before the end."""
        gathering, missed = Gathering(max_bytes=self.max_bytes), 0
        state = self._begin()
        while missed < PATIENT_ROUNDS:
            outcome = self._next(state, handover)
            agreed = outcome.agreed.header
            if _number_of(agreed) != handover:
                continue
            if not agreed.elements:
                missed += 1
                continue
            missed = 0
            if not outcome.has_body:
                return None  # it came so late that a part is kept no more
            gathering.add(self._parcel(outcome))
            if _remaining(agreed) == 0:
                return gathering.data()
        return None

    def _begin(self) -> FragmentState:
        """Return the run's state of the fragment: who knows it can close a round."""
        state = fetch_state(self.voice.exchange, self.index)
        self.voice.hold(self.index, state)
        return state

    def _next(self, state: FragmentState, handover: int) -> Outcome:
        """Return the outcome of the next round, and take part in it if it is open."""
        outcome = self.voice.look(self.index, self.round)
        if outcome is None:
            self.voice.refuse(self.index, self.round, NOTHING, inner_steps=handover)
            outcome = self.voice.outcome(self.index, self.round)
        self._follow(state, outcome)
        self.round += 1
        return outcome

    def _follow(self, state: FragmentState, outcome: Outcome) -> None:
        """Keep up with the fragment; a round that the state has already is past."""
        agreed = outcome.agreed.header
        if agreed.round != state.round + 1 or not outcome.has_body:
            return
        state.apply(agreed, outcome.agreed.body)
        self.voice.hold(self.index, state)
        self.voice.bring(outcome.position, self.index, state, self._terms)

    def _frame(self, parcel: F32, base: bytes, handover: int, remaining: int) -> Frame:
        body = np.empty(parcel.nbytes, np.uint8)
        up = self._terms.up
        norm = seal(self.layout, None, parcel, body, up=up)
        header = self.voice.header(
            self.index,
            self.round,
            inner_steps=handover,
            tokens=remaining,
            base=base,
            codec=up.name,
            elements=self.layout.elements,
            norm=norm,
        )
        return Frame(with_body(header, body), body)

    def _parcel(self, outcome: Outcome) -> F32:
        agreed = outcome.agreed.header
        if agreed.elements != self.layout.elements:
            raise CorruptError(
                f"A parcel of {agreed.elements} elements came, and parcels have "
                f"{self.layout.elements}. Ask for the state again."
            )
        parcel = np.empty(agreed.elements, np.float32)
        codec(agreed.codec).decode(outcome.agreed.body, parcel)
        return parcel


def _number_of(agreed: Header) -> int:
    """Return which handover a round belongs to: that of its donor, if it had one."""
    roster = roster_of(agreed)
    entries = roster.counted or roster.entries
    return max(entry.inner_steps for entry in entries)


def _remaining(agreed: Header) -> int:
    (entry,) = roster_of(agreed).counted
    return entry.tokens
