"""Headers of safetensors files, for files that are read or written in pieces.

The library of safetensors holds whole tensors in memory. Ours are streamed: from the
network, into an anonymous file, by ranges, and with the bytes of types that numpy does
not have.

    offset  size  field
    0       8     length of the header, little-endian
    8       n     JSON: {name: {"dtype", "shape", "data_offsets"}, "__metadata__": {}}
    8 + n         the arrays without gaps, at their offsets from here

A file may be hostile.
Rule 1: every size is checked before anything of that size is read or parsed.
Rule 2: an invalid header raises CorruptError, whichever exception Python raised.
Rule 3: every byte after the header belongs to exactly one array.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import BinaryIO

from atoll.errors import CorruptError

SIZES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}
"""Size of one number in bytes, by kind. Arrays of other kinds are found, not judged."""

MAX_HEADER_BYTES = 2**28
MAX_ARRAYS = 2**21
MAX_DIMENSIONS = 64
ALIGNED_BYTES = 8
_LENGTH_BYTES = 8
_METADATA = "__metadata__"

ReadRange = Callable[[int, int], bytes]
"""Returns the bytes of a file from one offset to another."""


@dataclass(frozen=True)
class ArrayEntry:
    """An array of a file, by its kind, its shape and its offsets after the header."""

    kind: str
    shape: tuple[int, ...]
    first: int
    last: int


@dataclass(frozen=True)
class SafetensorsHeader:
    """The arrays of a file, in the order of its header."""

    arrays: Mapping[str, ArrayEntry]
    metadata: Mapping[str, str] = field(default_factory=dict)
    size_bytes: int = _LENGTH_BYTES
    """Of the header with its length: the offset of the first array."""

    @property
    def file_bytes(self) -> int:
        """The size of the whole file."""
        last = max((array.last for array in self.arrays.values()), default=0)
        return self.size_bytes + last

    def pack(self) -> bytes:
        """Return the bytes of the header: `size_bytes` of them, or as many as needed.

        They end at a multiple of 8, so that the arrays are aligned.
        """
        table: dict[str, object] = {_METADATA: dict(self.metadata)}
        for name, array in self.arrays.items():
            table[name] = {
                "dtype": array.kind,
                "shape": list(array.shape),
                "data_offsets": [array.first, array.last],
            }
        text = json.dumps(table, separators=(",", ":")).encode()
        size = max(_LENGTH_BYTES + len(text), self.size_bytes)
        text = text.ljust(size + -size % ALIGNED_BYTES - _LENGTH_BYTES)
        return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def read_header(
    read: ReadRange, *, source: str, file_bytes: int | None = None
) -> SafetensorsHeader:
    """Return the header of a file that `read` reads.

    Args:
        source: the name of the file in messages.
        file_bytes: the size of the file, which must be right; None if it is not known.

    Raises:
        CorruptError: it is no safetensors file.
    """
    limit = MAX_HEADER_BYTES
    if file_bytes is not None:
        limit = min(limit, max(file_bytes - _LENGTH_BYTES, 0))
    try:
        text = read(0, _LENGTH_BYTES)
        size = int.from_bytes(text, "little")
        if len(text) < _LENGTH_BYTES or not 0 < size <= limit:
            raise ValueError(
                f"its header would have {size} bytes, and at most {limit} are possible"
            )
        header = _parsed(read(_LENGTH_BYTES, _LENGTH_BYTES + size), size)
        if file_bytes not in (None, header.file_bytes):
            raise ValueError(
                f"it has {file_bytes} bytes, and its header says {header.file_bytes}"
            )
    except (ValueError, RecursionError) as exc:
        raise CorruptError(
            f"{source} is no safetensors file: {str(exc)[:300]}."
        ) from exc
    return header


def read_file_header(file: BinaryIO, *, source: str) -> SafetensorsHeader:
    """Return the header of an open file, whose size must be right.

    Raises:
        CorruptError: it is no safetensors file.
    """

    def read(first: int, last: int) -> bytes:
        file.seek(first)
        return file.read(last - first)

    return read_header(read, source=source, file_bytes=os.fstat(file.fileno()).st_size)


def parse_json(text: bytes) -> object:
    """Return the value of a JSON text; raise ValueError if an object has a key twice.

    A text that is nested too deeply raises RecursionError.
    """
    return json.loads(
        text, object_pairs_hook=_without_duplicates, parse_constant=_no_constant
    )


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise ValueError("a key comes twice")
    return entries


def _no_constant(constant: str) -> object:
    raise ValueError(f"{constant} is no number of JSON")


def _parsed(text: bytes, size: int) -> SafetensorsHeader:
    table = parse_json(text)
    if not isinstance(table, dict) or len(table) > MAX_ARRAYS:
        raise ValueError(f"its header is no table of at most {MAX_ARRAYS} arrays")
    metadata = table.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(
        isinstance(value, str) for value in metadata.values()
    ):
        raise ValueError("its metadata are no table of texts")
    arrays = {name: _entry(name, item) for name, item in table.items()}
    end = 0
    by_offset = sorted(arrays.items(), key=lambda item: item[1].first + item[1].last)
    for name, array in by_offset:
        if array.first != end:
            raise ValueError(f"{name[:200]!r} begins at {array.first}, not at {end}")
        end = array.last
    return SafetensorsHeader(arrays, metadata, _LENGTH_BYTES + size)


def _entry(name: str, item: object) -> ArrayEntry:
    entry = item if isinstance(item, dict) else {}
    kind, shape = entry.get("dtype"), _sizes(entry.get("shape"))
    offsets = _sizes(entry.get("data_offsets"))
    if isinstance(kind, str) and shape is not None and len(offsets or ()) == 2:
        first, last = offsets or (0, 0)
        if first <= last and last - first == _size_bytes(kind, shape, last - first):
            return ArrayEntry(kind, shape, first, last)
    raise ValueError(
        f"{name[:200]!r} is inconsistent: of {str(kind)[:20]} and shape {shape}, at "
        f"{offsets}"
    )


def _size_bytes(kind: str, shape: tuple[int, ...], default: int) -> int:
    return SIZES[kind] * math.prod(shape) if kind in SIZES else default


def _sizes(value: object) -> tuple[int, ...] | None:
    if not isinstance(value, list) or len(value) > MAX_DIMENSIONS:
        return None
    is_right = all(type(size) is int and 0 <= size < 2**48 for size in value)
    return tuple(value) if is_right else None
