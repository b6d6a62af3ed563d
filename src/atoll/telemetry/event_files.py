"""The files of a run's events, read backwards by pages and forwards from an event on.

A file is known by its first event, so that a page continues after files were renamed.
Lines that are not whole, or no events, are skipped.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from atoll.errors import UsageError
from atoll.telemetry.bus import NAME
from atoll.telemetry.events import Event

BLOCK_BYTES = 64 * 1024
MAX_PAGE_BYTES = 4 * 2**20
"""Bytes that one page reads."""

MAX_PAGE = 1000
MAX_LINE_BYTES = 2**20
"""A longer line is no event; reading stops there."""

MAX_FILES = 64


@dataclass(frozen=True)
class EventPage:
    """Some events, oldest first, and where the events before them are."""

    events: list[Event]
    before: str | None
    """The cursor of the page before this one; None: there is none."""


@dataclass(frozen=True, kw_only=True)
class EventFilter:
    """The events that a page has; an empty text admits all."""

    kind: str = ""
    """The name of the event."""

    island: str = ""

    def __call__(self, event: Event) -> bool:
        is_kind = not self.kind or event.name == self.kind
        return is_kind and (
            not self.island or event.fields.get("island") == self.island
        )


ALL_EVENTS = EventFilter()


@dataclass(frozen=True)
class Segment:
    """One file of events."""

    path: Path
    first: str
    """Process and number of its first event."""

    size: int


def event_of(line: bytes) -> Event | None:
    """Return the event of a line; None if it is none."""
    try:
        row = json.loads(line)
        return Event.of(row) if isinstance(row, dict) else None
    except (ValueError, RecursionError):
        return None


class EventFiles:
    """The event files of a run's directory. Keeps nothing open."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def segments(self) -> list[Segment]:
        """Return the files, the newest first."""
        names = [f"{NAME}.jsonl", *(f"{NAME}.{n}.jsonl" for n in range(1, MAX_FILES))]
        segments = []
        for name in names:
            path = self._directory / name
            with suppress(FileNotFoundError), path.open("rb") as file:
                first = event_of(file.readline(MAX_LINE_BYTES))
                size = os.fstat(file.fileno()).st_size
                key = f"{first.process}-{first.number}" if first else name
                segments.append(Segment(path, key, size))
        return segments

    def page(
        self, before: str = "", *, limit: int = 200, only: EventFilter = ALL_EVENTS
    ) -> EventPage:
        """Return the events before a cursor; the last ones if it is empty.

        A page has fewer than `limit` events, or none, if it would read more than 4 MB.

        Raises:
            UsageError: the cursor is none, or its file has been removed since.
        """
        if not 1 <= limit <= MAX_PAGE:
            raise UsageError(f"limit={limit} must be from 1 to {MAX_PAGE}.")
        segments = self.segments()
        index, offset = _position(segments, before)
        events: list[Event] = []
        bytes_left = MAX_PAGE_BYTES
        while index < len(segments):
            segment = segments[index]
            for start, line in _lines_before(segment.path, offset):
                if len(events) >= limit or bytes_left <= 0:
                    cursor = f"{segment.first}:{offset}"
                    return EventPage(events[::-1], cursor)
                bytes_left -= offset - start
                offset = start
                event = event_of(line)
                if event is not None and only(event):
                    events.append(event)
            index += 1
            offset = segments[index].size if index < len(segments) else 0
        return EventPage(events[::-1], None)

    def forward(self, process: str = "", number: int = 0) -> Iterator[Event]:
        """Yield all events after one of a process, or all if it is not found."""
        segments = self.segments()
        index, offset = self._after(segments, process, number)
        for segment in reversed(segments[: index + 1]):
            yield from _events_from(segment.path, offset)
            offset = 0

    def last(self) -> Event | None:
        """Return the last event."""
        events = self.page(limit=1).events
        return events[0] if events else None

    def _after(
        self, segments: list[Segment], process: str, number: int
    ) -> tuple[int, int]:
        for index, segment in enumerate(segments if number else ()):
            end = segment.size
            for start, line in _lines_before(segment.path, segment.size):
                event = event_of(line)
                if event and event.process == process and event.number <= number:
                    return index, end
                end = start
        return len(segments) - 1, 0


def _position(segments: list[Segment], before: str) -> tuple[int, int]:
    """Return the index of a cursor's file, and the offset in it."""
    if not before:
        return 0, segments[0].size if segments else 0
    key, _, offset = before.rpartition(":")
    if not key or not (offset.isascii() and offset.isdigit() and len(offset) < 16):
        raise UsageError(
            f"before={before[:80]!r} is no cursor. Use `before` of the last answer."
        )
    for index, segment in enumerate(segments):
        if segment.first == key:
            return index, min(int(offset), segment.size)
    raise UsageError(
        f"before={before[:80]!r} is in a file that is no longer kept. "
        "Begin with the newest events."
    )


def _lines_before(path: Path, offset: int) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that end before an offset, the last one first, with offsets."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        rest = b""
        while offset > 0:
            first = max(0, offset - BLOCK_BYTES)
            block = _read(file, first, offset - first) + rest
            lines = block.splitlines(keepends=True)
            if first > 0:
                rest = lines.pop(0)
                if len(rest) > MAX_LINE_BYTES:
                    return
            else:
                rest = b""
            end = first + len(block)
            for line in reversed(lines):
                end -= len(line)
                yield end, line
            offset = first


def _read(file: BinaryIO, first: int, size: int) -> bytes:
    file.seek(first)
    return file.read(size)


def _events_from(path: Path, offset: int) -> Iterator[Event]:
    with suppress(FileNotFoundError), path.open("rb") as file:
        file.seek(offset)
        while line := file.readline(MAX_LINE_BYTES):
            event = event_of(line)
            if event is not None:
                yield event
