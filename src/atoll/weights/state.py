"""A fragment's anchor and velocity, and the one outer step that moves them.

The step, the decoding of the agreed mean and the digest of the result are one pass
over blocks that stay in cache. `algorithm.outer` is the text; a test proves this
variant equal to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from atoll import kernels
from atoll.algorithm.outer import adam_corrections
from atoll.errors import CorruptError
from atoll.weights.layout import BLOCK, F32, blocks, first_non_finite
from atoll.wire import (
    MOMENTS,
    STATE_PIECE,
    Header,
    Kind,
    OuterValues,
    codec,
    state_digest,
    state_piece,
    state_root,
    with_body,
)

assert BLOCK == STATE_PIECE

FUSED_CODECS = {"fp32": np.float32, "bf16": np.uint16}
"""Codecs whose body a kernel reads on the way, and its elements' type."""

FUSED_BLOCK = 16 * STATE_PIECE
"""Elements per call of that kernel: enough that the call costs nothing."""

Step = Callable[[slice, F32], None]


class FragmentState:
    """Anchor and velocity of one fragment at one round.

    Everyone who applies the same agreed frames to the same state holds the same bits.
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
        self.digest = state_digest(anchor, self.moments, count)

    @classmethod
    def found(cls, anchor: F32, optimizer: str) -> FragmentState:
        """Return the state before any round: these weights, and no velocity."""
        moments = [np.zeros_like(anchor) for _ in range(MOMENTS[optimizer])]
        return cls(anchor, moments)

    @classmethod
    def from_frame(cls, header: Header, body: np.ndarray) -> FragmentState:
        """Return the state that a verified state frame holds; takes over `body`.

        Raises:
            CorruptError: the frame's vectors are not those of its optimizer, hold NaN
                or infinity, or its digest is not theirs.
        """
        assert header.outer is not None
        vectors = 1 + MOMENTS[header.outer.optimizer]
        if header.kind is not Kind.STATE or header.elements % vectors:
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
        outer: OuterValues,
        island: str = "",
        incarnation: int = 0,
    ) -> tuple[Header, np.ndarray]:
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
        outer: OuterValues,
        island: str = "",
        incarnation: int = 0,
    ) -> Header:
        """Return the header of the frame whose body is `vectors`, one by one."""
        header = Header(
            kind=Kind.STATE,
            run=run,
            fragment=fragment,
            round=self.round,
            island=island,
            incarnation=incarnation,
            base=self.digest,
            elements=len(self.vectors) * len(self.anchor),
            weight=0,
            outer=replace(outer, count=self.count),
        )
        return with_body(header, *self.vectors)

    def apply(self, agreed: Header, body: np.ndarray) -> None:
        """Take the outer step of `agreed`, a verified frame of the next round.

        A void round uses its number and moves nothing.

        Raises:
            CorruptError: the frame belongs to another round or another state, and
                nothing has moved; or its body does not decode, and the state is
                spoilt: its digest is all zeros, which no update may name.
        """
        self._require_next(agreed)
        if agreed.elements:
            assert agreed.outer is not None
            self.count += agreed.outer.optimizer == "adam"
            self.digest = bytes(len(self.digest))
            self.digest = self._step(agreed, agreed.outer, body)
        self.round = agreed.round

    def _require_next(self, agreed: Header) -> None:
        expected = (self.round + 1, self.digest)
        if (agreed.round, agreed.base) != expected:
            raise CorruptError(
                f"The outcome of fragment {agreed.fragment} is for round "
                f"{agreed.round} on state {agreed.base.hex()}, and this is round "
                f"{expected[0]} on state {expected[1].hex()}. "
                "Take the run's state again."
            )
        if agreed.elements not in (0, len(self.anchor)):
            raise CorruptError(
                f"The outcome of fragment {agreed.fragment} has {agreed.elements} "
                f"elements, and the fragment {len(self.anchor)}. "
                "Take the run's state again."
            )

    def _step(self, agreed: Header, outer: OuterValues, body: np.ndarray) -> bytes:
        is_fused = outer.optimizer == "nesterov" and agreed.codec in FUSED_CODECS
        step = self._fused_step if is_fused else self._plain_step
        return state_root(
            step(agreed, outer, body),
            elements=len(self.anchor),
            moments=len(self.moments),
            count=self.count,
        )

    def _fused_step(
        self, agreed: Header, outer: OuterValues, body: np.ndarray
    ) -> list[bytes]:
        """Decode, step and hash in one pass over memory."""
        mean = body.view(FUSED_CODECS[agreed.codec])
        (velocity,) = self.moments
        hashes = np.empty((-(-len(mean) // STATE_PIECE), 2 * 16), np.uint8)
        for first in range(0, len(mean), FUSED_BLOCK):
            here = slice(first, first + FUSED_BLOCK)
            refused = kernels.active().nesterov_hashed(
                self.anchor[here],
                velocity[here],
                mean[here],
                outer.lr,
                outer.momentum,
                hashes[first // STATE_PIECE : -(-here.stop // STATE_PIECE)],
            )
            if refused >= 0:
                raise CorruptError(
                    f"Element {first + refused} of the outcome of fragment "
                    f"{agreed.fragment} is not finite. Take the run's state again."
                )
        return [hashes.tobytes()]

    def _plain_step(
        self, agreed: Header, outer: OuterValues, body: np.ndarray
    ) -> list[bytes]:
        down = codec(agreed.codec)
        step = self._stepper(outer)
        mean = np.empty(min(BLOCK, len(self.anchor)), np.float32)
        pieces = []
        for block in blocks(len(self.anchor)):
            here = mean[: block.stop - block.start]
            down.decode(body, here, first=block.start)
            step(block, here)
            vectors = [self.anchor[block], *(m[block] for m in self.moments)]
            pieces.append(state_piece(vectors))
        return pieces

    def _stepper(self, outer: OuterValues) -> Step:
        """Return the kernel of an optimizer, bound to its fp32 settings."""
        active = kernels.active()
        lr, momentum = np.float32(outer.lr), np.float32(outer.momentum)
        anchor, moments = self.anchor, self.moments
        if outer.optimizer == "sgd":
            return lambda at, mean: active.sgd(anchor[at], mean, lr)
        if outer.optimizer == "adam":
            first, second = moments
            fixed = adam_corrections(momentum=outer.momentum, count=self.count)
            scalars = [np.float32(value) for value in fixed]
            return lambda at, mean: active.adam(
                anchor[at], first[at], second[at], mean, lr, momentum, *scalars
            )
        step = active.nesterov if outer.optimizer == "nesterov" else active.heavy_ball
        (velocity,) = moments
        return lambda at, mean: step(anchor[at], velocity[at], mean, lr, momentum)
