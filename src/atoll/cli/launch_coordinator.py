"""The coordinator that was launched with islands, by the word of its engine."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

import typer

from atoll.errors import RemoteError, Unreachable
from atoll.launch.api import LAST_LINES, Launched, Patience, failures
from atoll.launch.base import Report, State

STARTS_S = 90.0
LOOK_S = 0.1
ENDS_S = 120.0
"""How long one that cannot be asked may take to end after its islands: it lingers, some
that went without a word live for a lease, and its engine has to notice."""


class CoordinatorLaunch:
    """Watches a launch that serves the run until its end."""

    def __init__(self, launched: Launched) -> None:
        self.launched = launched
        self._is_elsewhere = launched.launcher.traits.is_elsewhere
        self.reports: tuple[Report, ...] = ()
        self._told_at_s: float | None = None

    @property
    def has_finished(self) -> bool:
        """Whether the run has ended: `serve --until-end` finishes for no other cause.

        Elsewhere only its leader could tell it to go, and would say so; on machines
        that this user works on anybody could, for which it ends with 0 as well.
        """
        return self._is_elsewhere and self._is(State.FINISHED)

    @property
    def is_gone(self) -> bool:
        """Whether it has not finished, and nobody can serve its run again.

        Where its directory is this user's somebody can: `atoll serve --dir`.
        """
        is_over = self._is(State.FAILED, State.LOST, State.CANCELLED)
        return self._is_elsewhere and is_over

    @property
    def is_over(self) -> bool:
        """Whether nothing becomes of it any more."""
        return any(each.state.is_over for each in self.reports)

    def _is(self, *states: State) -> bool:
        return any(each.state in states for each in self.reports)

    def look(self) -> list[str]:
        """Ask its engine, and return what there is to tell.

        What is over stays as it was: an engine may forget it before its islands.
        """
        before = self.reports[0] if self.reports else None
        if before is None or not before.state.is_over:
            self.reports = self.launched.poll()
        return change(before, self.reports[0])

    def end(self) -> list[str]:
        """Let it go, and return what there is to tell if it stays all the same.

        It is told once: an engine may take it for another order if that is said again.
        """
        if self._told_at_s is None:
            self.launched.cancel()
            self._told_at_s = time.monotonic()
        self.look()
        if self.is_over or time.monotonic() < self._told_at_s + ENDS_S:
            return []
        handle = self.launched.handle
        return [
            f"atoll: {handle.engine} was told to end {handle.id}, which runs still. "
            "Look again: atoll ps"
        ]


def facts_of(
    launched: Launched, *, starts_s: float = STARTS_S, look_s: float = LOOK_S
) -> dict[str, Any]:
    """Return what a coordinator says of itself, once it listens.

    Raises:
        RemoteError: it did not start, within `starts_s` from when it runs on.
        Unreachable: its engine has not answered for too long.
    """
    until_s, patience = time.monotonic() + starts_s, Patience()
    before, said = None, list[str]()
    while time.monotonic() < until_s:
        report, said = _seen(launched, patience) or (None, said)
        if report is None or report.state is State.PENDING:
            # An engine may be full, or away, for as long as it is.
            until_s = time.monotonic() + starts_s
        _tell_waiting(before, report)
        for line in said:
            if (facts := _facts(line)) is not None:
                _tell_notes(said)
                return facts
        if report is not None and (report.restarts or report.state.is_over):
            break
        before = report or before
        time.sleep(look_s)
    tail = " ".join(line for line in said[-5:] if not line.startswith("atoll: coord"))
    raise RemoteError(f"The coordinator did not start: {tail or 'it said nothing'}")


def _seen(launched: Launched, patience: Patience) -> tuple[Report, list[str]] | None:
    """Return what became of a coordinator and what it has said; None if none tells."""
    try:
        (report,) = launched.poll()
        said = launched.logs()[report.name]
        patience.answered()
        return report, said
    except Unreachable as exc:
        for line in patience.bear(exc):
            typer.echo(line, err=True)
        return None


def _tell_waiting(before: Report | None, now: Report | None) -> None:
    if now is None or now.state is not State.PENDING:
        return
    if now.reason not in ("", before.reason if before else ""):
        typer.echo(f"atoll: {now.name} waits: {now.reason}", err=True)


def _facts(line: str) -> dict[str, Any] | None:
    try:
        said = json.loads(line)
    except ValueError:
        return None
    return said if isinstance(said, dict) and "url" in said else None


def _tell_notes(said: Sequence[str]) -> None:
    for line in said:
        if line.startswith("atoll: "):
            typer.echo(line, err=True)


def failures_of(launched: Launched, reports: Sequence[Report]) -> Iterator[str]:
    """Yield why those of a launch failed that did, with their last words."""

    def last_lines(report: Report) -> list[str]:
        try:
            return launched.launcher.logs(launched.handle, report.index)[-LAST_LINES:]
        except Unreachable as exc:
            return [f"(its log cannot be read: {exc})"]

    yield from failures(reports, last_lines)


def change(before: Report | None, now: Report) -> list[str]:
    """Return the line that tells of a new state, if it is one."""
    if before is not None and (before.state, before.restarts) == (
        now.state,
        now.restarts,
    ):
        return []
    why = f": {now.reason}" if now.reason else ""
    life = f" (restart {now.restarts})" if now.restarts else ""
    return [f"{now.name} is {now.state.value}{life}{why}"]
