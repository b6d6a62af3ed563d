"""Sets of turns: sorted, disjoint intervals that do not touch.

A turn is the place of a row in the run's order. A set is stored as its edges: the first
turn of an interval, the turn after its last, and so on, 16 bytes per interval. Sets are
never changed. An operation on a large set and a small one looks up the edges of the
small one and copies the others as blocks of memory.

Packed, each interval is two LEB128 varints in their shortest form: the gap since the
end of the interval before, and the length. Only the first gap may be zero, and no
length is.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from functools import cached_property

from atoll.errors import CorruptError

MAX_TURN = 2**62
"""No turn is this large or larger."""

_EDGE = "q"
_MAX_VARINT_BYTES = 9  # of 7 bits each: enough for any turn


class Spans:
    """A set of turns. Equal sets are equal, and have the same packed bytes."""

    __slots__ = ("__dict__", "_edges")

    def __init__(self, spans: Iterable[tuple[int, int]] = ()) -> None:
        """Make a set of intervals `[first, last)`, which may overlap, in any order."""
        edges = array(_EDGE)
        for first, last in sorted(spans):
            if not 0 <= first < last <= MAX_TURN:
                raise ValueError(f"[{first}, {last}) is not an interval of turns.")
            if edges and first <= edges[-1]:
                edges[-1] = max(edges[-1], last)
            else:
                edges.extend((first, last))
        self._edges = edges

    @classmethod
    def _of(cls, edges: array[int]) -> Spans:
        spans = cls()
        spans._edges = edges
        return spans

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Yield the intervals `[first, last)`."""
        return zip(self._edges[::2], self._edges[1::2], strict=True)

    def __len__(self) -> int:
        """Return the number of turns."""
        return self._size

    @cached_property
    def _size(self) -> int:
        return sum(self._edges[1::2]) - sum(self._edges[::2])

    def __bool__(self) -> bool:
        return bool(self._edges)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Spans) and self._edges == other._edges

    def __hash__(self) -> int:
        return hash(self._edges.tobytes())

    def __repr__(self) -> str:
        return f"Spans({list(self)})"

    def __contains__(self, turn: int) -> bool:
        return bisect_right(self._edges, turn) % 2 == 1

    @property
    def num_spans(self) -> int:
        """The number of intervals."""
        return len(self._edges) // 2

    @property
    def first(self) -> int:
        """The lowest turn of a set that is not empty."""
        return self._edges[0]

    @property
    def last(self) -> int:
        """The turn after the highest one; 0 if the set is empty."""
        return self._edges[-1] if self._edges else 0

    def __or__(self, other: Spans) -> Spans:
        """Return the turns of either set."""
        large, small = _by_size(self, other)
        return _spliced(large, small, is_union=True) if small else large

    def __sub__(self, other: Spans) -> Spans:
        """Return the turns of this set that are not in the other."""
        if not self or not other:
            return self
        if len(self._edges) < len(other._edges):
            return _selected(other, self, is_inside=False)
        return _spliced(self, other, is_union=False)

    def __and__(self, other: Spans) -> Spans:
        """Return the turns of both sets."""
        large, small = _by_size(self, other)
        return _selected(large, small, is_inside=True) if small else small

    def __le__(self, other: Spans) -> bool:
        """Return whether every turn is in the other set."""
        edges = other._edges
        for first, last in self:
            index = bisect_right(edges, first)
            if index % 2 == 0 or edges[index] < last:
                return False
        return True

    def head(self, count: int) -> Spans:
        """Return the lowest `count` turns."""
        edges = array(_EDGE)
        for first, last in self:
            if count <= 0:
                break
            edges.extend((first, min(last, first + count)))
            count -= last - first
        return Spans._of(edges)

    def pack(self) -> bytes:
        """Return the packed bytes."""
        packed, end = bytearray(), 0
        for first, last in self:
            _append(packed, first - end)
            _append(packed, last - first)
            end = last
        return bytes(packed)

    @classmethod
    def unpack(cls, packed: bytes) -> Spans:
        """Return the set of packed bytes.

        Raises:
            CorruptError: they are not the packed bytes of a set.
        """
        edges, end, offset = array(_EDGE), 0, 0
        while offset < len(packed):
            gap, offset = _varint(packed, offset)
            length, offset = _varint(packed, offset)
            if not length or (edges and not gap):
                fault = "is empty" if not length else "touches the one before it"
                raise CorruptError(
                    f"Interval {len(edges) // 2} of packed turns {fault}. "
                    "Its sender must merge intervals."
                )
            first, end = end + gap, end + gap + length
            if end > MAX_TURN:
                raise CorruptError(
                    f"Packed turns reach {end}, and {MAX_TURN} is the limit. "
                    "Their sender is broken, or the bytes were changed."
                )
            edges.extend((first, end))
        return cls._of(edges)


EMPTY = Spans()


def is_packed(data: bytes) -> bool:
    """Return whether bytes are the packed bytes of a set."""
    try:
        Spans.unpack(data)
    except CorruptError:
        return False
    return True


def union(sets: Iterable[Spans]) -> Spans:
    """Return the turns of any of the sets."""
    result = EMPTY
    for spans in sets:
        result = result | spans
    return result


def intersection(sets: Iterable[Spans]) -> Spans:
    """Return the turns of all sets; none if there is no set."""
    remaining = iter(sets)
    result = next(remaining, EMPTY)
    for spans in remaining:
        result = result & spans
    return result


def _by_size(left: Spans, right: Spans) -> tuple[Spans, Spans]:
    return (left, right) if len(left._edges) >= len(right._edges) else (right, left)


def _spliced(large: Spans, small: Spans, *, is_union: bool) -> Spans:
    """Return the large set with the intervals of the small one put in, or cut out."""
    edges, result, index = large._edges, array(_EDGE), 0
    outside = 0 if is_union else 1  # the parity at which an edge is needed
    for first, last in small:
        start = bisect_left(edges, first, index)
        stop = bisect_right(edges, last, start)
        result.extend(edges[index:start])
        if start % 2 == outside:
            result.append(first)
        if stop % 2 == outside:
            result.append(last)
        index = stop
    result.extend(edges[index:])
    return Spans._of(result)


def _selected(large: Spans, small: Spans, *, is_inside: bool) -> Spans:
    """Return the turns of the small set that are in the large one, or are not."""
    edges, result = large._edges, array(_EDGE)
    inside = 1 if is_inside else 0
    for first, last in small:
        start = bisect_right(edges, first)
        stop = bisect_left(edges, last, start)
        if start % 2 == inside:
            result.append(first)
        result.extend(edges[start:stop])
        if stop % 2 == inside:
            result.append(last)
    return Spans._of(result)


def _append(packed: bytearray, value: int) -> None:
    while value > 0x7F:
        packed.append(value & 0x7F | 0x80)
        value >>= 7
    packed.append(value)


def _varint(packed: bytes, offset: int) -> tuple[int, int]:
    """Return a number and the place after it."""
    value = 0
    for index in range(_MAX_VARINT_BYTES):
        if offset + index >= len(packed):
            raise CorruptError(
                f"Packed turns end after {len(packed)} bytes, within an interval. "
                "Some bytes are missing."
            )
        byte = packed[offset + index]
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            if byte == 0 and index:
                raise CorruptError(
                    f"The number at byte {offset} of packed turns is not in its "
                    "shortest form. Its sender must write each number in one way."
                )
            return value, offset + index + 1
    raise CorruptError(
        f"The number at byte {offset} of packed turns has more than "
        f"{_MAX_VARINT_BYTES} bytes. Its sender is broken, or the bytes were changed."
    )
