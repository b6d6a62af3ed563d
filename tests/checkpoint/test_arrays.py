"""Array files: safetensors that other software reads, safe against damaged headers."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from atoll.checkpoint.arrays import (
    ArrayFile,
    CheckpointArray,
    NumpyArray,
    array_file_parts,
)
from atoll.errors import CorruptError


def _write(path: Path, arrays: dict[str, CheckpointArray]) -> None:
    path.write_bytes(b"".join(bytes(part) for part in array_file_parts(arrays)))


def test_others_read_what_we_write(tmp_path: Path) -> None:
    """The safetensors library finds our arrays by the names that we gave them."""
    path = tmp_path / "x.safetensors"
    ones, none = np.ones((2, 3), np.float32), np.empty((0, 4), np.int64)
    _write(path, {"a.b": NumpyArray(ones, "F32"), "é": NumpyArray(none, "I64")})

    found = load_file(path)

    assert np.array_equal(found["a.b"], ones)
    assert found["é"].shape == (0, 4)
    read = ArrayFile(path).read("a.b").numpy()
    assert read is not None
    assert np.array_equal(read, ones)
    with pytest.raises(CorruptError, match="has no array 'c'"):
        ArrayFile(path).read("c")


_RIGHT = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "entry",
    [
        {**_RIGHT, "dtype": "F33"},
        {**_RIGHT, "dtype": None},
        {**_RIGHT, "shape": [-2]},
        {**_RIGHT, "shape": [2.0]},
        {**_RIGHT, "shape": [True, 2]},
        {**_RIGHT, "shape": [2**62, 2**62]},
        {**_RIGHT, "shape": [1] * 40},
        {**_RIGHT, "shape": 2},
        {**_RIGHT, "data_offsets": [0, 9]},
        {**_RIGHT, "data_offsets": [4, 12]},
        {**_RIGHT, "data_offsets": [8, 0]},
        {**_RIGHT, "data_offsets": [0, 2**70]},
        {**_RIGHT, "data_offsets": ["0", "8"]},
        {**_RIGHT, "data_offsets": None},
        [],
        None,
    ],
    ids=repr,
)
def test_a_header_that_says_what_cannot_be_is_refused(
    tmp_path: Path, entry: object
) -> None:
    """Kinds, shapes and places must agree with one another and with the file."""
    path = tmp_path / "x.safetensors"
    text = json.dumps({"a": entry}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))

    with pytest.raises(CorruptError):
        ArrayFile(path)


def test_arrays_may_not_share_bytes_or_leave_some_over(tmp_path: Path) -> None:
    """Overlapping arrays, a gap, and bytes of no array are refused."""
    path = tmp_path / "x.safetensors"
    for second in ([0, 8], [12, 20]):
        entries = {"a": _RIGHT, "b": {**_RIGHT, "data_offsets": second}}
        text = json.dumps(entries).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(20))
        with pytest.raises(CorruptError):
            ArrayFile(path)
    text = json.dumps({"a": _RIGHT}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(9))
    with pytest.raises(CorruptError, match="has 78 bytes, and its header says 77"):
        ArrayFile(path)


@pytest.mark.parametrize("size", [0, 7, 8])
def test_a_file_without_a_header_is_refused(tmp_path: Path, size: int) -> None:
    """A file that ends before its header does, and one that announces the moon."""
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"\xff" * size)

    with pytest.raises(CorruptError):
        ArrayFile(path)
