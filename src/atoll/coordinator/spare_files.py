"""Files without names, written over when nobody reads them any more.

A body comes with every round and is as large as the last one. The system keeps the
pages of a file as long as there is the file, and fresh pages cost several times what it
takes to fill them: so a file is lent again, and not made anew.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections import deque
from collections.abc import Callable

KEPT_FILES = 8
"""So many files are kept; what comes back beyond is gone, with its room on the disk."""

SMALL_BYTES = 2**20
"""What is smaller is not worth keeping."""


class SpareFile:
    """A file without a name; it is gone with this object."""

    def __init__(self, handle: int) -> None:
        self.handle, self.size_bytes = handle, 0

    def __del__(self) -> None:
        os.close(self.handle)


class SpareFiles:
    """Lends files that `make` makes. Any number of threads may ask, at once."""

    def __init__(self, make: Callable[[], int]) -> None:
        self._make = make
        # No lock: a file may come back while this very thread looks for one.
        self._kept: deque[SpareFile] = deque(maxlen=KEPT_FILES)

    def file(self, size_bytes: int) -> SpareFile:
        """Return a file for so many bytes, whose content means nothing."""
        for _ in range(len(self._kept)):
            try:
                file = self._kept.popleft()
            except IndexError:  # another thread was faster
                break
            if size_bytes <= file.size_bytes <= 2 * size_bytes:
                os.lseek(file.handle, 0, os.SEEK_SET)
                return file
            self._kept.append(file)
        return SpareFile(self._make())

    def clear(self) -> None:
        """Give back the room of the files that are not lent."""
        self._kept.clear()

    def mapped(self, file: SpareFile, size_bytes: int) -> mmap.mmap:
        """Return the first bytes of a file, which is lent again when they are gone.

        Every view of them keeps them.
        """
        mapped = mmap.mmap(file.handle, size_bytes, prot=mmap.PROT_READ)
        file.size_bytes = max(file.size_bytes, size_bytes)
        if size_bytes >= SMALL_BYTES:
            weakref.finalize(mapped, self._kept.append, file).atexit = False
        return mapped
