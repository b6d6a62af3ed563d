"""Files that are written once and whole, and anonymous files.

Rule 1: a file is durable when fsync has returned. Everything else is advice to
        the system, and changes only the time of its work.
Rule 2: an anonymous file has no name, so its space is free again regardless of how
        the process ends.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from atoll.disk.base import TEMPORARY, Data

BEHIND_BYTES = 2**21
"""Write-back of a new file starts after each such piece, so that fsync is short."""

_RANGE_WRITE = 2
"""SYNC_FILE_RANGE_WRITE of Linux."""


def write_whole(path: Path, parts: Iterable[Data]) -> int:
    """Make a durable file, and return its size."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    handle = os.open(path, flags, 0o600)
    try:
        size = _write_parts(handle, parts)
        os.fsync(handle)
        return size
    finally:
        os.close(handle)


def write_all(handle: int, data: Data) -> None:
    """Write all of `data` to a file, which may take several calls."""
    view = _bytes_of(data)
    while view:
        view = view[os.write(handle, view) :]


def give_up_memory(path: Path) -> None:
    """Drop a file from the page cache; it is durable on the disk."""
    if sys.platform == "linux":
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def sync_directory(directory: Path) -> None:
    """Return when the names in a directory are durable."""
    handle = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write_parts(handle: int, parts: Iterable[Data]) -> int:
    size = begun = 0
    for part in parts:
        for piece in _pieces(_bytes_of(part)):
            write_all(handle, piece)
            size += len(piece)
            if size - begun >= BEHIND_BYTES:
                _begin(handle, begun, size - begun)
                begun = size
    return size


def _pieces(view: memoryview) -> Iterator[memoryview]:
    for first in range(0, len(view), BEHIND_BYTES):
        yield view[first : first + BEHIND_BYTES]


def _bytes_of(data: Data) -> memoryview:
    view = memoryview(data)
    return (
        view.cast("B") if view.nbytes else memoryview(b"")
    )  # an empty view cannot be cast


def _beginner() -> Callable[[int, int, int], object]:
    """Return a function that starts the write-back of a file's range without waiting.

    Its errors are reported by fsync.
    """
    try:
        start = ctypes.CDLL(None).sync_file_range
    except AttributeError:  # not on this system: fsync does it all
        return lambda handle, first, size: None
    start.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return lambda handle, first, size: start(handle, first, size, _RANGE_WRITE)


_begin = _beginner()


_O_TMPFILE: int | None = getattr(os, "O_TMPFILE", None)  # Linux only

_UNSUPPORTED = {
    errno.EINVAL,
    errno.EISDIR,
    errno.ENOENT,
    errno.ENOSYS,
    errno.EOPNOTSUPP,
}
"""Errors of file systems without O_TMPFILE: NFS, most of FUSE."""

_PREFIX = "nameless-"


def open_nameless(directory: Path) -> int:
    """Return a new file for reading and writing that is removed with its last handle.

    Where the file system has no O_TMPFILE, the file is made with a name that is
    removed immediately. A crash between the two leaves an empty file, see
    `sweep_nameless`.
    """
    if _O_TMPFILE is not None:
        try:
            return os.open(directory, _O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as exc:
            if exc.errno not in _UNSUPPORTED:
                raise
    path = directory / f"{_PREFIX}{secrets.token_hex(16)}{TEMPORARY}"
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    handle = os.open(path, flags, 0o600)
    try:
        os.unlink(path)
    except BaseException:
        os.close(handle)
        raise
    return handle


def sweep_nameless(directory: Path) -> None:
    """Remove names that a crash left. No other process may use the directory."""
    for path in directory.glob(f"{_PREFIX}*{TEMPORARY}"):
        with suppress(FileNotFoundError):
            path.unlink()
