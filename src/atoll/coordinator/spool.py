"""Updates before their round closes: in anonymous files, not in memory.

A body is written as it arrives and read block by block when its round closes. The
files have no names, so they vanish with the process: islands send updates again that
were not committed.

Anonymous files are reused. A body comes with every round and is as large as the last
one. The kernel keeps the pages of an existing file, and fresh pages cost several times
the time of filling them.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from atoll.disk import (
    DiskSpace,
    SpaceReservation,
    open_nameless,
    sweep_nameless,
)
from atoll.errors import DiskError, DiskFull
from atoll.exchange import Frame
from atoll.trace import span
from atoll.weights import UpdateCheck
from atoll.wire import Header, codec, piece_range, verify_piece
from atoll.wire.digests import view_of

ReadInto = Callable[[memoryview], int]
"""Fills a view with the next bytes of a body, or raises."""

RELEASE_BLOCKS = 16
"""Blocks of all bodies that may be resident while a round is reduced."""


MOVED_BYTES = 2**20
"""Bytes of a body per copy: small enough to stay in a core's cache."""

UNBOUNDED_BYTES = 2**62
"""The free space of a disk without a limit."""


class Spool:
    """Receives bodies into files. Thread-safe."""

    def __init__(self, directory: Path, room: DiskSpace | None = None) -> None:
        directory.mkdir(mode=0o700, exist_ok=True)
        sweep_nameless(directory)
        self._room = room or DiskSpace(lambda: UNBOUNDED_BYTES)
        self._files = SpareFiles(lambda: nameless(directory))
        self._room.reclaimers.append(self._files.clear)
        self._maps: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._blocks = 0

    def take(self, header: Header, read_into: ReadInto, check: UpdateCheck) -> Frame:
        """Read the body of an update, verify it piece by piece, and return the update.

        Raises:
            CorruptError, Refused: the body does not match the header or the run.
            DiskError: it cannot be stored; a retry may help.
        """
        if not header.body_bytes:
            check.finish()
            return Frame(header, np.empty(0, np.uint8))
        with self._file(header.body_bytes, content="this update") as (file, claim):
            self._fill(file.handle, header, read_into, check.piece, claim)
        check.finish()
        return Frame(header, self._mapped(file, header.body_bytes))

    def take_state(self, header: Header, read_into: ReadInto) -> SpooledState:
        """Read the body of a state, verify it piece by piece, and return the state.

        Raises:
            CorruptError: the body does not match the header.
            DiskError: it cannot be stored; a retry may help.
        """
        with self._file(header.body_bytes, content="this state") as (file, claim):
            if header.body_bytes:
                verify = partial(verify_piece, header)
                self._fill(file.handle, header, read_into, verify, claim)
        return SpooledState(header, file)

    def take_bytes(self, size_bytes: int, read_into: ReadInto) -> memoryview:
        """Return the next `size_bytes` of a body, mapped from a file.

        Raises:
            DiskError: they cannot be stored; a retry may help.
        """
        with self._file(size_bytes, content="this body") as (file, claim):
            buffer = memoryview(bytearray(min(MOVED_BYTES, size_bytes)))
            for first in range(0, size_bytes, MOVED_BYTES):
                moved = buffer[: size_bytes - first]
                read_into(moved)
                write_all(file.handle, moved)
                claim.wrote(len(moved))
        return memoryview(self._files.mapped(file, size_bytes))

    @contextmanager
    def _file(
        self, size_bytes: int, *, content: str
    ) -> Iterator[tuple[SpareFile, SpaceReservation]]:
        """Yield a file, and a reservation for the space that it lacks."""
        file = self._files.file(size_bytes)
        more_bytes = max(0, size_bytes - file.size_bytes)
        with self._room.claiming(more_bytes, purpose=content) as claim:
            yield file, claim

    def release(self) -> None:
        """Release the resident pages of all bodies; called after every block."""
        self._blocks += 1
        if self._blocks * len(self._maps) < RELEASE_BLOCKS:
            return
        self._blocks = 0
        with self._lock:  # an update of another round may arrive meanwhile
            maps = list(self._maps)
        for mapped in maps:
            mapped.madvise(mmap.MADV_DONTNEED)

    def _fill(
        self,
        handle: int,
        header: Header,
        read_into: ReadInto,
        verify: Callable[[int, memoryview], None],
        claim: SpaceReservation,
    ) -> None:
        packing, count = codec(header.codec), len(header.pieces)
        spans = [piece_range(packing, header.elements, index) for index in range(count)]
        # Small pieces are copied in batches: each copy may have to wait for the GIL.
        at_once = max(1, MOVED_BYTES // spans[0][1])
        buffer = memoryview(bytearray(spans[min(at_once, count) - 1][1]))
        for first in range(0, count, at_once):
            batch = spans[first : first + at_once]
            offset, end = batch[0][0], batch[-1][1]
            moved = buffer[: end - offset]
            read_into(moved)
            with span("check"):
                for index, (start, stop) in enumerate(batch, first):
                    verify(index, moved[start - offset : stop - offset])
            with span("spool"):
                write_all(handle, moved)
            claim.wrote(len(moved))

    def _mapped(self, file: SpareFile, size: int) -> np.ndarray:
        mapped = self._files.mapped(file, size)
        with self._lock:
            self._maps.add(mapped)
        return np.frombuffer(mapped, np.uint8)


@dataclass(frozen=True)
class SpooledState:
    """A verified state whose body is in an anonymous file."""

    header: Header
    file: SpareFile

    def load(self) -> Frame:
        """Return the state with its body in memory, owned by the caller."""
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
    """Return a new anonymous file, which vanishes with its last handle."""
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
            "there; the island sends the update again."
        )
    return DiskError(f"The coordinator's disk failed: {exc.strerror}. Ask again.")


KEPT_FILES = 8
"""Largest number of idle files; further ones are closed, which frees their space."""

SMALL_BYTES = 2**20
"""Smaller files are not reused."""


class SpareFile:
    """An anonymous file; it is closed with this object."""

    def __init__(self, handle: int) -> None:
        self.handle, self.size_bytes = handle, 0

    def __del__(self) -> None:
        os.close(self.handle)


class SpareFiles:
    """A pool of files created by `make`. Thread-safe."""

    def __init__(self, make: Callable[[], int]) -> None:
        self._make = make
        # No lock: a finalizer may return a file while this thread searches for one.
        self._idle: deque[SpareFile] = deque(maxlen=KEPT_FILES)

    def file(self, size_bytes: int) -> SpareFile:
        """Return a file for `size_bytes` bytes with arbitrary content."""
        for _ in range(len(self._idle)):
            try:
                file = self._idle.popleft()
            except IndexError:  # another thread was faster
                break
            if size_bytes <= file.size_bytes <= 2 * size_bytes:
                os.lseek(file.handle, 0, os.SEEK_SET)
                return file
            self._idle.append(file)
        return SpareFile(self._make())

    def clear(self) -> None:
        """Close the idle files, which frees their space."""
        self._idle.clear()

    def mapped(self, file: SpareFile, size_bytes: int) -> mmap.mmap:
        """Map the first bytes of a file, which returns to the pool with the mapping.

        Every view of them keeps them.
        """
        mapped = mmap.mmap(file.handle, size_bytes, prot=mmap.PROT_READ)
        file.size_bytes = max(file.size_bytes, size_bytes)
        if size_bytes >= SMALL_BYTES:
            weakref.finalize(mapped, self._idle.append, file).atexit = False
        return mapped
