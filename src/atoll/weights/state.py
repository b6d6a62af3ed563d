"""A fragment's anchor and moments, and the one outer step that moves them.

Decoding the agreed mean, the step and the digest of the result are one pass over blocks
that stay in cache (`step_and_hash`). Blocks touch only their own elements, so that any
number of threads leaves the same bits and the same hashes. `algorithm.outer` is the
reference; a test proves this variant equal to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from atoll import kernels, wire
from atoll.algorithm.outer import LARGEST_MOMENT, adam_corrections
from atoll.errors import CorruptError
from atoll.weights.layout import F32, FragmentLayout, ScratchPool, first_non_finite
from atoll.weights.reduce import mean_reader


class FragmentState:
    """Anchor and velocity of one fragment at one round.

    Applying the same agreed frames to the same state gives the same bits everywhere.
    """

    def __init__(
        self,
        anchor: F32,
        moments: Sequence[F32],
        *,
        round: int = 0,
        count: int = 0,
    ) -> None:
        self.anchor = anchor
        self.moments = tuple(moments)
        self.round = round
        self.count = count
        self.digest = wire.state_digest(anchor, self.moments, count)

    @classmethod
    def found(cls, anchor: F32, optimizer: str) -> FragmentState:
        """Return the state before any round: these weights, and no velocity."""
        moments = [np.zeros_like(anchor) for _ in range(wire.MOMENTS[optimizer])]
        return cls(anchor, moments)

    @classmethod
    def from_frame(cls, header: wire.Header, body: np.ndarray) -> FragmentState:
        """Return the state that a verified state frame holds; takes over `body`.

        Raises:
            CorruptError: the frame's vectors are not those of its optimizer, hold NaN
                or infinity, or moments that no outer steps lead to, or its digest is
                not theirs.
        """
        assert header.outer is not None
        vectors = 1 + wire.MOMENTS[header.outer.optimizer]
        if header.kind is not wire.FrameKind.STATE or header.elements % vectors:
            raise CorruptError(
                f"A state frame of {header.elements} elements does not hold "
                f"{vectors} equal vectors. Ask for the state again."
            )
        values = body.view(np.float32)
        if (bad := first_non_finite(values)) is not None:
            raise CorruptError(
                f"Element {bad} of the state of fragment {header.fragment} is "
                f"{values[bad]}. Ask for the state again."
            )
        anchor, *moments = np.split(values, vectors)
        _require_bounded(moments, header)
        state = cls(anchor, moments, round=header.round, count=header.outer.count)
        if state.digest != header.base:
            raise CorruptError(
                f"The state of fragment {header.fragment} at round {header.round} has "
                f"digest {state.digest.hex()}, and its frame says "
                f"{header.base.hex()}. Ask for the state again."
            )
        return state

    def to_frame(
        self,
        *,
        run: str,
        fragment: int,
        outer: wire.OuterValues,
        island: str = "",
        incarnation: int = 0,
    ) -> tuple[wire.Header, np.ndarray]:
        """Return the state as a frame; its body is a copy."""
        body = np.concatenate(self.vectors).view(np.uint8)
        header = self.to_header(
            run=run,
            fragment=fragment,
            outer=outer,
            island=island,
            incarnation=incarnation,
        )
        return header, body

    @property
    def vectors(self) -> tuple[F32, ...]:
        """The parts of a state frame's body, in order."""
        return (self.anchor, *self.moments)

    def to_header(
        self,
        *,
        run: str,
        fragment: int,
        outer: wire.OuterValues,
        island: str = "",
        incarnation: int = 0,
    ) -> wire.Header:
        """Return the header of the frame whose body is `vectors`, one by one."""
        header = wire.Header(
            kind=wire.FrameKind.STATE,
            run=run,
            fragment=fragment,
            round=self.round,
            island=island,
            incarnation=incarnation,
            base=self.digest,
            elements=len(self.vectors) * len(self.anchor),
            weight=0,
            outer=outer.in_state(self.count),
        )
        return wire.with_body(header, *self.vectors)

    def apply(
        self,
        agreed: wire.Header,
        body: np.ndarray,
        *,
        layout: FragmentLayout | None = None,
        threads: int = 1,
    ) -> None:
        """Take the outer step of `agreed`, a verified frame of the next round.

        A void round uses its number and moves nothing, the count included. The bits do
        not depend on the number of `threads`. Only a gathered radial mean needs
        `layout`.

        Raises:
            CorruptError: the frame belongs to another round or another state, and
                nothing has moved; or its body does not decode, and the state is
                spoilt: its digest is all zeros, which no update may name.
        """
        self.require_next(agreed, elements=len(self.anchor))
        if agreed.elements:
            step = OuterStep.of(agreed, self.count)
            self.count = step.count
            self.digest = bytes(len(self.digest))
            hashes = step_and_hash(
                self.vectors, agreed, body, step=step, layout=layout, threads=threads
            )
            self.digest = wire.state_root(
                [hashes.tobytes()],
                elements=len(self.anchor),
                moments=len(self.moments),
                count=self.count,
            )
        self.round = agreed.round

    def require_next(self, agreed: wire.Header, *, elements: int) -> None:
        """Return when `agreed` is the next outcome of this state, or of its fragment.

        Raises:
            CorruptError: it belongs to another round, another state or another size.
        """
        expected = (self.round + 1, self.digest)
        if (agreed.round, agreed.base) != expected:
            raise CorruptError(
                f"The outcome of fragment {agreed.fragment} is for round "
                f"{agreed.round} on state {agreed.base.hex()}, and this is round "
                f"{expected[0]} on state {expected[1].hex()}. "
                "Take the run's state again."
            )
        if agreed.elements not in (0, elements):
            raise CorruptError(
                f"The outcome of fragment {agreed.fragment} has {agreed.elements} "
                f"elements, and the fragment {elements}. "
                "Take the run's state again."
            )


