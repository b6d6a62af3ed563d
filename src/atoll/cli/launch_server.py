"""The coordinator that was launched with islands, by the word of its engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from atoll.errors import Unreachable
from atoll.launch.launching import Launched
from atoll.launch.states import Report, State
from atoll.launch.summary import LAST_LINES, failures

ENDS_S = 120.0
"""How long one that cannot be asked may take to end after its islands: it lingers, some
that went without a word live for a lease, and its engine has to notice."""


class Server:
    """Watches a launch that serves the run until its end."""

    def __init__(self, launched: Launched) -> None:
        self.launched = launched
        self._is_elsewhere = launched.launcher.traits.is_elsewhere
        self.reports: tuple[Report, ...] = ()

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

    def end(self) -> None:
        """Let it go, if it does not by itself."""
        self.launched.cancel()


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
    why = f": {now.why}" if now.why else ""
    life = f" (restart {now.restarts})" if now.restarts else ""
    return [f"{now.name} is {now.state.value}{life}{why}"]
