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

from atoll.cli.launches import table_lines
from atoll.cli.terminal import can_redraw
from atoll.errors import Unreachable
from atoll.launch.launching import Launched
from atoll.launch.looking import Looks, RunLook
from atoll.launch.patience import Patience
from atoll.launch.states import Report, State
from atoll.launch.summary import LAST_LINES, failures, rows

NEAR_S, FAR_S = 0.5, 5.0
"""Between two looks: at this machine's islands, and at those of engines elsewhere."""

SPOKE_S = 1.0


class Following:
    """Watches islands until all are over, and lets them go when it is told to."""

    def __init__(self, launched: Launched, coordinator: Launched | None) -> None:
        self._launched, self._coordinator = launched, coordinator
        self._looks = Looks(launched.handle.run)
        self._reports: tuple[Report, ...] = ()
        self._read = dict.fromkeys(launched.handle.indexes, 0)
        self._can_redraw = can_redraw(sys.stdout)
        self._drawn = 0
        self._is_told = self._is_going = False
        self._asking, self._ending = Patience(), Patience()

    def follow(self) -> bool:
        """Return whether the run has finished, once no island is left.

        The first SIGINT or SIGTERM tells the islands to leave; the second is the usual.
        """
        every_s = FAR_S if self._launched.launcher.traits.is_elsewhere else NEAR_S
        with _interruptions() as heard:
            while not self._is_over():
                self._see()
                self._end(is_told=bool(heard))
                time.sleep(0.0 if self._is_over() else every_s)
            self._see()
            self._settle()
        self._show_end()
        return self._look is not None and self._look.has_ended

    @property
    def was_told(self) -> bool:
        """Whether somebody has interrupted it."""
        return self._is_told

    def _is_over(self) -> bool:
        return bool(self._reports) and all(it.state.is_over for it in self._reports)

    @property
    def _look(self) -> RunLook | None:
        return self._looks.newest

    def _see(self) -> None:
        self._looks.look(at_once=self._is_over())
        before = {each.index: each for each in self._reports}
        lines: list[str] = []
        try:
            self._reports = self._launched.poll()
            for line in self._new_lines():
                lines.append(line)  # one by one: what was read is told in any case
            self._asking.answered()
        except Unreachable as exc:
            lines += self._asking.bear(exc)
        if not self._can_redraw:
            for each in self._reports:
                lines += _change(before.get(each.index), each)
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
        page = ["", *table_lines(rows(self._reports, metrics), left=2)]
        if self._look is not None:
            last = self._look.last_round
            of = f" of {last}" if last is not None else ""
            page += [
                "",
                f"run {self._look.run}: {self._look.state}, "
                f"round {self._look.round}{of}. {self._look.why}".rstrip(),
            ]
        return page

    def _end(self, *, is_told: bool) -> None:
        """End what is not to run on; what could not be told is told again."""
        try:
            if is_told and not self._is_going:
                self._tell_to_go()
            self._end_what_waits()
            self._ending.answered()
        except Unreachable as exc:
            self._draw(self._ending.bear(exc))

    def _tell_to_go(self) -> None:
        if not self._is_told:
            leaving = "atoll: islands are told to leave; once more to go without them."
            self._draw([leaving])
        self._is_told = True
        self._launched.cancel()
        self._is_going = True

    def _end_what_waits(self) -> None:
        """Start no island again for a run that has ended."""
        if self._look is None or not self._look.has_ended:
            return
        waiting = (State.PENDING, State.RESTARTING)
        late = [each.index for each in self._reports if each.state in waiting]
        can_some = self._launched.launcher.traits.can_cancel_some
        if late and (can_some or len(late) == len(self._reports)):
            self._launched.cancel(late if can_some else None)

    def _settle(self) -> None:
        """Look once more while the coordinator is there, and let it go."""
        if self._coordinator is None:
            return
        until_s = time.monotonic() + SPOKE_S
        while time.monotonic() < until_s and not (self._look and self._look.has_ended):
            self._looks.look()
            time.sleep(0.1)
        self._let_go(self._coordinator)

    def _let_go(self, coordinator: Launched) -> None:
        is_told = is_over = False
        while not is_over:
            try:
                if not is_told:  # once: said again, it is an order to an engine
                    coordinator.cancel()
                    is_told = True
                is_over = all(each.state.is_over for each in coordinator.poll())
                self._ending.answered()
            except Unreachable as exc:
                self._draw(self._ending.bear(exc))
            time.sleep(0.0 if is_over else 0.1)

    def _show_end(self) -> None:
        self._draw(self._page(), is_last=True)
        for line in failures(self._reports, self._last_lines):
            typer.echo(line, err=True)

    def _last_lines(self, report: Report) -> list[str]:
        launcher, handle = self._launched.launcher, self._launched.handle
        try:
            return launcher.logs(handle, report.index)[-LAST_LINES:]
        except Unreachable as exc:
            return [f"(its log cannot be read: {exc})"]


def _change(before: Report | None, now: Report) -> list[str]:
    if before is not None and (before.state, before.restarts) == (
        now.state,
        now.restarts,
    ):
        return []
    why = f": {now.why}" if now.why else ""
    life = f" (restart {now.restarts})" if now.restarts else ""
    return [f"{now.name} is {now.state.value}{life}{why}"]


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
