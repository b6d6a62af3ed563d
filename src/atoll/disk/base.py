"""Files that survive a power cut: the port to a disk, and its errors.

Rule 1: a file is either appended to, or written once and whole; never changed.
Rule 2: after a crash, bytes that were not synced are present, in part, or absent.
Rule 3: one process at a time owns a disk, and its ownership ends with the process.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from atoll.errors import DiskDenied, DiskError, DiskFull, NoSuchFile, UsageError

Data = bytes | bytearray | memoryview

MAX_NAME_BYTES = 512
MAX_PART_BYTES = 200
"""Below the limit of file systems, so that a temporary name still fits."""

LOCK = "lock"
TEMPORARY = "~"
"""Ends the name of a file that is being written; no checked name contains it."""

NAME = re.compile(r"[a-z0-9._-]+(/[a-z0-9._-]+)*")
"""Parts of a path: only their characters are checked."""


class Disk(Protocol):
    """Keeps files by name. The journal is the only caller.

    A name is a relative path of parts in lower case, see `check_name`. When the disk
    fails, methods raise `DiskError`: `DiskFull` when it has no room, `DiskDenied` when
    it cannot be written to.
    """

    def append(self, name: str, data: Data) -> None:
        """Write `data` to the end of a file, made if absent; durable after `sync`.

        After an error, the file may end with any part of `data`.
        """
        ...

    def sync(self, name: str) -> None:
        """Return when all bytes appended to a file, and the file, are durable.

        After an error, bytes appended since the last `sync` may be durable or not, and
        a later `sync` that succeeds does not change that.
        """
        ...

    def write_new(self, name: str, parts: Iterable[Data]) -> None:
        """Make a file of `parts`, complete and durable on return.

        On an error, also one that `parts` raises, the file is absent or, rarely,
        complete; after a crash likewise.

        Raises:
            UsageError: the name is taken.
        """
        ...

    def read(self, name: str, first: int = 0, size: int | None = None) -> bytes:
        """Return up to `size` bytes from `first` on: fewer where the file ends.

        Raises:
            NoSuchFile: there is no such file.
        """
        ...

    def names(self, prefix: str) -> list[str]:
        """Return the names that start with `prefix`, sorted; none is unfinished."""
        ...

    def remove(self, name: str) -> None:
        """Remove a file, if it exists. After a crash it may exist again."""
        ...

    def free_bytes(self) -> int:
        """Return how many more bytes can be written now, as the system reports."""
        ...


def check_name(name: str) -> str:
    """Return `name` if a disk can keep a file by it.

    Raises:
        UsageError: it is not a relative path of parts made of a-z, 0-9, dot, dash
            and underscore, or it is too long.
    """
    parts = name.split("/")
    is_right = (
        len(name) <= MAX_NAME_BYTES
        and NAME.fullmatch(name) is not None
        and not {".", ".."} & set(parts)
        and max(map(len, parts)) <= MAX_PART_BYTES
    )
    if not is_right:
        raise UsageError(
            f"{name[:MAX_NAME_BYTES]!r} cannot name a file: a name is parts of a-z, "
            f"0-9, '.', '_' and '-' with '/' between them, at most {MAX_PART_BYTES} "
            f"characters each and {MAX_NAME_BYTES} in all."
        )
    return name


_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_DENIED = {errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST}


@contextmanager
def translated(path: Path) -> Iterator[None]:
    """Translate an `OSError` of the block into an error of `atoll.errors`."""
    try:
        yield
    except FileNotFoundError as exc:
        raise NoSuchFile(f"{exc.filename or path} does not exist.") from exc
    except OSError as exc:
        reason = os.strerror(exc.errno) if exc.errno else str(exc)
        if exc.errno in _FULL:
            raise DiskFull(
                f"No room for {path}: {reason}. Free some space there; nothing that "
                "was durable is lost."
            ) from exc
        if exc.errno in _DENIED:
            raise DiskDenied(
                f"{path} cannot be written or read: {reason}. Give this user the right "
                "to write there, or choose another directory."
            ) from exc
        raise DiskError(
            f"The disk failed at {path}: {reason}. Check the system's log before you "
            "continue."
        ) from exc
