"""From a round's roster and counted updates to its agreed frame, for all exchanges.

`reduce` computes the body piece by piece, `agree` makes the frame. Memory does not grow
with the number of islands, except for one block per level of the sum's tree and per
thread, and for merges that must see every island's value of a coordinate (`trimmed`) or
of a tensor (`radial`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from atoll import kernels
from atoll.algorithm import merge as text
from atoll.algorithm.pace import buffer_share
from atoll.errors import NonFinite
from atoll.protocol import refuse_all
from atoll.weights.layout import (
    BLOCK,
    F32,
    BodyPool,
    FragmentLayout,
    ScratchPool,
    Terms,
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
    piece_count,
    piece_range,
    with_body,
)

SUM_BLOCK = 2 * BLOCK
"""Elements added up per step: threads that meet less often wait less for each other."""

OnPiece = Callable[[int, np.ndarray], None]
Merge = Callable[[int, F32], None]
"""Writes the mean of the elements from a first one on."""


@dataclass(frozen=True)
class Contribution:
    """One counted update. Callers give them in the byte order of island names."""

    codec: Codec
    body: np.ndarray
    weight: int


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


def _merge(
    layout: FragmentLayout, contributions: Sequence[Contribution], merge: str
) -> Merge:
    if merge == "radial":
        mean = _radial(layout, contributions)
        return lambda first, out: np.copyto(out, mean[first : first + len(out)])
    if merge == "trimmed":
        return lambda first, out: np.copyto(
            out, text.trimmed(_decode_all(contributions, first, len(out)))
        )
    return _Mean(contributions, min(SUM_BLOCK, layout.elements)).write


class _Mean:
    """Adds up the updates as the text does, a block at a time.

    A block of scratch for each level of the tree: their number grows with the logarithm
    of the number of islands.
    """

    def __init__(self, contributions: Sequence[Contribution], elements: int) -> None:
        weights = [contribution.weight for contribution in contributions]
        is_even = len(set(weights)) == 1
        shares = [None] * len(weights) if is_even else text.shares(weights)
        self._terms = list(zip(contributions, shares, strict=True))
        self._divisor = len(weights) if is_even and len(weights) > 1 else None
        self._scratch = ScratchPool(elements)

    def write(self, first: int, out: F32) -> None:
        """Write the mean of the elements from `first` on."""
        self._sum(self._terms, first, out, divisor=self._divisor)

    def _sum(
        self,
        terms: Sequence[tuple[Contribution, float | None]],
        first: int,
        out: F32,
        *,
        divisor: int | None = None,
    ) -> None:
        """Write the sum of share times value, divided at the root if shares are even.

        Decoded values are flushed: to add the first one to zero would change nothing.
        """
        if len(terms) == 1:
            ((contribution, share),) = terms
            contribution.codec.decode(contribution.body, out, first=first)
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


def _decode_all(
    contributions: Sequence[Contribution], first: int, elements: int
) -> list[F32]:
    values = []
    for contribution in contributions:
        out = np.empty(elements, np.float32)
        contribution.codec.decode(contribution.body, out, first=first)
        values.append(out)
    return values


def _radial(layout: FragmentLayout, contributions: Sequence[Contribution]) -> F32:
    """Return the radial-directional mean, tensor by tensor."""
    values = _decode_all(contributions, 0, layout.elements)
    weights = [contribution.weight for contribution in contributions]
    mean = np.empty(layout.elements, np.float32)
    for first, last in zip(layout.offsets[:-1], layout.offsets[1:], strict=True):
        tensors = [value[first:last] for value in values]
        mean[first:last] = text.radial(tensors, weights)
    return mean


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
