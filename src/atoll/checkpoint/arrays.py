"""Arrays of a checkpoint, and safe reading of their files.

Rule 1: a kind is one of safetensors' own, so that any reader of it can read ours.
Rule 2: bytes are little-endian, in C order, without gaps.

An array file is safetensors, written in pieces: 8 bytes with the header's length, a
header of JSON with each array's kind, shape and offsets, then the arrays one after the
other.

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
import struct
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from atoll.disk import Data
from atoll.errors import CorruptError

Bytes = NDArray[np.uint8]

SIZES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
}
"""Size of one number in bytes, by kind."""

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
        return json.loads(
            data, object_pairs_hook=_without_duplicates, parse_constant=_no_constant
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


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise ValueError("a key comes twice")
    return entries


def _no_constant(constant: str) -> object:
    raise ValueError(f"{constant} is no number of JSON")


MAX_HEADER_BYTES = 2**28
MAX_ARRAYS = 2**21
MAX_DIMENSIONS = 32
_METADATA = "__metadata__"
_ALIGNMENT = 8


def array_file_parts(arrays: Mapping[str, CheckpointArray]) -> Iterator[Data]:
    """Yield the bytes of a file that holds these arrays."""
    header: dict[str, object] = {_METADATA: _sharding(arrays)}
    end = 0
    for name, array in arrays.items():
        first, end = end, end + size_bytes(array.kind, array.shape)
        header[name] = {
            "dtype": array.kind,
            "shape": list(array.shape),
            "data_offsets": [first, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    yield struct.pack("<Q", len(text)) + text
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


@dataclass(frozen=True)
class _ArrayEntry:
    kind: str
    shape: tuple[int, ...]
    first: int


class ArrayFile:
    """The arrays of a file. An array is read when `read` is called.

    Raises:
        CorruptError: the file is no array file, or its header is inconsistent.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        handle, size = open_regular(path)
        try:
            self._entries = _read_header(handle, size, path)
        finally:
            os.close(handle)

    def names(self) -> set[str]:
        return set(self._entries)

    def read(self, name: str) -> HostArray:
        """Return an array in new memory."""
        entry = self._entries.get(name)
        if entry is None:
            raise CorruptError(f"{self.path} has no array {name[:200]!r}.")
        data: Bytes = np.empty(size_bytes(entry.kind, entry.shape), np.uint8)
        handle, _ = open_regular(self.path)
        try:
            read_exactly(handle, entry.first, data, self.path)
        finally:
            os.close(handle)
        return HostArray(data, entry.kind, entry.shape)


def _read_header(handle: int, size: int, path: Path) -> dict[str, _ArrayEntry]:
    length = np.empty(8, np.uint8)
    read_exactly(handle, 0, length, path)
    (header_bytes,) = struct.unpack("<Q", length.tobytes())
    if header_bytes > min(MAX_HEADER_BYTES, size - 8):
        raise CorruptError(
            f"{path} announces a header of {header_bytes} bytes, which is more than "
            f"the file or than {MAX_HEADER_BYTES}."
        )
    text = np.empty(header_bytes, np.uint8)
    read_exactly(handle, 8, text, path)
    header = parse_json(text.tobytes(), path)
    if not isinstance(header, dict) or len(header) > MAX_ARRAYS:
        raise CorruptError(
            f"The header of {path} is no object of at most {MAX_ARRAYS}."
        )
    header.pop(_METADATA, None)
    start = 8 + header_bytes
    entries = {}
    end = 0
    # In the order of the file each array begins where the last one ended: every byte
    # is in exactly one array.
    for name, item in sorted(header.items(), key=lambda pair: _offsets(pair[1], path)):
        entry, last = _parse_entry(item, end, path)
        entries[name] = _ArrayEntry(entry.kind, entry.shape, start + entry.first)
        end = last
    if start + end != size:
        raise CorruptError(f"{path} has {size} bytes, and its header {start + end}.")
    return entries


def _offsets(entry: object, path: Path) -> tuple[int, int]:
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    if not (
        isinstance(offsets, list)
        and len(offsets) == 2
        and all(type(offset) is int and offset >= 0 for offset in offsets)
    ):
        raise CorruptError(f"The header of {path} does not say where its arrays are.")
    return offsets[0], offsets[1]


def _parse_entry(
    entry: dict[str, object], end: int, path: Path
) -> tuple[_ArrayEntry, int]:
    kind, shape = entry.get("dtype"), entry.get("shape")
    first, last = _offsets(entry, path)
    is_right = (
        isinstance(kind, str)
        and kind in SIZES
        and isinstance(shape, list)
        and len(shape) <= MAX_DIMENSIONS
        and all(type(length) is int and 0 <= length < 2**48 for length in shape)
        and first == end
        and last - first == size_bytes(kind, tuple(shape))
    )
    if not is_right:
        raise CorruptError(
            f"The header of {path} has an array of {str(kind)[:20]} and "
            f"{str(shape)[:80]} from {first} to {last}, which is inconsistent."
        )
    assert isinstance(kind, str)
    assert isinstance(shape, list)
    return _ArrayEntry(kind, tuple(shape), first), last
