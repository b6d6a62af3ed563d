"""Updates on their way into a round: in files without a name, not in memory.

A body is written as it arrives and read block by block when its round closes. The
files have no names, so that they vanish with the process, however it ends: what was
not committed is sent again.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from atoll.coordinator.spare_files import SpareFile, SpareFiles
from atoll.disk import Claim, Room, open_nameless, sweep_nameless
from atoll.errors import DiskError, DiskFull
from atoll.exchange import Frame
from atoll.weights import UpdateCheck
from atoll.wire import Header, codec, piece_range, verify_piece
from atoll.wire.digests import view_of

ReadInto = Callable[[memoryview], int]
"""Fills a view with the next bytes of a body, or raises."""

RELEASE_BLOCKS = 16
"""So many blocks of all bodies may be resident at once, while a round is reduced."""


MOVED_BYTES = 2**20
"""Of a body at once: what a core has just read is then still in its cache."""

UNBOUNDED_BYTES = 2**62
"""The free space of a disk that nobody watches."""


class Spool:
    """Takes bodies in. Any number of threads may, at once."""

    def __init__(self, directory: Path, room: Room | None = None) -> None:
        directory.mkdir(mode=0o700, exist_ok=True)
        sweep_nameless(directory)
        self._room = room or Room(lambda: UNBOUNDED_BYTES)
        self._files = SpareFiles(lambda: nameless(directory))
        self._room.reclaimers.append(self._files.clear)
        self._maps: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._blocks = 0

    def take(self, header: Header, read_into: ReadInto, check: UpdateCheck) -> Frame:
        """Return the update whose body comes next, verified piece by piece.

        Raises:
            CorruptError, Refused: the body is not what the header or the run says.
            DiskError: it cannot be kept; asking again may help.
        """
        if not header.body_bytes:
            check.finish()
            return Frame(header, np.empty(0, np.uint8))
        with self._file(header.body_bytes, what="this update") as (file, claim):
            self._fill(file.handle, header, read_into, check.piece, claim)
        check.finish()
        return Frame(header, self._mapped(file, header.body_bytes))

    def take_state(self, header: Header, read_into: ReadInto) -> SpooledState:
        """Return the state whose body comes next, verified piece by piece.

        Raises:
            CorruptError: the body is not what the header says.
            DiskError: it cannot be kept; asking again may help.
        """
        with self._file(header.body_bytes, what="this state") as (file, claim):
            if header.body_bytes:
                verify = partial(verify_piece, header)
                self._fill(file.handle, header, read_into, verify, claim)
        return SpooledState(header, file)

    def take_bytes(self, size_bytes: int, read_into: ReadInto) -> memoryview:
        """Return so many of the next bytes of a body, mapped from a file.

        Raises:
            DiskError: they cannot be kept; asking again may help.
        """
        with self._file(size_bytes, what="this body") as (file, claim):
            buffer = memoryview(bytearray(min(MOVED_BYTES, size_bytes)))
            for first in range(0, size_bytes, MOVED_BYTES):
                moved = buffer[: size_bytes - first]
                read_into(moved)
                write_all(file.handle, moved)
                claim.wrote(len(moved))
        return memoryview(self._files.mapped(file, size_bytes))

    @contextmanager
    def _file(self, size_bytes: int, *, what: str) -> Iterator[tuple[SpareFile, Claim]]:
        """Give a file, and room for what it does not have yet."""
        file = self._files.file(size_bytes)
        more_bytes = max(0, size_bytes - file.size_bytes)
        with self._room.claiming(more_bytes, what=what) as claim:
            yield file, claim

    def release(self) -> None:
        """Give back the memory of what was read; called after every block."""
        self._blocks += 1
        if self._blocks * len(self._maps) < RELEASE_BLOCKS:
            return
        self._blocks = 0
        with self._lock:  # an update of another round may arrive meanwhile
            maps = list(self._maps)
        for each in maps:
            each.madvise(mmap.MADV_DONTNEED)

    def _fill(
        self,
        handle: int,
        header: Header,
        read_into: ReadInto,
        verify: Callable[[int, memoryview], None],
        claim: Claim,
    ) -> None:
        packing, count = codec(header.codec), len(header.pieces)
        spans = [piece_range(packing, header.elements, each) for each in range(count)]
        # Several small pieces are moved at once: each move may have to wait for others.
        at_once = max(1, MOVED_BYTES // spans[0][1])
        buffer = memoryview(bytearray(spans[min(at_once, count) - 1][1]))
        for first in range(0, count, at_once):
            here = spans[first : first + at_once]
            offset, end = here[0][0], here[-1][1]
            moved = buffer[: end - offset]
            read_into(moved)
            for index, (start, stop) in enumerate(here, first):
                verify(index, moved[start - offset : stop - offset])
            write_all(handle, moved)
            claim.wrote(len(moved))

    def _mapped(self, file: SpareFile, size: int) -> np.ndarray:
        mapped = self._files.mapped(file, size)
        with self._lock:
            self._maps.add(mapped)
        return np.frombuffer(mapped, np.uint8)


@dataclass(frozen=True)
class SpooledState:
    """A state whose body lies in a file without a name, verified when it came."""

    header: Header
    file: SpareFile

    def load(self) -> Frame:
        """Return the state with its body in memory, which is the caller's alone."""
        body = np.empty(self.header.body_bytes, np.uint8)
        view, first = view_of(body), 0
        while first < len(view):
            moved = view[first : first + MOVED_BYTES]
            try:
                size = os.preadv(self.file.handle, [moved], first)
            except OSError as exc:
                raise _translated(exc) from exc
            if not size:
                raise DiskError("The coordinator's disk lost a state. Ask again.")
            first += size
        return Frame(self.header, body)


def nameless(directory: Path) -> int:
    """Return a new file without a name, which vanishes with its last handle."""
    try:
        return open_nameless(directory)
    except OSError as exc:
        raise _translated(exc) from exc


def write_all(handle: int, view: memoryview) -> None:
    """Write all of a view to a file, or raise a DiskError."""
    while view:
        try:
            view = view[os.write(handle, view) :]
        except OSError as exc:
            raise _translated(exc) from exc


def _translated(exc: OSError) -> DiskError:
    if exc.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return DiskFull(
            "The coordinator's disk has no room for this update. Free some space "
            "there; the update is sent again by itself."
        )
    return DiskError(f"The coordinator's disk failed: {exc.strerror}. Ask again.")
