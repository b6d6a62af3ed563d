"""The bytes of a bundle: a tar file that can be written in one way only.

Rule 1: the same files are the same bytes, on every machine and in every version: names
        in order, mode 0644, and no time, owner or compression.
Rule 2: a reader accepts only the bytes that a writer produces: plain files, without
        ambiguity. Every size is checked before memory is reserved.
Rule 3: names are limited to those that every system can store.

block of 512   name, size in octal, checksum; all else is fixed
the file       padded with zeros to blocks of 512
...            and two blocks of zeros at the end

`tar -t` and `tar -x` read it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from atoll.errors import CorruptError, UsageError

MAX_BYTES = 128 * 2**20
"""Limit of an archive. Tokenizers have up to forty megabytes, definitions very few."""

MAX_FILES = 1024
MAX_CODE_FILES = 2**14
"""Limit for the code that islands are launched with, which may be a repository."""

MAX_CODE_BYTES = 64 * 2**20
"""Limit of the archive of that code."""

_BLOCK = 512
_END = bytes(2 * _BLOCK)
_NAME_BYTES, _SIZE_OFFSET, _KIND_OFFSET = 100, 124, 156
_KINDS = {
    b"1": "a hard link",
    b"2": "a symbolic link",
    b"3": "a device",
    b"4": "a device",
    b"5": "an entry for a directory",
    b"6": "a pipe",
    b"S": "a sparse file",
    b"x": "an extended header",
    b"g": "an extended header",
    b"L": "a long name",
    b"K": "a long link",
}


def pack(files: Mapping[str, bytes], *, max_files: int = MAX_FILES) -> bytes:
    """Return the archive of files by name.

    Raises:
        UsageError: a name cannot be in a bundle, or they are too many or too large.
    """
    if fault := _amount_fault(len(files), _archive_bytes(files), max_files):
        raise UsageError(fault)
    names = TakenNames()
    parts: list[bytes] = []
    for name in sorted(files):
        if fault := name_fault(name) or names.fault(name):
            raise UsageError(fault)
        parts += [_header(name, len(files[name])), files[name], _padding(files[name])]
    return b"".join([*parts, _END])


def unpack(data: bytes, *, max_files: int = MAX_FILES) -> dict[str, bytes]:
    """Return the files of an archive by name.

    Raises:
        CorruptError: `pack` does not write such an archive; the message says why.
    """
    if len(data) > MAX_BYTES:
        raise CorruptError(_amount_fault(1, len(data), max_files))
    files: dict[str, bytes] = {}
    names = TakenNames()
    for name, content in _members(data):
        if fault := names.fault(name):
            raise CorruptError(f"The archive is refused: {fault}")
        if files and name < next(reversed(files)):
            raise CorruptError(f"{name!r} is not in its order. {_REMEDY}")
        files[name] = content
        if len(files) > max_files:
            raise CorruptError(_amount_fault(len(files), len(data), max_files))
    if not files:
        raise CorruptError(f"The archive holds nothing. {_REMEDY}")
    return files


def _members(data: bytes) -> Iterator[tuple[str, bytes]]:
    offset = 0
    while data[offset : offset + _BLOCK] != bytes(_BLOCK):
        name, size = _read_header(data[offset : offset + _BLOCK])
        begin, offset = offset + _BLOCK, offset + _BLOCK + size + -size % _BLOCK
        if offset > len(data) - len(_END):
            raise CorruptError(
                f"{name!r} should have {size} bytes, and the archive ends before that, "
                f"after {len(data)} in all. It is truncated, or was altered."
            )
        if any(data[begin + size : offset]):
            raise CorruptError(f"Extra bytes follow {name!r}. {_REMEDY}")
        yield name, data[begin : begin + size]
    if data[offset:] != _END:
        raise CorruptError(f"Extra bytes follow the end. {_REMEDY}")


def _read_header(block: bytes) -> tuple[str, int]:
    """Return the name and the size in a header, if `_header` writes the same."""
    if len(block) < _BLOCK or block[257:262] != b"ustar":
        raise CorruptError(f"This is no archive of a bundle. {_REMEDY}")
    name = block[:_NAME_BYTES].rstrip(b"\0").decode("ascii", "backslashreplace")
    kind = block[_KIND_OFFSET : _KIND_OFFSET + 1]
    if kind != b"0":
        type_name = _KINDS.get(kind, "of an unknown kind")
        raise CorruptError(
            f"{name!r} is {type_name}, and a bundle has plain files only. {_REMEDY}"
        )
    if fault := name_fault(name):
        raise CorruptError(f"The archive is refused: {fault}")
    size = _size(block[_SIZE_OFFSET : _SIZE_OFFSET + 12])
    if size is None or size > MAX_BYTES:
        raise CorruptError(
            f"{name!r} should have {size if size is not None else 'no'} bytes, and a "
            f"complete bundle has at most {MAX_BYTES}. {_REMEDY}"
        )
    if block != _header(name, size):
        raise CorruptError(
            f"The header of {name!r} differs from the one that Atoll writes. {_REMEDY}"
        )
    return name, size


_REMEDY = "Create it by `atoll serve` or `atoll init` with --bundle DIR."


def _size(field: bytes) -> int | None:
    digits = field.rstrip(b"\0 ")
    is_octal = digits and all(digit in b"01234567" for digit in digits)
    return int(digits, 8) if is_octal else None


def _header(name: str, size: int) -> bytes:
    parts = [
        name.encode("ascii").ljust(_NAME_BYTES, b"\0"),
        b"0000644\0" + 2 * b"0000000\0",  # mode; user and group 0
        b"%011o\0" % size,
        b"00000000000\0",  # no time
        b" " * 8,  # the checksum counts its own bytes as blanks
        b"0".ljust(101, b"\0"),  # a plain file without a link
        b"ustar\x0000".ljust(72, b"\0"),
        2 * b"0000000\0",
        bytes(167),
    ]
    block = b"".join(parts)
    return block[:148] + b"%06o\0 " % sum(block) + block[156:]


def _padding(content: bytes) -> bytes:
    return bytes(-len(content) % _BLOCK)


def _archive_bytes(files: Mapping[str, bytes]) -> int:
    sizes = map(len, files.values())
    return sum(_BLOCK + size + -size % _BLOCK for size in sizes) + len(_END)


def _amount_fault(count: int, size_bytes: int, max_files: int) -> str:
    """Return why this number or size is above the limits; empty if it is not."""
    if not count:
        return "There is nothing to put into a bundle. Give a directory with files."
    if count > max_files:
        return (
            f"{count} files are too many for a bundle, which has at most {max_files}. "
            "Leave out what does not define the model."
        )
    if size_bytes > MAX_BYTES:
        return (
            f"{size_bytes} bytes are too many for a bundle, which has at most "
            f"{MAX_BYTES}. Leave out what does not define the model."
        )
    return ""


MAX_NAME_BYTES = 100
"""The longest name of a plain tar header."""

MAX_DEPTH = 8

_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]*")

WEIGHTS = (
    ".bin",
    ".ckpt",
    ".gguf",
    ".h5",
    ".msgpack",
    ".npy",
    ".npz",
    ".onnx",
    ".pickle",
    ".pkl",
    ".pt",
    ".pth",
    ".safetensors",
    ".tflite",
    ".bin.index.json",
    ".safetensors.index.json",
)
"""Suffixes of files with weights, and of indexes of such files."""


def name_fault(name: str) -> str:
    """Return why a file cannot be in a bundle by its name; empty if it can."""
    shown = repr(name[: 2 * MAX_NAME_BYTES])
    if name.startswith("/") or re.match("[A-Za-z]:", name):
        return f"{shown} is an absolute path. Names in a bundle are relative."
    parts = name.split("/")
    if ".." in parts:
        return f"{shown} leads out of the bundle. Name a file in it."
    if len(name) > MAX_NAME_BYTES or len(parts) > MAX_DEPTH:
        return (
            f"{shown} has {len(name)} characters in {len(parts)} parts; a name in a "
            f"bundle has at most {MAX_NAME_BYTES} in {MAX_DEPTH}. Shorten it."
        )
    if not all(_PART.fullmatch(part) and part[-1] != "." for part in parts):
        return (
            f"{shown} cannot be a name in a bundle: its parts have letters, digits and "
            "_ . + - of ASCII, and begin with one of the first three. Rename it."
        )
    if name.lower().endswith(WEIGHTS):
        return (
            f"{shown} holds weights, and a bundle has none: the run has them. Move it "
            "out of the directory; --init FILE founds a run with weights."
        )
    return ""


class TakenNames:
    """The names in a bundle so far, for file systems that ignore case."""

    def __init__(self) -> None:
        self._files: set[str] = set()
        self._spelt: dict[str, str] = {}

    def fault(self, name: str) -> str:
        """Add a name; return its conflict with an earlier one, or an empty string."""
        if name in self._files:
            return f"{name!r} occurs twice."
        parts = name.split("/")
        for depth in range(1, len(parts) + 1):
            path = "/".join(parts[:depth])
            before = self._spelt.setdefault(path.lower(), path)
            if before != path:
                return f"{path!r} and {before!r} differ in case only. Rename one."
            if (
                path in self._files
            ):  # names are sorted: a file comes before names under it
                return f"{path!r} is a file and a directory. Rename one."
        self._files.add(name)
        return ""
