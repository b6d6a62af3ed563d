"""From a round's roster and counted updates to its agreed frame, for all exchanges.

`reduce` computes the body piece by piece, and `agree` makes the frame; `gather` makes
the one that holds the updates themselves, and `mean_reader` reads both. Memory does not
grow with the number of islands, except for one block per level of the sum's tree and
per thread, or one block per island for merges that must see every island's value of a
coordinate (`trimmed`) or of a tensor (`radial`).
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from atoll import kernels
from atoll.algorithm import merge as text
from atoll.algorithm.pace import buffer_share
from atoll.errors import CorruptError, NonFinite
from atoll.protocol import refuse_all
from atoll.weights.layout import (
    BLOCK,
    F32,
    BodyPool,
    FragmentLayout,
    ScratchPool,
    Terms,
    flat_layout,
)
from atoll.wire import (
    PIECE_ELEMENTS,
    Codec,
    FrameKind,
    Header,
    OuterValues,
    Roster,
    blake3_digest,
    codec,
    fits_gathered,
    piece_count,
    piece_range,
    with_body,
)

SUM_BLOCK = 2 * BLOCK
"""Elements added up per step: threads that meet less often wait less for each other."""

OnPiece = Callable[[int, np.ndarray], None]
Merge = Callable[[int, F32], None]
"""Writes the mean of the elements from a first one on."""


class CountedBody(Protocol):
    """A counted update. Merges decode it, any thread any part of it."""

    @property
    def weight(self) -> int: ...

    def decode(self, out: F32, *, first: int) -> None:
        """Fill `out` with the elements from `first` on: at most `SUM_BLOCK` of a block.

        Raises:
            CorruptError: the body does not decode, or does not verify.
        """
        ...


@dataclass(frozen=True)
class Contribution:
    """One counted update. Callers give them in the byte order of island names."""

    codec: Codec
    body: np.ndarray
    weight: int

    def decode(self, out: F32, *, first: int) -> None:
        self.codec.decode(self.body, out, first=first)


def reduce(
    layout: FragmentLayout,
    contributions: Sequence[Contribution],
    *,
    down: Codec,
    merge: str = "mean",
    after_block: Callable[[], None] | None = None,
    on_piece: OnPiece | None = None,
    spare: BodyPool | None = None,
    threads: int = 1,
) -> np.ndarray:
    """Return the agreed body: the mean of the decoded updates, encoded once.

    `after_block` is called when a block of every update has been read, `on_piece` with
    the number and the bytes of each piece of the body, while they are in a core's
    cache; both by any of the threads, `after_block` by one at a time. The body is in
    memory of `spare`, if there is any, and the same for any number of `threads`.

    Raises:
        NonFinite: the mean overflows what `down` can hold.
        CorruptError: a body does not decode.
    """
    agreed = (spare or BodyPool()).body(down.body_bytes(layout.elements))
    mean_of = _merge(layout, contributions, merge)
    scratch = ScratchPool(min(SUM_BLOCK, layout.elements))
    one_at_a_time = threading.Lock()

    def write(first: int, mean: F32) -> None:
        mean_of(first, mean)
        start = down.offset(first)
        piece = agreed[start : start + down.body_bytes(len(mean))]
        down.encode(mean, piece, first=first)
        if after_block:
            with one_at_a_time:
                after_block()

    def work(first: int, last: int) -> None:
        for start in range(first, last, SUM_BLOCK):
            with scratch.vector(min(SUM_BLOCK, last - start)) as mean:
                write(start, mean)
        if on_piece:
            index = first // PIECE_ELEMENTS
            start, end = piece_range(down, layout.elements, index)
            on_piece(index, agreed[start:end])

    kernels.over_blocks(layout.elements, work, block=PIECE_ELEMENTS, threads=threads)
    return agreed


def _merge(layout: FragmentLayout, updates: Sequence[CountedBody], merge: str) -> Merge:
    if merge == "radial" and len(updates) > 1:
        return _Radial(updates, layout).write
    if merge == "trimmed":
        return lambda first, out: np.copyto(
            out, text.trimmed(_decode_all(updates, first, len(out)))
        )
    return _Mean(updates, min(SUM_BLOCK, layout.elements)).write


class _Mean:
    """Adds up the updates as the text does, a block at a time.

    A block of scratch for each level of the tree: their number grows with the logarithm
    of the number of islands.
    """

    def __init__(self, updates: Sequence[CountedBody], elements: int) -> None:
        weights = [update.weight for update in updates]
        is_even = len(set(weights)) == 1
        shares = [None] * len(weights) if is_even else text.shares(weights)
        self._terms = list(zip(updates, shares, strict=True))
        self._divisor = len(weights) if is_even and len(weights) > 1 else None
        self._scratch = ScratchPool(elements)

    def write(self, first: int, out: F32) -> None:
        """Write the mean of the elements from `first` on."""
        self._sum(self._terms, first, out, divisor=self._divisor)

    def _sum(
        self,
        terms: Sequence[tuple[CountedBody, float | None]],
        first: int,
        out: F32,
        *,
        divisor: int | None = None,
    ) -> None:
        """Write the sum of share times value, divided at the root if shares are even.

        Decoded values are flushed: to add the first one to zero would change nothing.
        """
        if len(terms) == 1:
            ((update, share),) = terms
            update.decode(out, first=first)
            if share is not None:
                kernels.active().scale(out, share)
            return
        half = text.first_half(len(terms))
        self._sum(terms[:half], first, out)
        with self._scratch.vector(len(out)) as second_sum:
            self._sum(terms[half:], first, second_sum)
            if divisor is None:
                kernels.active().accumulate(out, second_sum)
            else:
                kernels.active().accumulate_divided(
                    out, second_sum, np.float32(divisor)
                )


class _Radial:
    """Merges as the text does, tensor by tensor, with a block of every update.

    Two passes over the updates give the lengths of each tensor, and then of its mean
    direction; after that every element depends on its own values alone.
    """

    def __init__(self, updates: Sequence[CountedBody], layout: FragmentLayout) -> None:
        self._updates, self._offsets = updates, layout.offsets
        self._weights = [update.weight for update in updates]
        tensors, islands = len(layout.offsets) - 1, range(len(updates))
        norms = [[_TensorNorm() for _ in islands] for _ in range(tensors)]
        for tensor, offset, values in self._parts_of_all(layout.elements):
            for norm, value in zip(norms[tensor], values, strict=True):
                norm.add(value, offset)
        self._lengths = [[norm.value() for norm in row] for row in norms]
        units = [_TensorNorm() for _ in range(tensors)]
        for tensor, offset, values in self._parts_of_all(layout.elements):
            units[tensor].add(self._direction(tensor, values), offset)
        self._radii = [
            text.mean_radius(lengths, self._weights, unit_length=unit.value())
            for lengths, unit in zip(self._lengths, units, strict=True)
        ]

    def write(self, first: int, out: F32) -> None:
        """Write the mean of the elements from `first` on."""
        done = 0
        for tensor, _, values in self._parts(first, len(out)):
            radius = self._radii[tensor]
            part = out[done : done + len(values[0])]
            if radius is None:
                part[:] = text.weighted_sum(values, self._weights)
            else:
                part[:] = text.stretched(self._direction(tensor, values), radius)
            done += len(part)

    def _direction(self, tensor: int, values: Sequence[F32]) -> F32:
        return text.mean_direction(values, self._lengths[tensor], self._weights)

    def _parts_of_all(self, elements: int) -> Iterator[tuple[int, int, list[F32]]]:
        for first in range(0, elements, SUM_BLOCK):
            yield from self._parts(first, min(SUM_BLOCK, elements - first))

    def _parts(self, first: int, elements: int) -> Iterator[tuple[int, int, list[F32]]]:
        """Yield each tensor's part of some elements: number, offset in it, values."""
        values = _decode_all(self._updates, first, elements)
        start, last = first, first + elements
        while start < last:
            tensor = bisect_right(self._offsets, start) - 1
            stop = min(self._offsets[tensor + 1], last)
            part = slice(start - first, stop - first)
            offset = start - self._offsets[tensor]
            yield tensor, offset, [value[part] for value in values]
            start = stop


