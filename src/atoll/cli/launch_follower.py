"""Follows a launch: prints the output of its islands, and a table of their states.

On a terminal the table is redrawn below the output; elsewhere every change of state is
a line, and the table is printed once, at the end.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import typer

from atoll.cli.launch_coordinator import (
    ENDS_S,
    CoordinatorLaunch,
    change_lines,
    failure_lines,
)
from atoll.cli.launches import table_lines
from atoll.cli.terminal import can_redraw
from atoll.errors import Unreachable
from atoll.launch.api import Launched, PollRetry, rows
from atoll.launch.base import Report, State
from atoll.launch.run_status import Looks, RunLook

NEAR_S, FAR_S = 0.5, 5.0
"""Between two polls of this machine's islands, and of those of remote engines."""

SOON_S = 0.1
"""Between two polls while the coordinator ends on this machine; elsewhere `NEAR_S`."""

STATUS_S = 1.0
"""How long to wait for the end of the run in its status, once all islands ended."""


class LaunchFollower:
    """Follows islands until all have ended; cancels them when it is interrupted."""

    def __init__(
        self,
        launched: Launched,
        coordinator: Launched | None,
        *,
        is_in_sight: bool = True,
    ) -> None:
        self._launched = launched
        self._coordinator = (
            None if coordinator is None else CoordinatorLaunch(coordinator)
        )
        # A coordinator out of reach is known by the reports of its engine alone.
        self._looks = Looks(launched.handle.run) if is_in_sight else None
        self._reports: tuple[Report, ...] = ()
        self._num_read = dict.fromkeys(launched.handle.indexes, 0)
        self._can_redraw = can_redraw(sys.stdout)
        self._num_drawn = 0
        self._is_asked_to_leave = self._is_cancelled = self._is_orphaned = False
        self._poll_patience, self._cancel_patience = PollRetry(), PollRetry()
        is_elsewhere = launched.launcher.traits.is_elsewhere
        self._every_s = FAR_S if is_elsewhere else NEAR_S
        self._soon_s = NEAR_S if is_elsewhere else SOON_S

    def follow(self) -> bool:
        """Return whether the run has finished, once no island is left.

        The first SIGINT or SIGTERM makes the islands leave; the second has its default
        effect.
        """
        with _interruptions() as signals:
            while not self._is_over():
                self._poll()
                self._end(is_interrupted=bool(signals))
                time.sleep(0.0 if self._is_over() else self._every_s)
            self._poll()
            self._end_coordinator()
        self._show_end()
        return self._has_ended

    @property
    def was_interrupted(self) -> bool:
        """Whether a signal has interrupted it."""
        return self._is_asked_to_leave and not self._is_orphaned

    def _is_over(self) -> bool:
        return bool(self._reports) and all(
            report.state.is_over for report in self._reports
        )

    @property
    def _look(self) -> RunLook | None:
        return self._looks.newest if self._looks else None

    @property
    def _has_ended(self) -> bool:
        if self._look is not None and self._look.has_ended:
            return True
        return self._coordinator is not None and self._coordinator.has_finished

    def _poll(self) -> None:
        if self._looks is not None:
            self._looks.look(at_once=self._is_over())
        before = {report.index: report for report in self._reports}
        lines: list[str] = []
        try:
            self._reports = self._launched.poll()
            changes = self._coordinator.look() if self._coordinator else []
            if self._looks is None and not self._can_redraw:
                lines += changes
            for line in self._new_lines():
                lines.append(line)  # one by one: lines read before an error are kept
            self._poll_patience.answered()
        except Unreachable as exc:
            lines += self._poll_patience.bear(exc)
        if not self._can_redraw:
            for report in self._reports:
                lines += change_lines(before.get(report.index), report)
        self._draw(lines)

    def _new_lines(self) -> Iterator[str]:
        handle, launcher = self._launched.handle, self._launched.launcher
        for index, after in self._num_read.items():
            lines = launcher.logs(handle, index, after=after)
            self._num_read[index] = after + len(lines)
            yield from (f"{handle.island(index)} | {line}" for line in lines)

    def _draw(self, lines: Sequence[str], *, is_last: bool = False) -> None:
        if self._num_drawn:
            typer.echo(f"\x1b[{self._num_drawn}F\x1b[J", nl=False)
            self._num_drawn = 0
        for line in lines:
            typer.echo(line)
        if self._can_redraw and not is_last:
            page = self._page_lines()
            typer.echo("\n".join(page))
            self._num_drawn = len(page)

    def _page_lines(self) -> list[str]:
        metrics: Mapping[str, Any] = self._look.islands if self._look else {}
        # The state of a run out of reach shows only in the report of its coordinator.
        coordinator = self._coordinator if self._looks is None else None
        shown = [*self._reports, *(coordinator.reports if coordinator else ())]
        lines = ["", *table_lines(rows(shown, metrics), left_columns=2)]
        if self._look is not None:
            last = self._look.last_round
            of_last = f" of {last}" if last is not None else ""
            lines += [
                "",
                f"run {self._look.run}: {self._look.state}, "
                f"round {self._look.round}{of_last}. {self._look.reason}".rstrip(),
            ]
        return lines

    def _end(self, *, is_interrupted: bool) -> None:
        """Cancel islands that must not run; a cancel that failed is repeated."""
        with self._tolerate_silence():
            if is_interrupted and not self._is_cancelled:
                self._ask_to_leave()
            self._cancel_waiting()
            self._cancel_orphans()

    def _ask_to_leave(self) -> None:
        if not self._is_asked_to_leave:
            leaving = (
                "atoll: islands are leaving; interrupt again to exit without them."
            )
            self._draw([leaving])
        self._is_asked_to_leave = True
        self._launched.cancel()
        self._is_cancelled = True

    def _cancel_waiting(self) -> None:
        """Cancel islands that would start for a run that has ended."""
        if not self._has_ended:
            return
        waiting = (State.PENDING, State.RESTARTING)
        late = [report.index for report in self._reports if report.state in waiting]
        can_some = self._launched.launcher.traits.can_cancel_some
        if late and (can_some or len(late) == len(self._reports)):
            self._launched.cancel(late if can_some else None)

    def _cancel_orphans(self) -> None:
        """Cancel islands if their coordinator has ended and cannot be restarted."""
        is_gone = self._coordinator is not None and self._coordinator.is_gone
        if not is_gone or self._has_ended or self._is_cancelled:
            return
        if not self._is_asked_to_leave:
            self._is_orphaned = self._is_asked_to_leave = True
            self._draw(["atoll: the run's coordinator is gone; islands are ended."])
        self._launched.cancel()
        self._is_cancelled = True

    def _end_coordinator(self) -> None:
        """Wait a moment for the end of the run, then cancel the coordinator."""
        if self._coordinator is None:
            return
        until_s = time.monotonic() + self._end_timeout_s()
        while time.monotonic() < until_s and not self._has_ended:
            self._look_for_end(self._coordinator)
            time.sleep(self._soon_s)
        self._cancel_coordinator(self._coordinator)

    def _look_for_end(self, coordinator: CoordinatorLaunch) -> None:
        if self._looks is not None:
            self._looks.look()
            return
        with self._tolerate_silence():
            coordinator.look()

    def _end_timeout_s(self) -> float:
        """Return how long to wait for the end of the run."""
        if self._looks is not None:
            return STATUS_S
        is_likely = any(report.state is State.FINISHED for report in self._reports)
        is_gone = self._coordinator is None or self._coordinator.is_gone
        return ENDS_S if is_likely and not is_gone else 0.0

    def _cancel_coordinator(self, coordinator: CoordinatorLaunch) -> None:
        lines: list[str] = []
        while not (coordinator.is_over or lines):
            with self._tolerate_silence():
                lines = coordinator.end()
            time.sleep(0.0 if coordinator.is_over else self._soon_s)
        self._draw(lines)

    @contextmanager
    def _tolerate_silence(self) -> Iterator[None]:
        """Continue while an engine does not answer a request to cancel."""
        try:
            yield
            self._cancel_patience.answered()
        except Unreachable as exc:
            self._draw(self._cancel_patience.bear(exc))

    def _show_end(self) -> None:
        self._draw(self._page_lines(), is_last=True)
        lines = [*failure_lines(self._launched, self._reports)]
        if self._coordinator is not None:
            lines += failure_lines(
                self._coordinator.launched, self._coordinator.reports
            )
        for line in lines:
            typer.echo(line, err=True)


@contextmanager
def _interruptions() -> Iterator[list[int]]:
    """Give a list of received signals; the first one restores the handlers."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    handlers = {number: signal.getsignal(number) for number in numbers}
    signals: list[int] = []

    def note(number: int, frame: object) -> None:
        signals.append(number)
        for number, before in handlers.items():
            signal.signal(number, before)

    for number in numbers:
        signal.signal(number, note)
    try:
        yield signals
    finally:
        for number, before in handlers.items():
            signal.signal(number, before)
