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
from collections.abc import Callable
from pathlib import Path

import numpy as np

from atoll.coordinator.spare_files import SpareFile, SpareFiles
from atoll.errors import DiskError, DiskFull
from atoll.exchange import Frame
from atoll.weights import UpdateCheck
from atoll.wire import Header, codec, piece_range

ReadInto = Callable[[memoryview], int]
"""Fills a view with the next bytes of a body, or raises."""

RELEASE_BLOCKS = 16
"""So many blocks of all bodies may be resident at once, while a round is reduced."""


MOVED_BYTES = 2**20
"""Of a body at once: what a core has just read is then still in its cache."""


class Spool:
    """Takes bodies in. Any number of threads may, at once."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(mode=0o700, exist_ok=True)
        self._files = SpareFiles(lambda: nameless(directory))
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
        file = self._files.file(header.body_bytes)
        self._fill(file.handle, header, read_into, check)
        check.finish()
        return Frame(header, self._mapped(file, header.body_bytes))

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
        self, handle: int, header: Header, read_into: ReadInto, check: UpdateCheck
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
                check.piece(index, moved[start - offset : stop - offset])
            write_all(handle, moved)

    def _mapped(self, file: SpareFile, size: int) -> np.ndarray:
        mapped = self._files.mapped(file, size)
        with self._lock:
            self._maps.add(mapped)
        return np.frombuffer(mapped, np.uint8)


def nameless(directory: Path) -> int:
    """Return a new file without a name, which vanishes with its last handle."""
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR, 0o600)
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