class _TensorNorm:
    """The norm of a tensor that comes in parts, with the bits of `text.norm`."""

    def __init__(self) -> None:
        self._lanes = np.zeros(text.LANES)

    def add(self, part: F32, offset: int) -> None:
        """Take in the elements from `offset` on, which follow those before."""
        # The lane of an element is its number modulo LANES.
        lanes = np.roll(self._lanes, -(offset % text.LANES))
        kernels.active().sum_squares(part, lanes)
        self._lanes = np.roll(lanes, offset % text.LANES)

    def value(self) -> float:
        return text.norm_of(self._lanes)


def _decode_all(updates: Sequence[CountedBody], first: int, elements: int) -> list[F32]:
    values = []
    for update in updates:
        out = np.empty(elements, np.float32)
        update.decode(out, first=first)
        values.append(out)
    return values


U8 = NDArray[np.uint8]

Framed = tuple[Header, U8]


def agree(
    layout: FragmentLayout,
    terms: Terms,
    roster: Roster,
    updates: Mapping[str, Framed],
    *,
    run: str,
    fragment: int,
    round: int,
    base: bytes,
    outer: OuterValues,
    buffer: int = 0,
    epoch: int = 0,
    after_block: Callable[[], None] | None = None,
    spare: BodyPool | None = None,
    threads: int = 1,
) -> Framed:
    """Return the agreed frame: the mean of the counted `updates`, and the roster.

    The weights are those of the roster. `buffer` is how many updates make one step of
    the velocity in an asynchronous run, and 0 in a synchronous one. Finite updates
    whose mean is not refuse the whole round: no single island is to blame, and the
    round is void. The bytes do not depend on the number of `threads`.
    """
    counted = [(entry.weight, *updates[entry.island]) for entry in roster.counted]
    body = np.empty(0, np.uint8)
    digests = [b""] * piece_count(layout.elements)

    def digest(index: int, piece: U8) -> None:
        digests[index] = blake3_digest(piece)

    try:
        if counted:
            body = reduce(
                layout,
                [
                    Contribution(codec(update.codec), sent, weight)
                    for weight, update, sent in counted
                ],
                down=terms.down,
                merge=terms.merge,
                after_block=after_block,
                on_piece=digest,
                spare=spare,
                threads=threads,
            )
    except NonFinite:
        roster = refuse_all(roster, "norm: the mean overflows")
    header = Header(
        kind=FrameKind.AGREED,
        run=run,
        fragment=fragment,
        round=round,
        epoch=epoch,
        base=base,
        codec=terms.down.name,
        elements=layout.elements if len(body) else 0,
        weight=0,
        outer=with_share(outer, roster, staleness=terms.staleness, buffer=buffer),
        roster=roster,
    )
    if not len(body):
        return with_body(header, body), body
    return header.sealed(body_bytes=len(body), pieces=tuple(digests)), body


