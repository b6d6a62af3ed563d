"""Frames in files, read piece by piece."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from atoll.errors import CorruptError
from atoll.wire.frame import (
    MAX_BODY_BYTES,
    MAX_HEADER_BYTES,
    PREFIX_BYTES,
    header_length,
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
    for index in range(len(header.pieces)):
        start, end = header.piece_range(index)
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
