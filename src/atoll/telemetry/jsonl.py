"""Events as lines of JSON in a run's directory.

Rule 1: nothing here raises into the run. Events that cannot be written are counted,
and reported once until writing works again.
Rule 2: a line is written by one call, so a reader that follows the file sees whole
lines. A line that a full disk or a power cut has torn is followed by a new one: skip
lines that do not parse.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from atoll.errors import UsageError
from atoll.telemetry.events import Event

NAME = "events"
MAX_BYTES = 64_000_000
"""A file that would become longer is rotated."""

KEEP = 4
"""Number of files, including the current one."""


class JsonlWriter:
    """A sink that appends to `events.jsonl`; older ones are `events.1.jsonl` and so on.

    For one thread, that of its subscription.

    Args:
        directory: The run's directory. It is first used at the first event.
        on_failure: Called with a message when writing begins to fail.
    """

    def __init__(
        self,
        directory: Path,
        *,
        on_failure: Callable[[str], object] = lambda _: None,
        max_bytes: int = MAX_BYTES,
        keep: int = KEEP,
    ) -> None:
        if keep < 1 or max_bytes < 1:
            raise UsageError(f"keep={keep} and max_bytes={max_bytes} must be above 0.")
        self.path = directory / f"{NAME}.jsonl"
        self.lost = 0
        """Events that could not be written."""

        self._on_failure = on_failure
        self._max_bytes = max_bytes
        self._keep = keep
        self._handle: int | None = None
        self._size = 0
        self._is_torn = False
        self._is_failing = False

    def __call__(self, event: Event) -> None:
        try:
            self._append(line_of(event))
            self._is_failing = False
        except OSError as exc:
            self.lost += 1
            self.close()
            self._say(exc)

    def close(self) -> None:
        """Close the file; the next event opens it again."""
        handle, self._handle = self._handle, None
        if handle is not None:
            with suppress(OSError):  # it repeats the error of a failed write
                os.close(handle)

    def _say(self, exc: OSError) -> None:
        if self._is_failing:
            return
        self._is_failing = True
        self._on_failure(
            f"Events cannot be written to {self.path}: {exc.strerror or exc}. The run "
            "continues without them; free some space there, or check its permissions."
        )

    def _append(self, line: bytes) -> None:
        handle = self._opened()
        if self._size and self._size + len(line) > self._max_bytes:
            self.close()
            self._put_aside()
            handle = self._opened()
        rest = memoryview(b"\n" * self._is_torn + line)
        while rest:
            written = os.write(handle, rest)
            self._size += written
            rest = rest[written:]
            self._is_torn = bool(rest)

    def _opened(self) -> int:
        if self._handle is None:
            # Private: it has the names and addresses of islands.
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._handle = os.open(self.path, flags, 0o600)
            self._size = os.fstat(self._handle).st_size
            last = os.pread(self._handle, 1, self._size - 1) if self._size else b"\n"
            self._is_torn = last != b"\n"
        return self._handle

    def _put_aside(self) -> None:
        aside = [self.path.with_name(f"{NAME}.{n}.jsonl") for n in range(1, self._keep)]
        files = [self.path, *aside]
        for older, newer in zip(files[:0:-1], files[-2::-1], strict=True):
            with suppress(FileNotFoundError):
                newer.replace(older)
        if not aside:
            self.path.unlink()


def line_of(event: Event) -> bytes:
    """Return an event as one line of ASCII, without terminal control characters."""
    text = json.dumps(event.as_dict(), separators=(",", ":"), allow_nan=False)
    return text.encode("ascii") + b"\n"
