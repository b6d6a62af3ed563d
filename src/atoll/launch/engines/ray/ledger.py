"""What became of the islands of a launch, kept by an actor that needs no resources.

An island's actor gives its place back when the island is over; what it said and how it
ended is here. The ledger itself ends a day after the last island.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from atoll.launch.states import Report, State

SILENT_S = 30.0
"""After so long without a word an island's actor is not believed to be there."""

MAX_LINES = 100_000
"""Of each island that are kept: the last ones."""


@dataclass
class Entry:
    """One island."""

    report: Report
    lives: int = 0
    """Actors that have begun: one, and one more for every node that was lost."""

    heard_at_s: float | None = None
    is_to_go: bool = False
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=MAX_LINES))
    num_lines: int = 0
    """That were ever said."""


class Ledger:
    """The islands of one launch. Ray calls one method at a time."""

    def __init__(
        self,
        names: dict[int, str],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._now_s = now_s
        self._entries = {
            index: Entry(Report(index=index, name=name, state=State.PENDING))
            for index, name in names.items()
        }

    def begun(self, index: int, is_again: bool = False) -> tuple[int, bool]:
        """Return which life an actor is, and whether its island is to go.

        One that is another's successor is at least the second, whatever was lost here.
        """
        entry = self._entries[index]
        entry.lives = max(entry.lives, int(is_again)) + 1
        entry.heard_at_s = self._now_s()
        return entry.lives, entry.is_to_go or entry.report.state.is_over

    def hear(self, index: int, life: int, said: dict[str, Any], new: list[str]) -> bool:
        """Take an actor's word; return whether the island is to go.

        The word of a life before the present one is too late. One that is not known
        yet is believed: a ledger that has lost its node begins with nothing.
        """
        entry = self._entries[index]
        if life < entry.lives or entry.report.state.is_over:
            return True
        entry.lives = life
        entry.heard_at_s = self._now_s()
        entry.report = Report(**{**said, "state": State(said["state"])})
        entry.lines.extend(new)
        entry.num_lines += len(new)
        return entry.is_to_go

    def ask_to_go(self, indexes: list[int]) -> list[tuple[int, bool, bool]]:
        """Note who is to go.

        Returns for each that is not over: its index, whether its actor has begun, and
        whether it was asked before.
        """
        found = []
        for index in indexes:
            entry = self._entries.get(index)
            if entry is not None and not entry.report.state.is_over:
                found.append((index, entry.lives > 0, entry.is_to_go))
                entry.is_to_go = True
        return found

    def ended(self, index: int) -> None:
        """Note that an island was ended without its own word."""
        entry = self._entries[index]
        if not entry.report.state.is_over:
            entry.report = replace(entry.report, state=State.CANCELLED, why="")

    def reports(self) -> list[dict[str, Any]]:
        """Return what is known of every island, and for how long nobody spoke."""
        now_s = self._now_s()
        said = []
        for entry in self._entries.values():
            lost = max(0, entry.lives - 1)
            report = replace(entry.report, restarts=entry.report.restarts + lost)
            silent_s = 0.0 if entry.heard_at_s is None else now_s - entry.heard_at_s
            form = {**vars(report), "state": report.state.value}
            said.append(form | {"silent_s": silent_s, "has_begun": entry.lives > 0})
        return said

    def lines(self, index: int, after: int) -> list[str]:
        """Return what an island has said, without the first lines."""
        entry = self._entries.get(index)
        if entry is None:
            return []
        num_dropped = entry.num_lines - len(entry.lines)
        return list(islice(entry.lines, max(0, after - num_dropped), None))

    def is_over(self) -> bool:
        """Return whether nothing becomes of any island any more."""
        return all(each.report.state.is_over for each in self._entries.values())
