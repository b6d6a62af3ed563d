"""A terminal: colours, tables, progress bars, text that is redrawn, and signals.

There are no colours without a terminal, nor if NO_COLOR is set to any value; a terminal
of type `dumb` has no colours and is not redrawn. rich is imported when a verb draws.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self, TextIO

import typer

from atoll.telemetry.text import printable

if TYPE_CHECKING:  # slow to import
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table

WIDTH = 100
"""Width of a page without a terminal."""

UNBOUNDED = 10_000
"""Width of a table without a terminal: no text is cut."""


def can_redraw(stream: TextIO) -> bool:
    """Return whether output of this stream can be redrawn."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def has_colour() -> bool:
    """Return whether standard output is coloured."""
    return can_redraw(sys.stdout) and not os.environ.get("NO_COLOR")


def width(default: int = WIDTH) -> int:
    """Return the columns of the terminal; `default` without a terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else default


def console(stream: TextIO) -> Console:
    """Return a console that writes text without markup, with colours if wanted."""
    from rich.console import Console

    is_coloured = can_redraw(stream) and not os.environ.get("NO_COLOR")
    return Console(
        file=stream,
        force_terminal=can_redraw(stream),
        color_system="standard" if is_coloured else None,
        width=None if stream.isatty() else UNBOUNDED,
        markup=False,
        emoji=False,
        highlight=False,
    )


def is_ascii(stream: TextIO) -> bool:
    """Return whether the stream cannot encode the characters of a bar."""
    try:
        "━─".encode(stream.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return True
    return False


def echo(*parts: tuple[str, str]) -> None:
    """Print a line of texts, each with its style."""
    if not has_colour():
        typer.echo("".join(text for text, _ in parts))
        return
    from rich.text import Text

    console(sys.stdout).print(Text.assemble(*parts), soft_wrap=True)


def table(rows: Sequence[Sequence[str]], *, numbers: Collection[str] = ()) -> Table:
    """Return rows as a table; the first one is the head.

    Columns named in `numbers` are aligned right. On a narrow terminal the last column
    is wrapped, then the others are cut.
    """
    from rich.table import Table
    from rich.text import Text

    head, *body = rows
    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in head:
        is_last = name == head[-1]
        justify = "right" if name in numbers else "left"
        grid.add_column(name, justify=justify, no_wrap=not is_last)  # type: ignore[arg-type] # a literal
    for row in body:
        grid.add_row(*(Text(printable(cell)) for cell in row))
    return grid


def live_view(stream: TextIO, *, is_transient: bool = False) -> Live:
    """Return a view to enter, and to update; a transient one is erased at its end."""
    from rich.live import Live

    return Live(
        console=console(stream),
        auto_refresh=False,
        transient=is_transient,
        redirect_stdout=False,
        redirect_stderr=False,
    )


_ENTER = "\x1b[?1049h\x1b[?25l\x1b[?7l"  # other screen, no cursor, no wrapped lines
_EXIT = "\x1b[?7h\x1b[?25h\x1b[?1049l"
_BEGIN, _END = (
    "\x1b[?2026h",
    "\x1b[?2026l",
)  # of a frame, which is then shown as a whole
_HOME, _ERASE_LINE, _ERASE_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"


class FullScreen:
    """Pages on the other screen of a terminal, each in place of the one before.

    That screen has no scrollback, so the user's lines are as before when it is left.
    A page is one write that overwrites each line and erases the rest of it: there is
    never an empty screen in between, and so no flicker.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __enter__(self) -> Self:
        self._write(_ENTER)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._write(_EXIT)

    def lines(self) -> int:
        """Return the lines of the terminal now."""
        return shutil.get_terminal_size().lines

    def show(self, page: str) -> None:
        """Show the beginning of a page, as much as the terminal has lines for."""
        rows = self.lines()
        lines = page.splitlines()
        if len(lines) > rows:
            hidden = len(lines) - rows + 1
            lines[rows - 1 :] = [f"{hidden} more lines, which this terminal cuts"]
        text = f"{_ERASE_LINE}\n".join(lines)
        self._write(f"{_BEGIN}{_HOME}{text}{_ERASE_LINE}{_ERASE_BELOW}{_END}")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


@contextmanager
def exit_on_signals() -> Iterator[None]:
    """Leave the block in order when SIGINT, SIGTERM or SIGHUP arrives.

    Then the process exits with 128 and the number of the signal, as shells expect.
    """

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = {number: signal.signal(number, leave) for number in numbers}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextmanager
def progress_bar(label: str) -> Iterator[Callable[[int, int], None]]:
    """Give a function that shows the work done so far, and all of it, on stderr."""
    if not can_redraw(sys.stderr):
        yield lambda done, total: None
        return
    from rich.progress import Progress

    with Progress(console=console(sys.stderr)) as bars:
        task = bars.add_task(label, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)


@contextmanager
def stop_signal() -> Iterator[threading.Event]:
    """Give an event that the first SIGTERM or SIGINT sets.

    A second signal has its default effect.
    """
    stop = threading.Event()
    numbers = (signal.SIGTERM, signal.SIGINT)
    handlers = {number: signal.getsignal(number) for number in numbers}

    def restore() -> None:
        for number, handler in handlers.items():
            signal.signal(number, handler)

    def note(number: int, frame: object) -> None:
        stop.set()
        restore()

    for number in numbers:
        signal.signal(number, note)
    try:
        yield stop
    finally:
        restore()
