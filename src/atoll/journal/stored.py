"""Frames that lie on a disk, read piece by piece and verified before use."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from atoll.disk import Disk
from atoll.errors import CorruptError, NoSuchFile
from atoll.wire import (
    PREFIX_BYTES,
    Header,
    codec,
    header_length,
    pack,
    piece_range,
    unpack,
    verify_piece,
)
from atoll.wire.digests import view_of

U8 = NDArray[np.uint8]
Framed = tuple[Header, U8]
"""A header and the body it describes."""


@dataclass(frozen=True)
class StoredBody:
    """The body that `header` describes, at byte `first` of a file.

    What is not there, or not what the header says, is a CorruptError.
    """

    disk: Disk
    name: str
    header: Header
    first: int

    def piece(self, index: int) -> bytes:
        """Return one piece of the body, verified."""
        start, end = piece_range(codec(self.header.codec), self.header.elements, index)
        data = read_part(self.disk, self.name, self.first + start, end - start)
        try:
            verify_piece(self.header, index, data)
        except CorruptError as exc:
            raise CorruptError(f"{self.name} is damaged: {exc}") from exc
        return data

    def verify(self) -> None:
        """Return if every piece verifies, holding one at a time."""
        for index in range(len(self.header.pieces)):
            self.piece(index)

    def read(self) -> U8:
        """Return the whole body, verified."""
        size = self.header.body_bytes
        # Memory is reserved only for what the file can fill.
        if size and len(read_part(self.disk, self.name, self.first + size - 1, 1)) < 1:
            raise CorruptError(f"{self.name} is too short for the {self.header.name}.")
        body, at = np.empty(size, np.uint8), 0
        for index in range(len(self.header.pieces)):
            piece = self.piece(index)
            body[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
            at += len(piece)
        return body


def stored_frame(disk: Disk, name: str) -> StoredBody:
    """Return the frame that a file holds: its header verified, its body not yet.

    Raises:
        CorruptError: the file is missing, or holds anything but one frame.
    """
    try:
        prefix = read_part(disk, name, 0, PREFIX_BYTES)
        size = header_length(prefix)
        header = unpack(read_part(disk, name, 0, size))
    except CorruptError as exc:
        raise CorruptError(f"{name} is damaged: {exc}") from exc
    if read_part(disk, name, size + header.body_bytes, 1):
        raise CorruptError(f"{name} is damaged: bytes follow the {header.name}.")
    return StoredBody(disk, name, header, size)


class Drafts:
    """Writes frame files, and remembers those that no record names yet."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._names: set[str] = set()

    def write(self, name: str, header: Header, body: U8) -> None:
        """Make a file of a frame, complete and durable; an unnamed one gives way."""
        if name in self._names:
            self._disk.remove(name)
        self._names.add(name)
        self._disk.write_new(name, [pack(header), view_of(body)])

    def give_way(self, name: str) -> None:
        """Let `write` replace an existing file that no record names."""
        self._names.add(name)

    def keep(self, name: str) -> None:
        """Note that a durable record names the file."""
        self._names.discard(name)


def read_part(disk: Disk, name: str, first: int, size: int) -> bytes:
    """Return bytes of a file that must be there; fewer where it ends."""
    try:
        return disk.read(name, first, size)
    except NoSuchFile as exc:
        raise CorruptError(
            f"{name} is missing, and the journal needs it. Restore it from a copy."
        ) from exc