def _require_bounded(moments: Sequence[F32], header: wire.Header) -> None:
    """Return when moments can come of outer steps, which start with zeros.

    Larger ones would let the next outer step overflow.
    """
    largest = 0.0 if header.round == 0 else LARGEST_MOMENT
    for moment in moments:
        magnitude = max(float(moment.max()), -float(moment.min()))
        if magnitude > largest:
            raise CorruptError(
                f"The state of fragment {header.fragment} at round {header.round} has "
                f"a moment of {magnitude:.3g}, above {largest:.3g}. Ask for the state "
                "again, or found the run with moments of zero."
            )


@dataclass(frozen=True, kw_only=True)
class OuterStep:
    """The outer step that an agreed frame asks of a state."""

    outer: wire.OuterValues
    count: int
    """Of the state after the step: the steps of Adam, or the updates that counted since
    the velocity last moved."""

    is_first: bool = True
    is_last: bool = True
    """Whether the round begins and fills the buffer of an asynchronous run."""

    @classmethod
    def of(cls, agreed: wire.Header, count: int) -> OuterStep:
        """Return the step of a frame with a mean, on a state with this count."""
        outer, roster = agreed.outer, agreed.roster
        assert outer is not None
        assert roster is not None
        if outer.optimizer != "nesterov" or not outer.buffer:
            return cls(outer=outer, count=count + (outer.optimizer == "adam"))
        filled = count + len(roster.counted)
        is_last = filled >= outer.buffer
        return cls(
            outer=outer,
            count=0 if is_last else filled,
            is_first=count == 0,
            is_last=is_last,
        )


U8 = NDArray[np.uint8]
Mean = F32 | NDArray[np.uint16]

DECODED_BY_STEP = {"fp32": np.float32, "bf16": np.uint16}
"""Codecs whose body Nesterov's step decodes itself, and its elements' type."""

STEP_BLOCK = 4 * wire.STATE_PIECE
"""Elements per step: enough that its calls cost little, and in cache for the hash."""

HASH_BYTES = 16

Step = Callable[[slice, Mean], int | None]
"""Moves a span of a state by its part of a mean.

Returns the index of the first number of a body that is not finite, or -1; or None
where the mean was decoded before, which has refused such numbers.
"""


