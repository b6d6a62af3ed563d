"""Frames in files: written whole or not at all, read piece by piece."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from atoll.errors import CorruptError, UsageError
from atoll.wire.codecs import codec
from atoll.wire.digests import Bytes, piece_range, view_of
from atoll.wire.frame import (
    MAX_BODY_BYTES,
    MAX_HEADER_BYTES,
    PREFIX_BYTES,
    header_length,
    pack,
    unpack,
    verify_piece,
)
from atoll.wire.header import Header
from atoll.wire.roster import FETCH_AGAIN


def read_header(
    file: BinaryIO,
    *,
    max_header_bytes: int = MAX_HEADER_BYTES,
    max_body_bytes: int = MAX_BODY_BYTES,
) -> Header:
    """Return the header at the start of `file`, which then stands at the body."""
    prefix = file.read(PREFIX_BYTES)
    needed = header_length(
        prefix, max_header_bytes=max_header_bytes, max_body_bytes=max_body_bytes
    )
    data = prefix + file.read(needed - PREFIX_BYTES)
    return unpack(
        data, max_header_bytes=max_header_bytes, max_body_bytes=max_body_bytes
    )


def read_pieces(file: BinaryIO, header: Header) -> Iterator[bytes]:
    """Yield each piece of the body, verified, holding one at a time.

    Raises CorruptError at the first piece that does not verify, or when bytes follow
    the last one.
    """
    packing = codec(header.codec)
    for index in range(len(header.pieces)):
        start, end = piece_range(packing, header.elements, index)
        piece = file.read(end - start)
        verify_piece(header, index, piece)
        yield piece
    if file.read(1):
        raise CorruptError(f"bytes follow the body of the {header.name}. {FETCH_AGAIN}")


def read_frame(
    file: BinaryIO,
    *,
    max_header_bytes: int = MAX_HEADER_BYTES,
    max_body_bytes: int = MAX_BODY_BYTES,
) -> tuple[Header, NDArray[np.uint8]]:
    """Return the frame in `file`, verified; memory grows only with bytes read."""
    header = read_header(
        file, max_header_bytes=max_header_bytes, max_body_bytes=max_body_bytes
    )
    body = bytearray()
    for piece in read_pieces(file, header):
        body += piece
    return header, np.frombuffer(body, dtype=np.uint8)


def write_frame(path: str | Path, header: Header, body: Bytes) -> None:
    """Make `path` hold the frame, durably.

    Safe to repeat. After an error or a crash the path holds what it held before, or
    the whole frame.
    """
    view = view_of(body)
    if len(view) != header.body_bytes:
        raise UsageError(
            f"a body of {len(view)} bytes is not the one that the {header.name} was "
            f"sealed for, of {header.body_bytes}. Call with_body first."
        )
    target = Path(path)
    with NamedTemporaryFile(dir=target.parent, prefix=".", delete=False) as file:
        try:
            file.write(pack(header))
            file.write(view)
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, target)
        except BaseException:
            os.unlink(file.name)
            raise
    _sync_directory(target.parent)


def _sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
