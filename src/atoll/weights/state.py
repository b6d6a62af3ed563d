"""A fragment's anchor and velocity, and the one outer step that moves them.

The step, the decoding of the agreed mean and the digest of the result are one pass
over blocks that stay in cache: see `stepping`. `algorithm.outer` is the text; a test
proves this variant equal to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from atoll.algorithm.outer import LARGEST_MOMENT
from atoll.errors import CorruptError
from atoll.weights.layout import F32, first_non_finite
from atoll.weights.stepping import step_and_hash
from atoll.wire import (
    MOMENTS,
    Header,
    Kind,
    OuterValues,
    state_digest,
    state_root,
    with_body,
)


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
                or infinity, or moments that no outer steps lead to, or its digest is
                not theirs.
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

    def apply(self, agreed: Header, body: np.ndarray, *, threads: int = 1) -> None:
        """Take the outer step of `agreed`, a verified frame of the next round.

        A void round uses its number and moves nothing. The bits do not depend on the
        number of `threads`.

        Raises:
            CorruptError: the frame belongs to another round or another state, and
                nothing has moved; or its body does not decode, and the state is
                spoilt: its digest is all zeros, which no update may name.
        """
        self.require_next(agreed, elements=len(self.anchor))
        if agreed.elements:
            assert agreed.outer is not None
            self.count += agreed.outer.optimizer == "adam"
            self.digest = bytes(len(self.digest))
            hashes = step_and_hash(
                self.vectors, agreed, body, count=self.count, threads=threads
            )
            self.digest = state_root(
                [hashes.tobytes()],
                elements=len(self.anchor),
                moments=len(self.moments),
                count=self.count,
            )
        self.round = agreed.round

    def require_next(self, agreed: Header, *, elements: int) -> None:
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


def _require_bounded(moments: Sequence[F32], header: Header) -> None:
    """Return when moments can come of outer steps, which start with zeros.

    Larger ones would let the next outer step overflow.
    """
    largest = 0.0 if header.round == 0 else LARGEST_MOMENT
    for moment in moments:
        found = max(float(moment.max()), -float(moment.min()))
        if found > largest:
            raise CorruptError(
                f"The state of fragment {header.fragment} at round {header.round} has "
                f"a moment of {found:.3g}, above {largest:.3g}. Ask for the state "
                "again, or found the run with moments of zero."
            )
