"""Arrays of a checkpoint, and safe reading of their files.

Rule 1: a kind is one of safetensors' own, so that any reader of it can read ours.
Rule 2: bytes are little-endian, in C order, without gaps.

An array file is a safetensors file, written in pieces.

Files may be torn, changed, or written to harm.
Rule 3: only a regular file is opened, never the target of a link.
Rule 4: every size is bounded before anything is read or parsed.
Rule 5: a wrong file raises CorruptError, whichever exception Python raised.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Hashable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from atoll import safetensors
from atoll.disk import Data
from atoll.errors import CorruptError
from atoll.safetensors import SIZES, ArrayEntry, SafetensorsHeader, read_header

Bytes = NDArray[np.uint8]

_OF_NUMPY = {
    "|b1": "BOOL",
    "|u1": "U8",
    "|i1": "I8",
    "<u2": "U16",
    "<i2": "I16",
    "<f2": "F16",
    "<u4": "U32",
    "<i4": "I32",
    "<f4": "F32",
    "<u8": "U64",
    "<i8": "I64",
    "<f8": "F64",
    "<c8": "C64",
}
_TO_NUMPY = {kind: np.dtype(text) for text, kind in _OF_NUMPY.items()}


class CheckpointArray(Protocol):
    """An array to be written. The writer of a checkpoint is the only caller."""

    @property
    def kind(self) -> str:
        """One of `SIZES`."""
        ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def offset(self) -> tuple[int, ...] | None:
        """Position of this part in an array of several ranks; None: not sharded."""
        ...

    @property
    def identity(self) -> Hashable:
        """Equal for two arrays in the same memory, so that it is written once."""
        ...

    def flat(self) -> Bytes:
        """Return the bytes in host memory, if possible without a copy."""
        ...

    def copy_to(self, into: Bytes) -> None:
        """Copy the bytes to `into`, which has the same length."""
        ...


def size_bytes(kind: str, shape: tuple[int, ...]) -> int:
    """Return the size of an array in bytes."""
    return SIZES[kind] * math.prod(shape)


def kind_of(dtype: np.dtype[np.generic]) -> str | None:
    """Return the kind of a numpy dtype; None if a checkpoint cannot hold it."""
    return _OF_NUMPY.get(dtype.newbyteorder("<").str)


class NumpyArray:
    """An array of numpy. Implements `CheckpointArray`."""

    offset = None

    def __init__(self, array: NDArray[np.generic], kind: str) -> None:
        self.kind = kind
        self.shape = array.shape
        self._array = array

    @property
    def identity(self) -> Hashable:
        array = self._array
        address = array.__array_interface__["data"][0]
        return ("numpy", address, array.shape, array.strides, array.dtype.str)

    def flat(self) -> Bytes:
        little = self._array.astype(_TO_NUMPY[self.kind], order="C", copy=False)
        return little.reshape(-1).view(np.uint8)

    def copy_to(self, into: Bytes) -> None:
        target = into.view(_TO_NUMPY[self.kind]).reshape(self.shape)
        np.copyto(target, self._array)


class HostArray:
    """Bytes in memory, to or from a checkpoint. Implements `CheckpointArray`."""

    def __init__(
        self,
        data: Bytes,
        kind: str,
        shape: tuple[int, ...],
        offset: tuple[int, ...] | None = None,
    ) -> None:
        self.kind = kind
        self.shape = shape
        self.offset = offset
        self._data = data

    @property
    def identity(self) -> Hashable:
        return ("host", id(self))

    def flat(self) -> Bytes:
        return self._data

    def copy_to(self, into: Bytes) -> None:
        np.copyto(into, self._data)

    def numpy(self) -> NDArray[np.generic] | None:
        """Return a numpy array of the same memory; None if numpy has no such kind."""
        if self.kind not in _TO_NUMPY:
            return None
        return self._data.view(_TO_NUMPY[self.kind]).reshape(self.shape)


MAX_JSON_BYTES = 2**28
_PIECE_BYTES = 2**22


def open_regular(path: Path) -> tuple[int, int]:
    """Return a handle of a file, and its size.

    Raises:
        CorruptError: the file does not exist, or is no regular file.
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
    """Fill `into` with the bytes of a file from the offset `first`.

    Raises:
        CorruptError: the file is too short, or cannot be read.
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
        CorruptError: the file does not exist, or is longer than the limit.
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
    """Return the value of a JSON text.

    Raises:
        CorruptError: it is not JSON, or an object has a key twice.
    """
    try:
        return safetensors.parse_json(data)
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


def array_file_parts(arrays: Mapping[str, CheckpointArray]) -> Iterator[Data]:
    """Yield the bytes of a file that holds these arrays."""
    entries, end = {}, 0
    for name, array in arrays.items():
        first, end = end, end + size_bytes(array.kind, array.shape)
        entries[name] = ArrayEntry(array.kind, array.shape, first, end)
    yield SafetensorsHeader(entries, _sharding(arrays)).pack()
    for array in arrays.values():
        yield array.flat().data


def _sharding(arrays: Mapping[str, CheckpointArray]) -> dict[str, str]:
    """Return the offsets of shards, as torch.distributed.checkpoint writes them.

    Its reader of safetensors can then join our shards, too.
    """
    if all(array.offset is None for array in arrays.values()):
        return {"format": "pt"}
    offsets = {
        name: {"saved_offsets": list(array.offset or (0,) * len(array.shape))}
        for name, array in arrays.items()
    }
    return {"format": "pt", "DCP_SHARDING_INFO": json.dumps(offsets)}


class ArrayFile:
    """The arrays of a file. An array is read when `read` is called.

    Raises:
        CorruptError: the file is no array file, or its header is inconsistent.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        handle, size = open_regular(path)
        try:
            self._header = read_header(
                partial(_range, handle, path), source=str(path), file_bytes=size
            )
        finally:
            os.close(handle)
        for name, entry in self._header.arrays.items():
            if entry.kind not in SIZES:
                raise CorruptError(
                    f"{path} has an array {name[:200]!r} of {entry.kind[:20]!r}, which "
                    "no checkpoint holds."
                )

    def names(self) -> set[str]:
        return set(self._header.arrays)

    def read(self, name: str) -> HostArray:
        """Return an array in new memory."""
        entry = self._header.arrays.get(name)
        if entry is None:
            raise CorruptError(f"{self.path} has no array {name[:200]!r}.")
        data: Bytes = np.empty(size_bytes(entry.kind, entry.shape), np.uint8)
        handle, _ = open_regular(self.path)
        try:
            first = self._header.size_bytes + entry.first
            read_exactly(handle, first, data, self.path)
        finally:
            os.close(handle)
        return HostArray(data, entry.kind, entry.shape)


def _range(handle: int, path: Path, first: int, last: int) -> bytes:
    data = np.empty(last - first, np.uint8)
    read_exactly(handle, first, data, path)
    return data.tobytes()
