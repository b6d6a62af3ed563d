"""Files that survive a power cut: the port to a disk.

Rule 1: a file is either appended to, or written once and whole; never changed.
Rule 2: what was not synced may be there after a crash, in part, or not at all.
Rule 3: one process at a time owns a disk, and its ownership dies with it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Protocol

from atoll.errors import UsageError

Data = bytes | bytearray | memoryview

MAX_NAME_BYTES = 512
MAX_PART_BYTES = 200
"""Below what file systems allow, so that a temporary name still fits."""

LOCK = "lock"
TEMPORARY = "~"
"""Ends the name of a file that is being written; no checked name contains it."""

NAME = re.compile(r"[a-z0-9._-]+(/[a-z0-9._-]+)*")
"""Parts of a path, as far as their letters go."""


class Disk(Protocol):
    """Keeps files by name. The journal is the only caller.

    A name is a relative path of parts in lower case, as `check_name` says. What a
    method raises is a `DiskError` when the disk fails (`DiskFull` when it has no room,
    `DiskDenied` when it cannot be written to).
    """

    def append(self, name: str, data: Data) -> None:
        """Write `data` to the end of a file, made if absent; durable after `sync`.

        On an error any part of `data` may stand at the end of the file.
        """
        ...

    def sync(self, name: str) -> None:
        """Return when all that was appended to a file, and the file, are durable.

        On an error nothing is known about what was appended since the last `sync`, and
        a later one that succeeds says nothing about it either.
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
        """Forget a file; absent is fine. After a crash it may be there again."""
        ...

    def free_bytes(self) -> int:
        """Return how many more bytes can be written now, as far as the system says."""
        ...


def check_name(name: str) -> str:
    """Return `name` if a disk can keep a file by it.

    Raises:
        UsageError: it is no relative path of parts made of a-z, 0-9, dot, dash and
            underscore, or too long.
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
