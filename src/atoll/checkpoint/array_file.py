"""Arrays in a file: safetensors, written in pieces and read with mistrust.

The format: 8 bytes with the header's length, a header of JSON that says each array's
kind, shape and place, then the arrays one after the other. Whoever reads safetensors
reads these files; whoever wrote them is not believed.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from atoll.checkpoint.arrays import SIZES, Array, Bytes, HostArray, size_bytes
from atoll.checkpoint.mistrust import open_regular, parse_json, read_exactly
from atoll.disk import Data
from atoll.errors import CorruptError

MAX_HEADER_BYTES = 2**28
MAX_ARRAYS = 2**21
MAX_DIMENSIONS = 32
_METADATA = "__metadata__"
_ALIGNMENT = 8


def array_file_parts(arrays: Mapping[str, Array]) -> Iterator[Data]:
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


def _sharding(arrays: Mapping[str, Array]) -> dict[str, str]:
    """Return where pieces belong, as torch.distributed.checkpoint's own files say it.

    Its reader of safetensors can then put our shards together, too.
    """
    if all(array.offset is None for array in arrays.values()):
        return {"format": "pt"}
    offsets = {
        name: {"saved_offsets": list(array.offset or (0,) * len(array.shape))}
        for name, array in arrays.items()
    }
    return {"format": "pt", "DCP_SHARDING_INFO": json.dumps(offsets)}


@dataclass(frozen=True)
class _Place:
    kind: str
    shape: tuple[int, ...]
    first: int


class ArrayFile:
    """The arrays of a file, each of which is read when it is asked for.

    Raises:
        CorruptError: the file is not such a file, or says what cannot be.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        handle, size = open_regular(path)
        try:
            self._places = _places(handle, size, path)
        finally:
            os.close(handle)

    def names(self) -> set[str]:
        return set(self._places)

    def read(self, name: str) -> HostArray:
        """Return an array, in memory that is the caller's alone."""
        place = self._places.get(name)
        if place is None:
            raise CorruptError(f"{self.path} has no array {name[:200]!r}.")
        data: Bytes = np.empty(size_bytes(place.kind, place.shape), np.uint8)
        handle, _ = open_regular(self.path)
        try:
            read_exactly(handle, place.first, data, self.path)
        finally:
            os.close(handle)
        return HostArray(data, place.kind, place.shape)


def _places(handle: int, size: int, path: Path) -> dict[str, _Place]:
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
    found = {}
    end = 0
    # In the order of the file each array begins where the last one ended: no byte is
    # in two arrays, and none is in nobody's.
    for name, entry in sorted(header.items(), key=lambda item: _first(item[1], path)):
        place, last = _place(entry, end, path)
        found[name] = _Place(place.kind, place.shape, start + place.first)
        end = last
    if start + end != size:
        raise CorruptError(f"{path} has {size} bytes, and its header {start + end}.")
    return found


def _first(entry: object, path: Path) -> tuple[int, int]:
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    if not (
        isinstance(offsets, list)
        and len(offsets) == 2
        and all(type(each) is int and each >= 0 for each in offsets)
    ):
        raise CorruptError(f"The header of {path} does not say where its arrays are.")
    return offsets[0], offsets[1]


def _place(entry: dict[str, object], end: int, path: Path) -> tuple[_Place, int]:
    kind, shape = entry.get("dtype"), entry.get("shape")
    first, last = _first(entry, path)
    is_right = (
        isinstance(kind, str)
        and kind in SIZES
        and isinstance(shape, list)
        and len(shape) <= MAX_DIMENSIONS
        and all(type(each) is int and 0 <= each < 2**48 for each in shape)
        and first == end
        and last - first == size_bytes(kind, tuple(shape))
    )
    if not is_right:
        raise CorruptError(
            f"The header of {path} has an array of {str(kind)[:20]} and "
            f"{str(shape)[:80]} from {first} to {last}, which cannot be."
        )
    assert isinstance(kind, str)
    assert isinstance(shape, list)
    return _Place(kind, tuple(shape), first), last
