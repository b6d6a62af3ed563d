"""A run whose rosters give its islands windows by a script."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from atoll.exchange import Exchange, Frame, Outcome
from atoll.protocol import Heartbeat, JoinReply, JoinRequest, Position, Reception
from atoll.wire import FrameKind, Header
from tests.island.scripted import ISLAND

WindowRule = Callable[[str, int], int]
"""Returns the window in an island's entry of a round, 0 for that of the schedule."""


class WindowRun:
    """An `Exchange` around another one, whose rosters have these windows."""

    def __init__(
        self, run: Exchange, window: WindowRule = lambda *_: 0, *, first: int = 0
    ) -> None:
        self._run, self._window, self._first = run, window, first
        self.state, self.leave = run.state, run.leave
        self.sealed: list[tuple[str, int, int]] = []
        """Island, fragment and inner steps of each update, in the order of arrival."""

        self.beats: list[Heartbeat] = []

    def join(self, request: JoinRequest) -> JoinReply:
        return replace(self._run.join(request), window=self._first)

    def heartbeat(self, beat: Heartbeat, *, at_once: bool = False) -> Position:
        self.beats.append(beat)
        return self._run.heartbeat(beat, at_once=at_once)

    def publish(self, frame: Frame) -> Reception:
        header = frame.header
        if header.kind is FrameKind.UPDATE:
            steps = header.progress.inner_steps
            self.sealed.append((header.island, header.fragment, steps))
        return self._run.publish(frame)

    def outcome(
        self, fragment: int, round: int, *, wait_s: float, has_body: bool = True
    ) -> Outcome | None:
        outcome = self._run.outcome(fragment, round, wait_s=wait_s, has_body=has_body)
        if outcome is None:
            return None
        header = with_windows(outcome.agreed.header, self._window)
        return replace(outcome, agreed=replace(outcome.agreed, header=header))

    def sealed_after(self, fragment: int = 0, island: str = ISLAND) -> list[int]:
        """Return the inner steps after which an island has sealed a fragment."""
        return [
            steps
            for name, index, steps in self.sealed
            if (name, index) == (island, fragment)
        ]


def with_windows(agreed: Header, window: WindowRule) -> Header:
    """Return an agreed header with these windows in its roster."""
    roster = agreed.roster
    assert roster is not None
    entries = tuple(
        replace(entry, window=window(entry.island, agreed.round))
        for entry in roster.entries
    )
    return replace(agreed, roster=replace(roster, entries=entries))
