"""What a launch shows while somebody watches: its islands' words, and a table.

On a terminal the table stays below what islands say; elsewhere every change is a line,
and the table comes once, at the end.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import typer

from atoll.cli.launch_coordinator import ENDS_S, CoordinatorLaunch, change, failures_of
from atoll.cli.launches import table_lines
from atoll.cli.terminal import can_redraw
from atoll.errors import Unreachable
from atoll.launch.api import Launched, Patience, rows
from atoll.launch.base import Report, State
from atoll.launch.run_status import Looks, RunLook

NEAR_S, FAR_S = 0.5, 5.0
"""Between two looks: at this machine's islands, and at those of engines elsewhere."""

SOON_S = 0.1
"""Between two looks at what ends, on this machine; elsewhere it is `NEAR_S`."""

SPOKE_S = 1.0


class Following:
    """Watches islands until all are over, and lets them go when it is told to."""

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
        # What cannot be asked is known by its engine's word alone.
        self._looks = Looks(launched.handle.run) if is_in_sight else None
        self._reports: tuple[Report, ...] = ()
        self._read = dict.fromkeys(launched.handle.indexes, 0)
        self._can_redraw = can_redraw(sys.stdout)
        self._drawn = 0
        self._is_told = self._is_going = self._is_alone = False
        self._asking, self._ending = Patience(), Patience()
        is_elsewhere = launched.launcher.traits.is_elsewhere
        self._every_s = FAR_S if is_elsewhere else NEAR_S
        self._soon_s = NEAR_S if is_elsewhere else SOON_S

    def follow(self) -> bool:
        """Return whether the run has finished, once no island is left.

        The first SIGINT or SIGTERM tells the islands to leave; the second is the usual.
        """
        with _interruptions() as heard:
            while not self._is_over():
                self._see()
                self._end(is_told=bool(heard))
                time.sleep(0.0 if self._is_over() else self._every_s)
            self._see()
            self._settle()
        self._show_end()
        return self._has_ended

    @property
    def was_told(self) -> bool:
        """Whether somebody has interrupted it."""
        return self._is_told and not self._is_alone

    def _is_over(self) -> bool:
        return bool(self._reports) and all(it.state.is_over for it in self._reports)

    @property
    def _look(self) -> RunLook | None:
        return self._looks.newest if self._looks else None

    @property
    def _has_ended(self) -> bool:
        if self._look is not None and self._look.has_ended:
            return True
        return self._coordinator is not None and self._coordinator.has_finished

    def _see(self) -> None:
        if self._looks is not None:
            self._looks.look(at_once=self._is_over())
        before = {each.index: each for each in self._reports}
        lines: list[str] = []
        try:
            self._reports = self._launched.poll()
            changes = self._coordinator.look() if self._coordinator else []
            if self._looks is None and not self._can_redraw:
                lines += changes
            for line in self._new_lines():
                lines.append(line)  # one by one: what was read is told in any case
            self._asking.answered()
        except Unreachable as exc:
            lines += self._asking.bear(exc)
        if not self._can_redraw:
            for each in self._reports:
                lines += change(before.get(each.index), each)
        self._draw(lines)

    def _new_lines(self) -> Iterator[str]:
        handle, launcher = self._launched.handle, self._launched.launcher
        for index, after in self._read.items():
            said = launcher.logs(handle, index, after=after)
            self._read[index] = after + len(said)
            yield from (f"{handle.island(index)} | {line}" for line in said)

    def _draw(self, lines: Sequence[str], *, is_last: bool = False) -> None:
        if self._drawn:
            typer.echo(f"\x1b[{self._drawn}F\x1b[J", nl=False)
            self._drawn = 0
        for line in lines:
            typer.echo(line)
        if self._can_redraw and not is_last:
            page = self._page()
            typer.echo("\n".join(page))
            self._drawn = len(page)

    def _page(self) -> list[str]:
        metrics: Mapping[str, Any] = self._look.islands if self._look else {}
        # Where its run cannot be asked, the coordinator is what there is to see of it.
        coordinator = self._coordinator if self._looks is None else None
        shown = [*self._reports, *(coordinator.reports if coordinator else ())]
        page = ["", *table_lines(rows(shown, metrics), left=2)]
        if self._look is not None:
            last = self._look.last_round
            of = f" of {last}" if last is not None else ""
            page += [
                "",
                f"run {self._look.run}: {self._look.state}, "
                f"round {self._look.round}{of}. {self._look.reason}".rstrip(),
            ]
        return page

    def _end(self, *, is_told: bool) -> None:
        """End what is not to run on; what could not be told is told again."""
        with self._bearing():
            if is_told and not self._is_going:
                self._tell_to_go()
            self._end_what_waits()
            self._end_who_is_alone()

    def _tell_to_go(self) -> None:
        if not self._is_told:
            leaving = "atoll: islands are told to leave; once more to go without them."
            self._draw([leaving])
        self._is_told = True
        self._launched.cancel()
        self._is_going = True

    def _end_what_waits(self) -> None:
        """Start no island again for a run that has ended."""
        if not self._has_ended:
            return
        waiting = (State.PENDING, State.RESTARTING)
        late = [each.index for each in self._reports if each.state in waiting]
        can_some = self._launched.launcher.traits.can_cancel_some
        if late and (can_some or len(late) == len(self._reports)):
            self._launched.cancel(late if can_some else None)

    def _end_who_is_alone(self) -> None:
        """Let islands go whose coordinator is over, and comes back nowhere."""
        is_gone = self._coordinator is not None and self._coordinator.is_gone
        if not is_gone or self._has_ended or self._is_going:
            return
        if not self._is_told:
            self._is_alone = self._is_told = True
            self._draw(["atoll: the run's coordinator is gone; islands are ended."])
        self._launched.cancel()
        self._is_going = True

    def _settle(self) -> None:
        """Look once more while the coordinator is there, and let it go."""
        if self._coordinator is None:
            return
        until_s = time.monotonic() + self._patience_s()
        while time.monotonic() < until_s and not self._has_ended:
            self._look_for_end(self._coordinator)
            time.sleep(self._soon_s)
        self._let_go(self._coordinator)

    def _look_for_end(self, coordinator: CoordinatorLaunch) -> None:
        if self._looks is not None:
            self._looks.look()
            return
        with self._bearing():
            coordinator.look()

    def _patience_s(self) -> float:
        """Return how long the end of a run may be waited for that is likely to come."""
        if self._looks is not None:
            return SPOKE_S
        is_likely = any(each.state is State.FINISHED for each in self._reports)
        is_gone = self._coordinator is None or self._coordinator.is_gone
        return ENDS_S if is_likely and not is_gone else 0.0

    def _let_go(self, coordinator: CoordinatorLaunch) -> None:
        told: list[str] = []
        while not (coordinator.is_over or told):
            with self._bearing():
                told = coordinator.end()
            time.sleep(0.0 if coordinator.is_over else self._soon_s)
        self._draw(told)

    @contextmanager
    def _bearing(self) -> Iterator[None]:
        """Go on through the silence of an engine that is to end something."""
        try:
            yield
            self._ending.answered()
        except Unreachable as exc:
            self._draw(self._ending.bear(exc))

    def _show_end(self) -> None:
        self._draw(self._page(), is_last=True)
        told = [*failures_of(self._launched, self._reports)]
        if self._coordinator is not None:
            told += failures_of(self._coordinator.launched, self._coordinator.reports)
        for line in told:
            typer.echo(line, err=True)


@contextmanager
def _interruptions() -> Iterator[list[int]]:
    """Give what notes the first SIGINT or SIGTERM; a second one is the usual."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    usual = {number: signal.getsignal(number) for number in numbers}
    heard: list[int] = []

    def note(number: int, frame: object) -> None:
        heard.append(number)
        for each, before in usual.items():
            signal.signal(each, before)

    for number in numbers:
        signal.signal(number, note)
    try:
        yield heard
    finally:
        for number, before in usual.items():
            signal.signal(number, before)
