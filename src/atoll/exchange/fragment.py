"""One fragment of a run in memory: its state, its open round, its outcomes."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from atoll.errors import Refused
from atoll.exchange.base import Frame
from atoll.protocol import Reception, judge_updates
from atoll.protocol.counted import Counted
from atoll.protocol.judge import Norms, norms_after
from atoll.settings import RunSettings
from atoll.weights import (
    FragmentLayout,
    FragmentState,
    agree,
    require_state,
    require_update,
    terms_of,
)
from atoll.wire import Kind, Roster, update_digest

KEPT_BODIES = 2
"""Agreed bodies kept for islands that come late; rosters are kept for good."""


class RunFragment:
    """State and rounds of one fragment. The run's lock guards every call."""

    def __init__(
        self, run: str, index: int, layout: FragmentLayout, settings: RunSettings
    ) -> None:
        self.run, self.index, self.layout, self.settings = run, index, layout, settings
        self.terms = terms_of(layout, settings)
        self.candidates: set[str] = set()
        self.outcomes: dict[int, Frame] = {}
        self.counted_in: dict[str, int] = {}
        """The last round that counted each island."""
        self.counted: dict[str, tuple[int, int]] = {}
        """Inner steps and tokens of each island that ever counted, cumulative."""
        self._staged: dict[int, dict[str, Frame]] = {}
        self._state: FragmentState | None = None
        self._bases: set[bytes] = set()
        self._norms: Norms = {}

    @property
    def is_founded(self) -> bool:
        return self._state is not None

    @property
    def state(self) -> FragmentState:
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
        require_state(frame.header, self.layout, self.terms, round=0)
        self._state = FragmentState.from_frame(frame.header, frame.body.copy())
        self._bases.add(self._state.digest)

    def last_counted(self, island: str) -> Counted | None:
        """Return the last update of an island that counted, if any has."""
        if island not in self.counted_in:
            return None
        inner_steps, tokens = self.counted[island]
        return Counted(
            round=self.counted_in[island], inner_steps=inner_steps, tokens=tokens
        )

    def state_frame(self) -> Frame:
        return Frame(
            *self.state.to_frame(
                run=self.run, fragment=self.index, outer=self.terms.outer
            )
        )

    def stage(self, frame: Frame) -> Reception:
        """Hold an update for its round, and say whether it stands.

        One whose round is over changes nothing, nor does one whose island spoke for
        the round in an earlier life: what that life sent stands.
        """
        header = frame.header
        if header.round < self.open_round:
            return Reception.COMMITTED
        furthest = self.open_round + (header.kind is Kind.DEPARTING)
        if header.round > furthest:
            raise Refused(
                f"Round {header.round} of fragment {self.index} cannot be published "
                f"yet: round {self.open_round} is open."
            )
        staged = self._staged.setdefault(header.round, {})
        if header.island not in staged:
            require_update(header, frame.body, self.layout, self.terms)
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
            *agree(
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
