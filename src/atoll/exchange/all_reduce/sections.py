"""What is reduced: values of up to four kinds, one after another, and their sum.

Rule 1: a kind's values lie together, the widest first, so that a piece of the body
        never cuts a value.
Rule 2: values are summed as a tree in the order of ranks, as the updates of a round
        are; 16-bit values are summed in fp32 and rounded once, to nearest even.
Rule 3: a NaN is the same NaN on every machine. All else is IEEE's, and equal by that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.algorithm.merge import first_half
from atoll.errors import UsageError

Bytes = NDArray[np.uint8]
Wide = NDArray[Any]

KINDS: Mapping[str, np.dtype[Any]] = {
    "float64": np.dtype("<f8"),
    "float32": np.dtype("<f4"),
    "bfloat16": np.dtype("<u2"),
    "float16": np.dtype("<f2"),
}
"""Each kind and how numpy reads it, which has no bfloat16: its bits."""

WORD = 4
"""Bytes of an element of a frame; a body is filled up to whole ones."""

BLOCK_BYTES = 2**20
"""What is summed at a time: a few of these fit a core's cache."""

MAX_BODY_BYTES = 2**32 - 2**24
"""What one object takes, less a header."""


class Sections:
    """How many values of each kind a body has, and where they lie in it."""

    def __init__(self, counts: Mapping[str, int]) -> None:
        self.counts = {kind: counts.get(kind, 0) for kind in KINDS}
        self.value_bytes = sum(
            count * KINDS[kind].itemsize for kind, count in self.counts.items()
        )
        self.body_bytes = -(-self.value_bytes // WORD) * WORD
        if not 0 < self.value_bytes <= MAX_BODY_BYTES:
            raise UsageError(
                f"{self.value_bytes} bytes cannot be reduced at once: from 1 to "
                f"{MAX_BODY_BYTES} can. Reduce parts of it, each under its own name."
            )

    @property
    def words(self) -> int:
        """The elements of a frame with such a body."""
        return self.body_bytes // WORD

    def within(self, first: int, last: int) -> Iterator[tuple[str, slice]]:
        """Yield each kind that has bytes from `first` to `last`, and where in those."""
        at = 0
        for kind, count in self.counts.items():
            end = at + count * KINDS[kind].itemsize
            start, stop = max(at, first), min(end, last)
            if start < stop:
                yield kind, slice(start - first, stop - first)
            at = end

    def reduced(
        self, bodies: Sequence[Bytes], *, first: int, divisor: int | None
    ) -> Bytes:
        """Return the sum of the ranks' bytes from `first` on, or their mean.

        `bodies` has one range of each rank's body, in the order of ranks.
        """
        size = len(bodies[0])
        out = np.zeros(size, np.uint8)
        for kind, place in self.within(first, first + size):
            for start in range(place.start, place.stop, BLOCK_BYTES):
                here = slice(start, min(start + BLOCK_BYTES, place.stop))
                out[here] = _block([body[here] for body in bodies], kind, divisor)
        return out


def _block(blocks: Sequence[Bytes], kind: str, divisor: int | None) -> Bytes:
    with np.errstate(all="ignore"):  # what overflows is infinite, as it would be alone
        total = _sum(blocks, kind)
        if divisor is not None and divisor > 1:
            total /= total.dtype.type(divisor)
        total[np.isnan(total)] = np.nan
        return _narrow(total, kind).view(np.uint8)


def _sum(blocks: Sequence[Bytes], kind: str) -> Wide:
    if len(blocks) == 1:
        return _wide(blocks[0], kind)
    half = first_half(len(blocks))
    total = _sum(blocks[:half], kind)
    total += _sum(blocks[half:], kind)
    return total


def _wide(block: Bytes, kind: str) -> Wide:
    """Return a copy of values in the kind in which they are summed."""
    values = np.frombuffer(block.tobytes(), KINDS[kind])
    if kind == "bfloat16":
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values.astype(np.float64 if kind == "float64" else np.float32)


def _narrow(total: Wide, kind: str) -> Wide:
    if kind != "bfloat16":
        return total.astype(KINDS[kind])
    bits = total.view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    # An infinity stays one; a NaN is quiet, so that the addition does not wrap.
    return ((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(np.uint16)
