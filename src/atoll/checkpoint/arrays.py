"""Arrays as a checkpoint knows them: a kind of number, a shape, and bytes.

Rule 1: a kind is one of safetensors' own, so that any reader of it can read ours.
Rule 2: bytes are little-endian, in C order, without gaps.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

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
"""Bytes of one number, by kind."""

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


class Array(Protocol):
    """Numbers that are to be written. The writer of a checkpoint is the only caller."""

    @property
    def kind(self) -> str:
        """One of `SIZES`."""
        ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def offset(self) -> tuple[int, ...] | None:
        """Where it begins in what several ranks hold together; None: it is whole."""
        ...

    @property
    def identity(self) -> Hashable:
        """Equal for two arrays that are the same memory, so that it is written once."""
        ...

    def flat(self) -> Bytes:
        """Return the bytes, in memory of this machine; perhaps without a copy."""
        ...

    def copy_to(self, into: Bytes) -> None:
        """Have the bytes in `into`, which is as long as they are."""
        ...


def size_bytes(kind: str, shape: tuple[int, ...]) -> int:
    """Return what an array takes."""
    return SIZES[kind] * math.prod(shape)


def kind_of(dtype: np.dtype[np.generic]) -> str | None:
    """Return the kind of numpy's numbers; None when a checkpoint cannot hold them."""
    return _OF_NUMPY.get(dtype.newbyteorder("<").str)


class NumpyArray:
    """An array of numpy. Implements `Array`."""

    offset = None

    def __init__(self, array: NDArray[np.generic], kind: str) -> None:
        self.kind = kind
        self.shape = array.shape
        self._array = array

    @property
    def identity(self) -> Hashable:
        array = self._array
        place = array.__array_interface__["data"][0]
        return ("numpy", place, array.shape, array.strides, array.dtype.str)

    def flat(self) -> Bytes:
        little = self._array.astype(_TO_NUMPY[self.kind], order="C", copy=False)
        return little.reshape(-1).view(np.uint8)

    def copy_to(self, into: Bytes) -> None:
        target = into.view(_TO_NUMPY[self.kind]).reshape(self.shape)
        np.copyto(target, self._array)


class HostArray:
    """Bytes that were copied for a checkpoint, or read from one. Implements `Array`."""

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
        """Return it as numpy's, in the same memory; None if numpy has no such kind."""
        if self.kind not in _TO_NUMPY:
            return None
        return self._data.view(_TO_NUMPY[self.kind]).reshape(self.shape)