def with_share(
    outer: OuterValues, roster: Roster, *, staleness: str, buffer: int
) -> OuterValues:
    """Return the outer values of a round's agreed frame: with its share of a buffer.

    A void round and a synchronous run, whose `buffer` is 0, have no share.
    """
    ages = [entry.age for entry in roster.counted]
    if not (ages and buffer):
        return outer
    share = buffer_share(ages, kind=staleness, buffer=buffer)
    return replace(outer, share=share, buffer=buffer)


def gather(
    mean: Header, terms: Terms, updates: Mapping[str, Framed]
) -> tuple[Header, list[U8]] | None:
    """Return the header of a round's gathered outcome, and its bodies in order.

    `mean` is the header that `agree` has made. None: the mean is sent, because it is
    smaller than its updates, because no update counted, or by the terms.
    """
    assert mean.roster is not None
    counted = [updates[entry.island] for entry in mean.roster.counted]
    if not (terms.gathers and counted) or not fits_gathered(
        mean.elements, codec_name=terms.up.name, num_bodies=len(counted)
    ):
        return None
    header = replace(
        mean, codec=terms.up.name, gathered=terms.merge, body_bytes=0, pieces=()
    )
    sealed = header.sealed(
        body_bytes=sum(len(body) for _, body in counted),
        pieces=tuple(chain.from_iterable(update.pieces for update, _ in counted)),
    )
    return sealed, [body for _, body in counted]


def mean_reader(agreed: Header, body: U8, layout: FragmentLayout | None) -> Merge:
    """Return the function that writes the mean that an outcome with a body holds.

    It writes any number of elements, and raises CorruptError if the body does not
    decode to finite ones. Only a gathered radial mean needs `layout`.
    """
    down = codec(agreed.codec)
    if agreed.num_bodies == 1:  # one update is its own mean
        return lambda first, out: down.decode(body, out, first=first)
    assert agreed.roster is not None
    bodies = np.split(body, agreed.num_bodies)
    updates = [
        Contribution(down, body, entry.weight)
        for body, entry in zip(bodies, agreed.roster.counted, strict=True)
    ]
    return gathered_reader(agreed, updates, layout)


def gathered_reader(
    agreed: Header, updates: Sequence[CountedBody], layout: FragmentLayout | None
) -> Merge:
    """Return the `mean_reader` of an outcome with several bodies, read by `updates`."""
    if agreed.gathered != "radial":
        layout = flat_layout(agreed.elements)
    assert layout is not None, "a radial mean needs its tensors"
    if layout.elements != agreed.elements:
        raise CorruptError(
            f"The {agreed.name} has {agreed.elements} elements, and its tensors "
            f"{layout.elements}. Take the run's state again."
        )
    merge = _merge(layout, updates, agreed.gathered)

    def write(first: int, out: F32) -> None:
        for start in range(0, len(out), SUM_BLOCK):
            part = out[start : start + SUM_BLOCK]
            merge(first + start, part)
            # Decoded updates are finite, and their sum may not be.
            if not np.isfinite(part).all():
                raise CorruptError(
                    f"The mean of the {agreed.name} is not finite between elements "
                    f"{first + start} and {first + start + len(part)}. "
                    "Take the run's state again."
                )

    return write
