"""The past of a run on disk: folded as events happen, saved now and then, and reloaded.

`past.jsonl.gz` is a cache: the events behind it are read from their files, and without
it all of them are. The fold has the thread of its subscription, so that no commit waits
for it; it is written in small pieces, between which other threads run.
"""

from __future__ import annotations

import gzip
import json
import os
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from atoll.telemetry.event_files import EventFiles
from atoll.telemetry.events import Event
from atoll.telemetry.island_past import IslandPast
from atoll.telemetry.past import Past

NAME = "past.jsonl.gz"
SAVE_EVERY_S = 300.0
"""Saving a large past takes a second of a thread; the events since are read again."""

MAX_FILE_BYTES = 64 * 2**20
MAX_LINE_BYTES = 4 * 2**20
MAX_WAITING = 50_000
"""Events that wait while the past is made again from 256 MB of files."""

T = TypeVar("T")


def load_past(directory: Path, *, until_process: str | None = None) -> Past:
    """Return the past in a run's directory, up to a process of its coordinator."""
    past = read_past(directory / NAME) or Past()
    for event in EventFiles(directory).forward(past.process, past.number):
        if event.process == until_process:
            break
        past.add(event)
    return past


def read_past(path: Path) -> Past | None:
    """Return the past in a file; None if there is none, or it is damaged."""
    try:
        return Past.restored(_parts_in(path))
    except (OSError, EOFError, zlib.error, ValueError, TypeError, LookupError):
        return None
    except (AttributeError, RecursionError):  # values of other types than were written
        return None


def _parts_in(path: Path) -> Iterator[dict[str, Any]]:
    if path.stat().st_size > MAX_FILE_BYTES:
        raise ValueError("too large")
    with gzip.open(path, "rb") as file:
        while line := file.readline(MAX_LINE_BYTES):
            yield json.loads(line)


def write_past(path: Path, past: Past) -> int:
    """Write a past into a file, in place of the one before; return its size."""
    unfinished = path.with_name(f"{path.name}.new")
    # Private, as the events are.
    handle = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with (
        open(handle, "wb") as raw,
        gzip.GzipFile("", "wb", compresslevel=3, fileobj=raw, mtime=0) as file,
    ):
        for part in past.parts():
            file.write(json.dumps(part, separators=(",", ":")).encode() + b"\n")
    unfinished.replace(path)
    return path.stat().st_size


class PastRecorder:
    """A sink that keeps the past of a run. `read` may be called by any thread.

    Args:
        directory: The run's directory.
        process: That of the events that it will get.
    """

    def __init__(self, directory: Path, *, process: str) -> None:
        self._directory, self._process = directory, process
        self._lock = threading.Lock()
        self._past: Past | None = None
        self._before: dict[str, IslandPast] = {}
        self._saved_unix_s = 0.0
        self._loaded = threading.Event()

    def __call__(self, event: Event) -> None:
        if self._past is None:
            self._load(event)
        assert self._past is not None
        with self._lock:
            self._past.add(event)
        if event.at_unix_s - self._saved_unix_s >= SAVE_EVERY_S:
            self._save(event.at_unix_s)

    def wait_loaded(self, timeout_s: float) -> bool:
        """Wait until the past is loaded, and return whether it is."""
        return self._loaded.wait(timeout_s)

    def read(self, act: Callable[[Past], T]) -> T | None:
        """Return what `act` makes of the past; None while it is being loaded."""
        if not self._loaded.is_set():
            return None
        assert self._past is not None
        with self._lock:
            return act(self._past)

    def before(self) -> dict[str, IslandPast] | None:
        """Return the islands as earlier processes left them; None before that."""
        return self._before if self._loaded.is_set() else None

    def close(self) -> None:
        """Save the past. After the subscription has ended."""
        if self._past is not None:
            self._save(self._past.at_unix_s or 0.0)

    def _load(self, event: Event) -> None:
        past = load_past(self._directory, until_process=self._process)
        self._before = {name: _copy(island) for name, island in past.islands.items()}
        self._past, self._saved_unix_s = past, event.at_unix_s
        self._loaded.set()

    def _save(self, at_unix_s: float) -> None:
        assert self._past is not None
        self._saved_unix_s = at_unix_s
        with suppress(OSError):  # a cache: a full disk is reported by its other users
            write_past(self._directory / NAME, self._past)


def _copy(island: IslandPast) -> IslandPast:
    names = IslandPast.__slots__
    return IslandPast(**{name: getattr(island, name) for name in names})
