"""Departing updates: each a frame file of its own, until its round is over.

Rule 1: a file is durable before the record that names it is written.
Rule 2: a file may be drafted ahead, by any thread, before anybody knows whether it will
        be recorded. A draft takes a name that is free, and replaces nothing: a record
        that was withdrawn may name what is there.
Rule 3: one thread at a time has to do with a name, from its file to its record.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager

from atoll.disk import Disk, Room
from atoll.journal.recorded import Update
from atoll.journal.stored import U8, Drafts
from atoll.wire import Header, blake3_digest

DEPARTING = "departing/"


class Departing:
    """The files of departing updates on a disk."""

    def __init__(self, disk: Disk, drafts: Drafts, room: Room) -> None:
        self._disk, self._drafts, self._room = disk, drafts, room
        self._written: dict[str, Header | None] = {}
        """What the files of open rounds begin with; None if an earlier life knew."""

        self._busy: set[str] = set()
        self._freed = threading.Condition()

    def open(self, staged: Iterable[Update], kept: Collection[str] = ()) -> None:
        """Take over the files that records name; remove others, but for `kept`."""
        self._written = dict.fromkeys(map(departing_name, staged))
        for name in self._disk.names(DEPARTING):
            if name not in self._written and name not in kept:
                self._disk.remove(name)

    def draft(self, header: Header, body: U8) -> None:
        """Have a durable file of an update, if there is none by its name."""
        with self._holding(departing_name(key_of(header))) as name:
            if name not in self._written:
                self._write(name, header, body)

    @contextmanager
    def staging(self, header: Header, body: U8) -> Iterator[str]:
        """Give the name of an update's durable file, to be recorded meanwhile.

        Nothing that was withdrawn may still be behind the log's end.
        """
        with self._holding(departing_name(key_of(header))) as name:
            if self._written.get(name) != header:
                self._written.pop(name, None)
                self._write(name, header, body)
            yield name

    def collect(self, fragment: int, over: int) -> None:
        """Remove the files of rounds up to `over`; some may be drafted even then."""
        for name in self._disk.names(f"{DEPARTING}{fragment}/"):
            if _round(name) <= over:
                self._written.pop(name, None)
                self._disk.remove(name)

    def _write(self, name: str, header: Header, body: U8) -> None:
        with self._room.claiming(len(body), what="an update that departs"):
            self._drafts.write(name, header, body)
        self._written[name] = header

    @contextmanager
    def _holding(self, name: str) -> Iterator[str]:
        with self._freed:
            self._freed.wait_for(lambda: name not in self._busy)
            self._busy.add(name)
        try:
            yield name
        finally:
            with self._freed:
                self._busy.discard(name)
                self._freed.notify_all()


def key_of(header: Header) -> Update:
    """Return what the journal knows an update by."""
    return header.fragment, header.round, header.island


def departing_name(key: Update) -> str:
    """Return the name of the file that holds a departing update."""
    fragment, round, island = key
    return f"{DEPARTING}{fragment}/{round}-{blake3_digest(island.encode()).hex()[:32]}"


def _round(name: str) -> int:
    digits = name.rpartition("/")[2].partition("-")[0]
    return int(digits) if digits.isdecimal() else 0
