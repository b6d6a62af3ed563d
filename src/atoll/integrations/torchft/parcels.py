"""Bytes of any length as vectors of one length, exact through fp32 and back.

A parcel carries three bytes per element, as a whole number below 2**24: fp32 holds it
exactly, no rule about small numbers touches it, and the mean of one is itself. The
first element is ballast: it outweighs the rest, so that all parcels have the same norm
and no judge of norms refuses one for what its bytes happen to be.

The first bytes of the first parcel are the length and the BLAKE3 digest of all.
"""

from __future__ import annotations

import struct

import numpy as np

from atoll.errors import CorruptError, UsageError
from atoll.weights.layout import F32
from atoll.wire import blake3_digest

BALLAST = np.float32(2.0**48)
"""Far above 2**24 times the root of any length, and below the largest norm that counts.
"""
_HEAD = struct.Struct("<Q32s")
_PER_ELEMENT = 3
_LIMIT = 2**24


def parcel_bytes(elements: int) -> int:
    """Return how many bytes a parcel of so many elements carries."""
    return (elements - 1) * _PER_ELEMENT


def cut(data: bytes, *, elements: int, max_bytes: int) -> list[F32]:
    """Return the parcels of `data`, in order.

    Raises:
        UsageError: it is larger than an island takes.
    """
    if len(data) > max_bytes:
        raise UsageError(
            f"The registered state has {len(data)} bytes, and limits.max_body_bytes="
            f"{max_bytes}. Register less, or raise the limit of the run."
        )
    whole = _HEAD.pack(len(data), blake3_digest(data)) + data
    size = parcel_bytes(elements)
    return [
        _vector(whole[first : first + size], elements)
        for first in range(0, len(whole), size)
    ]


class Gathering:
    """Puts parcels together again, as they come, and never more than was promised."""

    def __init__(self, *, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._data = bytearray()

    def add(self, parcel: F32) -> None:
        """Take in the next parcel.

        Raises:
            CorruptError: it is none, or there are more than the first one promised.
        """
        values = parcel[1:]
        is_whole = (values >= 0) & (values < _LIMIT) & (values == np.trunc(values))
        if parcel[0] != BALLAST or not is_whole.all():
            raise CorruptError(
                "An island's state came in a parcel that holds no bytes. "
                "Ask for the state again."
            )
        if self._data and len(self._data) >= self._promised():
            raise CorruptError(
                f"An island's state goes on after its {self._promised()} bytes. "
                "Ask for the state again."
            )
        self._data += _bytes_of(values)
        if self._promised() > self._max_bytes + _HEAD.size:
            raise CorruptError(
                f"An island's state promises {self._promised()} bytes, and "
                f"limits.max_body_bytes={self._max_bytes}. Register less on every "
                "island, or raise the limit of the run."
            )

    def data(self) -> bytes:
        """Return all bytes, verified.

        Raises:
            CorruptError: they are not those that were cut.
        """
        size, digest = _HEAD.unpack_from(self._data) if self._data else (1, b"")
        data = bytes(self._data[_HEAD.size : _HEAD.size + size])
        if len(data) != size or blake3_digest(data) != digest:
            raise CorruptError(
                f"An island's state of {size} bytes came with {len(data)} that do not "
                "have its digest. Ask for the state again."
            )
        return data

    def _promised(self) -> int:
        return int(_HEAD.unpack_from(self._data)[0]) + _HEAD.size


def _vector(data: bytes, elements: int) -> F32:
    padded = np.zeros((elements - 1, _PER_ELEMENT), np.uint8)
    padded.reshape(-1)[: len(data)] = np.frombuffer(data, np.uint8)
    parts = padded.astype(np.uint32)
    vector = np.empty(elements, np.float32)
    vector[0] = BALLAST
    vector[1:] = parts[:, 0] | parts[:, 1] << 8 | parts[:, 2] << 16
    return vector


def _bytes_of(values: F32) -> bytes:
    whole = values.astype("<u4").view(np.uint8).reshape(-1, 4)
    return whole[:, :_PER_ELEMENT].tobytes()
