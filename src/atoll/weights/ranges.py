"""Ranges of a fragment's elements: the part of it that one rank holds.

A rank stores its part end to end, in the order of the fragment: element i of such a
*compact* vector is the i-th element that belongs to the part.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

I64 = NDArray[np.int64]
Positions = slice | I64
Stretches = tuple[I64, I64]
"""Where stretches of neighbouring elements start and stop."""


@dataclass(frozen=True)
class Overlap:
    """The elements of a part that lie between two elements of the fragment."""

    compact: slice
    """Where they are in the part's compact vector."""

    positions: Positions
    """Where they are, counted from the first of the two elements."""

    @property
    def size(self) -> int:
        return int(self.compact.stop - self.compact.start)


@dataclass(frozen=True, eq=False)
class Ranges:
    """A part of a fragment: stretches in order, none empty, no two of them touching."""

    starts: I64
    stops: I64

    @classmethod
    def of(cls, runs: Iterable[Stretches]) -> Ranges:
        """Return the part that is made of stretches in any order; none may overlap."""
        several = list(runs)
        starts = np.concatenate([np.empty(0, np.int64), *(run[0] for run in several)])
        stops = np.concatenate([np.empty(0, np.int64), *(run[1] for run in several)])
        filled = stops > starts
        starts, stops = starts[filled], stops[filled]
        order = np.argsort(starts)
        starts, stops = starts[order], stops[order]
        is_gap = starts[1:] != stops[:-1]
        first, last = np.append(True, is_gap), np.append(is_gap, True)
        if not len(starts):
            first = last = np.empty(0, bool)
        return cls(starts[first], stops[last])

    @cached_property
    def offsets(self) -> I64:
        """Where each stretch starts in the compact vector; the last is its end."""
        lengths = self.stops - self.starts
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])

    @property
    def elements(self) -> int:
        """How many elements belong to the part."""
        return int(self.offsets[-1])

    def cut(self, first: int, last: int) -> Overlap:
        """Return what of the part lies in elements `first` to `last`."""
        begin = int(np.searchsorted(self.stops, first, "right"))
        end = int(np.searchsorted(self.starts, last, "left"))
        if begin >= end:
            offset = int(self.offsets[min(begin, len(self.starts))])
            return Overlap(slice(offset, offset), slice(0, 0))
        starts = np.maximum(self.starts[begin:end], first)
        stops = np.minimum(self.stops[begin:end], last)
        start = int(self.offsets[begin] + starts[0] - self.starts[begin])
        size = int((stops - starts).sum())
        return Overlap(
            slice(start, start + size), _positions(starts - first, stops - first)
        )

    def within(self, first: int, last: int) -> Ranges:
        """Return the part's part between two elements."""
        starts = np.maximum(self.starts, first)
        stops = np.minimum(self.stops, last)
        is_filled = stops > starts
        return Ranges(starts[is_filled], stops[is_filled])

    def inside(self, outer: Ranges) -> Ranges:
        """Return where these elements, all of which `outer` has, are in its vector."""
        holder = np.searchsorted(outer.starts, self.starts, "right") - 1
        moved = outer.offsets[holder] - outer.starts[holder]
        return Ranges.of([(self.starts + moved, self.stops + moved)])

    def stretches(self, first: int, last: int) -> Iterator[tuple[slice, slice]]:
        """Yield each stretch of the part's elements number `first` to `last`.

        The first slice counts elements of the part from `first` on, the second says
        where they are.
        """
        index = int(np.searchsorted(self.offsets, first, "right")) - 1
        while first < last:
            start = int(self.starts[index] + first - self.offsets[index])
            size = min(int(self.stops[index]) - start, last - first)
            yield slice(first, first + size), slice(start, start + size)
            first, index = first + size, index + 1


def box_runs(
    shape: Sequence[int], start: Sequence[int], size: Sequence[int], *, first: int = 0
) -> Stretches:
    """Return the stretches of a box of a tensor that begins at element `first`.

    The box has `size[d]` rows from `start[d]` on in every dimension d.
    """
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    cut = max((d for d in range(len(shape)) if size[d] != shape[d]), default=0)
    if 0 in size:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    starts = np.full(1, first, np.int64)
    for axis in range(min(cut, len(shape))):
        rows = (start[axis] + np.arange(size[axis], dtype=np.int64)) * strides[axis]
        starts = (starts[:, None] + rows).reshape(-1)
    if shape:
        starts = starts + start[cut] * strides[cut]
    length = size[cut] * strides[cut] if shape else 1
    return starts, starts + length


def _positions(starts: I64, stops: I64) -> Positions:
    """Return every element of some stretches: a slice of the one, if it is one."""
    if len(starts) == 1:
        return slice(int(starts[0]), int(stops[0]))
    lengths = stops - starts
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(lengths.sum())
