"""`atoll status RUN --watch` on a terminal: one screen, and scrollback as before."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from atoll.cli.terminal import FullScreen
from tests.cli.runs import CODE, WAIT_S, environment, serving

ENTER, LEAVE, END_OF_FRAME = b"\x1b[?1049h", b"\x1b[?1049l", b"\x1b[?2026l"


@dataclass
class Terminal:
    """A command on a terminal of its own, and what it has written."""

    process: subprocess.Popen[bytes]
    master: int
    written: bytes = b""

    def read_until(self, mark: bytes, count: int = 1) -> None:
        """Read until the command has written `mark` so many times."""
        while self.written.count(mark) < count:
            self.written += os.read(self.master, 65536)

    def end(self, number: signal.Signals) -> int:
        """Send a signal, read the rest, and return the exit code."""
        self.process.send_signal(number)
        self.read_until(LEAVE)
        return self.process.wait(WAIT_S)


@contextmanager
def terminal(
    *arguments: str, home: Path, columns: int = 80, lines: int = 24
) -> Iterator[Terminal]:
    """Run the command line on a terminal of this size."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-c", CODE, *arguments],
        env=environment(home, TERM="xterm-256color", PYTHONIOENCODING="utf-8"),
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
    )
    os.close(slave)
    try:
        yield Terminal(process, master)
    finally:
        process.kill()
        process.wait(WAIT_S)
        os.close(master)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_watch_leaves_the_scrollback_alone(
    tmp_path: Path, number: signal.Signals
) -> None:
    """Frames on the other screen, none cleared before it is drawn; and back on exit."""
    with (
        serving(tmp_path) as served,
        terminal("status", "lagoon", "--watch", home=served.home) as it,
    ):
        it.read_until(END_OF_FRAME, 2)
        code = it.end(number)

    assert code == 128 + number
    assert (it.written.count(ENTER), it.written.count(LEAVE)) == (1, 1)
    first, second, *_ = it.written.split(END_OF_FRAME)
    # The first one follows ENTER; neither clears the screen or the lines above it.
    for frame in (first, second):
        assert b"\x1b[2J" not in frame
        assert b"\x1b[3J" not in frame
        assert b"lagoon\x1b[0m  \x1b[33mfounding" in frame
    assert second.startswith(b"\x1b[?2026h\x1b[H")


def test_a_run_that_does_not_answer_keeps_its_last_page(tmp_path: Path) -> None:
    """A coordinator that has gone ends no watch: the error is above the page."""
    with (
        serving(tmp_path) as served,
        terminal("status", served.url, "--watch", home=served.home) as it,
    ):
        it.read_until(END_OF_FRAME)
        served.stop()
        it.read_until(b"No answer; this page is ")
        it.read_until(END_OF_FRAME, it.written.count(END_OF_FRAME) + 1)
        it.end(signal.SIGTERM)

    *_, last, _ = it.written.split(END_OF_FRAME)
    assert b"No answer" in last
    assert b"lagoon\x1b[0m  " in last


def test_a_page_that_is_too_long_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last line says by how much; so the terminal does not scroll."""
    monkeypatch.setenv("LINES", "4")
    stream = io.StringIO()
    with FullScreen(stream) as screen:
        screen.show("".join(f"line {number}\n" for number in range(6)))
    text = stream.getvalue()

    assert "line 2\x1b[K\n3 more lines" in text
    assert "line 3" not in text
    assert text.count("\n") == 3
