"""Reading files that somebody may have torn, changed, or written to harm.

Rule 1: only a regular file is opened, never what a link points to.
Rule 2: nothing is read or parsed that has not been bounded first.
Rule 3: what is wrong is a CorruptError, whatever Python calls it.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import numpy as np
from blake3 import blake3

from atoll.checkpoint.arrays import Bytes
from atoll.errors import CorruptError

MAX_JSON_BYTES = 2**28
_PIECE_BYTES = 2**22


def open_regular(path: Path) -> tuple[int, int]:
    """Return a handle to a file and its size.

    Raises:
        CorruptError: it is not there, or is no regular file.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        handle = os.open(path, flags)
    except FileNotFoundError as exc:
        raise CorruptError(f"{path.name} is missing") from exc
    except OSError as exc:
        raise CorruptError(f"{path.name} cannot be read: {exc.strerror}") from exc
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode):
        os.close(handle)
        raise CorruptError(f"{path.name} is no regular file")
    return handle, status.st_size


def read_exactly(handle: int, first: int, into: Bytes, path: Path) -> None:
    """Fill `into` from a place of a file on.

    Raises:
        CorruptError: the file ends before that, or cannot be read.
    """
    view = into.data if len(into) else memoryview(b"")
    while view:
        try:
            size = os.preadv(handle, [view[:_PIECE_BYTES]], first)
        except OSError as exc:
            raise CorruptError(f"{path.name} cannot be read: {exc.strerror}") from exc
        if size == 0:
            raise CorruptError(f"{path.name} ends {len(view)} bytes too early")
        view, first = view[size:], first + size


def read_bounded(path: Path, *, limit_bytes: int = MAX_JSON_BYTES) -> bytes:
    """Return a whole file.

    Raises:
        CorruptError: it is not there, or longer than the limit.
    """
    handle, size = open_regular(path)
    try:
        if size > limit_bytes:
            raise CorruptError(
                f"{path.name} has {size} bytes, more than the {limit_bytes} allowed"
            )
        data = np.empty(size, np.uint8)
        read_exactly(handle, 0, data, path)
        return data.tobytes()
    finally:
        os.close(handle)


def parse_json(data: bytes, path: Path) -> object:
    """Return what JSON says, refusing what is not JSON and keys that come twice."""
    try:
        return json.loads(
            data, object_pairs_hook=_without_twins, parse_constant=_no_constant
        )
    except (ValueError, RecursionError) as exc:
        raise CorruptError(f"{path.name} is no JSON: {str(exc)[:200]}") from exc


def digest_of(path: Path) -> tuple[int, str]:
    """Return the size and the BLAKE3 digest of a file."""
    handle, size = open_regular(path)
    try:
        hasher = blake3()
        piece = np.empty(min(size, _PIECE_BYTES), np.uint8)
        for first in range(0, size, _PIECE_BYTES):
            part = piece[: min(_PIECE_BYTES, size - first)]
            read_exactly(handle, first, part, path)
            hasher.update(part.data)
        return size, hasher.hexdigest()
    finally:
        os.close(handle)


def _without_twins(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key comes twice")
    return found


def _no_constant(word: str) -> object:
    raise ValueError(f"{word} is no number of JSON")