def step_and_hash(
    vectors: Sequence[F32],
    agreed: wire.Header,
    body: np.ndarray,
    *,
    step: OuterStep,
    layout: FragmentLayout | None = None,
    threads: int = 1,
) -> U8:
    """Move anchor and moments by an agreed mean; return a row of hashes per piece.

    Raises:
        CorruptError: the body does not decode. The vectors are then spoilt.
    """
    _require_length(agreed, body)
    elements = len(vectors[0])
    hashes = np.empty(
        (-(-elements // wire.STATE_PIECE), HASH_BYTES * len(vectors)), np.uint8
    )
    decoded_step = _decoded_step(vectors, agreed, step, body, layout)

    def work(first: int, last: int) -> None:
        decoded_step(first, last)
        for start in range(first, last, wire.STATE_PIECE):
            piece = slice(start, min(start + wire.STATE_PIECE, last))
            row = wire.state_piece([vector[piece] for vector in vectors])
            hashes[start // wire.STATE_PIECE] = np.frombuffer(row, np.uint8)

    kernels.over_blocks(elements, work, block=STEP_BLOCK, threads=threads)
    return hashes


def _require_length(agreed: wire.Header, body: np.ndarray) -> None:
    one_body = wire.codec(agreed.codec).body_bytes(agreed.elements)
    needed = agreed.num_bodies * one_body
    if body.nbytes != needed:
        several = f"{agreed.num_bodies} times " if agreed.gathered else ""
        raise CorruptError(
            f"The outcome of fragment {agreed.fragment} has a body of {body.nbytes} "
            f"bytes, and its {several}{agreed.elements} elements in {agreed.codec} "
            f"take {needed}. Take the run's state again."
        )


def _decoded_step(
    vectors: Sequence[F32],
    agreed: wire.Header,
    step: OuterStep,
    body: np.ndarray,
    layout: FragmentLayout | None,
) -> kernels.Work:
    """Return the outer step of a range, with the mean decoded on the way."""
    kernel = kernel_of(vectors, step)
    dtype = DECODED_BY_STEP.get(agreed.codec)
    is_one = agreed.num_bodies == 1
    if step.outer.optimizer == "nesterov" and dtype is not None and is_one:
        numbers = body.view(dtype)

        def direct(first: int, last: int) -> None:
            refused = kernel(slice(first, last), numbers[first:last])
            if refused is not None and refused >= 0:
                raise CorruptError(
                    f"Element {first + refused} of the outcome of fragment "
                    f"{agreed.fragment} is not finite. Take the run's state again."
                )

        return direct
    write_mean = mean_reader(agreed, body, layout)
    scratch = ScratchPool(min(STEP_BLOCK, len(vectors[0])))

    def decoded(first: int, last: int) -> None:
        with scratch.vector(last - first) as mean:
            write_mean(first, mean)
            kernel(slice(first, last), mean)

    return decoded


def kernel_of(vectors: Sequence[F32], step: OuterStep) -> Step:
    """Return the kernel of an optimizer, bound to the fp32 values of a step."""
    active, outer = kernels.active(), step.outer
    lr, momentum = np.float32(outer.lr), np.float32(outer.momentum)
    anchor, *moments = vectors
    if outer.optimizer == "sgd":
        return lambda span, mean: active.sgd(anchor[span], mean, lr, outer.scale)
    if outer.optimizer == "adam":
        first, second = moments
        fixed = adam_corrections(momentum=outer.momentum, count=step.count)
        scalars = [np.float32(value) for value in fixed]
        return lambda span, mean: active.adam(
            anchor[span], first[span], second[span], mean, lr, momentum, *scalars
        )
    (velocity,) = moments
    if outer.optimizer == "nesterov":
        position = outer.scale, step.is_first, step.is_last
        return lambda span, mean: active.nesterov(
            anchor[span], velocity[span], mean, lr, momentum, *position
        )
    return lambda span, mean: active.heavy_ball(
        anchor[span], velocity[span], mean, lr, momentum
    )
