"""Files that are written once and whole, without waiting more than the disk demands.

Rule 1: a file is durable when fsync has said so. All else here is advice to the system,
        and changes only when it does its work.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from atoll.disk.port import Data

BEHIND_BYTES = 2**21
"""After so much of a new file, the disk begins with it: fsync finds most of it done."""

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
    """Have the system forget what it holds of a file in memory; the disk has it."""
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
    return view.cast("B") if view.nbytes else memoryview(b"")  # it casts no empty view


def _beginner() -> Callable[[int, int, int], object]:
    """Return what has the system write a range of a file from now on, without waiting.

    Whether that fails is for fsync to say.
    """
    try:
        start = ctypes.CDLL(None).sync_file_range
    except AttributeError:  # a system without it leaves everything to fsync
        return lambda handle, first, size: None
    start.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return lambda handle, first, size: start(handle, first, size, _RANGE_WRITE)


_begin = _beginner()
