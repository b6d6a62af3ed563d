"""A run whose rounds close by a script, for one island under test.

It is made of the same fragments as `MemoryRun`; only when a round closes, and whether
the island's update is in time, is the script's affair.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from atoll.exchange import Frame, Outcome
from atoll.exchange.memory import MemoryFragment
from atoll.protocol import (
    Heartbeat,
    JoinReply,
    JoinRequest,
    Position,
    Reception,
    judge_updates,
)
from atoll.protocol.events import CloseRound
from atoll.settings import RunSettings
from atoll.weights import lay_out
from atoll.wire import FrameKind, Header, with_body

ISLAND = "i"
BUFFER = 4
"""Of an asynchronous run."""

PASSED = {"passed": 1, "passed thrice": 3}
"""How many rounds go by after the one that counted an update."""


class ScriptedRun:
    """An `Exchange` that counts or misses each update as its script says.

    A missed round commits with the zeros of another island, like any round whose
    deadline has passed; `passes` more rounds may then go by. In an asynchronous run the
    round after a missed one counts the update.
    """

    def __init__(
        self, settings: RunSettings, script: Iterator[str], *, others: float = 0.0
    ) -> None:
        self.settings, self.script, self.others = settings, script, others
        self.fragments: list[MemoryFragment] = []
        self.published: list[Frame] = []
        self.bases: set[bytes] = set()
        self.asked: list[tuple[int, bool]] = []
        """The rounds whose outcomes were requested, and whether with their bodies."""

        self.states = 0
        """Number of requests for a state."""

    def join(self, request: JoinRequest) -> JoinReply:
        self.fragments = [
            MemoryFragment("run", index, layout, self.settings)
            for index, layout in enumerate(lay_out(request.model, self.settings))
        ]
        return JoinReply(
            run="run",
            island=ISLAND,
            incarnation=1,
            slot=0,
            settings=self.settings,
            epoch=0,
            position=self._position(),
            is_founder=True,
        )

    def heartbeat(self, beat: Heartbeat, *, at_once: bool = False) -> Position:
        return self._position()

    def publish(self, frame: Frame) -> Reception:
        fragment = self.fragments[frame.header.fragment]
        if frame.header.kind is FrameKind.STATE:
            fragment.found(frame)
            return Reception.STAGED
        self.published.append(frame)
        fate, is_async = next(self.script), self.settings.sync.is_async
        if fate == "missed":
            self._close(fragment, self._zeros(fragment))
        if is_async or fate != "missed":
            self._close(fragment, frame)
        for _ in range(PASSED.get(fate, 0)):
            self._close(fragment, self._zeros(fragment))
        is_late = fate == "missed" and not is_async
        return Reception.COMMITTED if is_late else Reception.STAGED

    def outcome(
        self, fragment: int, round: int, *, wait_s: float, has_body: bool = True
    ) -> Outcome | None:
        self.asked.append((round, has_body))
        return Outcome(self.fragments[fragment].outcomes[round], self._position())

    def state(self, fragment: int) -> Frame:
        self.states += 1
        return self.fragments[fragment].state_frame()

    def leave(self, island: str, incarnation: int) -> None:
        pass

    def pass_rounds(self, count: int, *, fragment: int = 0) -> None:
        """Commit rounds with the zeros of another island."""
        for _ in range(count):
            self._close(self.fragments[fragment], self._zeros(self.fragments[fragment]))

    def _position(self) -> Position:
        rounds = tuple(
            fragment.state.round + 1 if fragment.is_founded else 1
            for fragment in self.fragments
        )
        last = self.settings.run.end_rounds
        return Position(step=0, rounds=rounds or (1,), last_round=last)

    def _close(self, fragment: MemoryFragment, frame: Frame) -> None:
        """Commit a round with one update."""
        header, round = frame.header, fragment.state.round + 1
        roster = judge_updates(
            [header],
            round=round,
            base=fragment.state.digest,
            known_bases=self.bases,
            norms={},
            window_of=lambda _: 1,
            counted=lambda _: None,
            settings=self.settings,
        )
        self.bases.add(fragment.state.digest)
        close = CloseRound(
            fragment=fragment.index,
            round=round,
            roster=roster,
            staged=(header,),
            outer=fragment.terms.outer,
            epoch=0,
            buffer=BUFFER if self.settings.sync.is_async else 0,
        )
        fragment.commit(close, {header.island: frame})

    def _zeros(self, fragment: MemoryFragment) -> Frame:
        up, elements = fragment.terms.up, fragment.layout.elements
        body = np.empty(up.body_bytes(elements), np.uint8)
        up.encode(np.full(elements, self.others, np.float32), body)
        header = Header(
            kind=FrameKind.UPDATE,
            run="run",
            fragment=fragment.index,
            round=fragment.state.round + 1,
            island="other",
            incarnation=1,
            base=fragment.state.digest,
            codec=up.name,
            elements=elements,
        )
        return Frame(replace(with_body(header, body)), body)
