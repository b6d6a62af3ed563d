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

from atoll.errors import DiskError, DiskFull
from atoll.exchange import Frame
from atoll.weights import UpdateCheck
from atoll.wire import Header, codec, piece_range

ReadInto = Callable[[memoryview], int]
"""Fills a view with the next bytes of a body, or raises."""

RELEASE_BLOCKS = 32
"""So many blocks of all bodies may be resident at once, while a round is reduced."""


class Spool:
    """Takes bodies in. Any number of threads may, at once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(mode=0o700, exist_ok=True)
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
        handle = nameless(self._directory)
        try:
            self._fill(handle, header, read_into, check)
            check.finish()
            return Frame(header, self._mapped(handle, header.body_bytes))
        finally:
            os.close(handle)

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
        packing = codec(header.codec)
        _, most = piece_range(packing, header.elements, 0)
        buffer = memoryview(bytearray(most))
        for index in range(len(header.pieces)):
            start, end = piece_range(packing, header.elements, index)
            piece = buffer[: end - start]
            read_into(piece)
            check.piece(index, piece)
            write_all(handle, piece)

    def _mapped(self, handle: int, size: int) -> np.ndarray:
        mapped = mmap.mmap(handle, size, prot=mmap.PROT_READ)
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
