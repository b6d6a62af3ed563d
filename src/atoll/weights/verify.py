"""The norm of an update, and checks of a received frame before it can count.

A norm is fp64 in 64 lanes, with the same bits wherever it is computed. `Norm` takes
decoded elements, `BodyNorm` the encoded bytes, without decoding them where the codec
has a kernel for that.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from atoll import kernels
from atoll.algorithm.merge import LANES
from atoll.algorithm.outer import LARGEST_NORM
from atoll.errors import CorruptError, Refused
from atoll.weights.layout import BLOCK, F32, FragmentLayout, Terms, blocks
from atoll.wire import MOMENTS, Codec, Header, piece_elements, verify_piece


class Norm:
    """Adds up an update's squares, block after block."""

    def __init__(self) -> None:
        self._lanes = np.zeros(LANES)

    def add(self, values: F32) -> None:
        """Take in the next block; every block but the last has whole lanes."""
        kernels.active().sum_squares(values, self._lanes)

    def add_beside(self, values: F32, wanted: F32, residual: F32) -> None:
        """Take in the next block, and let `residual` be what it lacks of `wanted`."""
        kernels.active().left_over(wanted, values, residual, self._lanes)

    def value(self) -> float:
        """Return the norm: lanes are summed in order, not pairwise."""
        return math.sqrt(np.add.accumulate(self._lanes)[-1])


Squares = Callable[[NDArray[np.uint8], int, NDArray[np.float64]], int]


class BodyNorm:
    """Adds up the squares of a body in a codec, part after part.

    The bits are those of `Norm`, which takes decoded elements.
    """

    def __init__(self, packing: Codec) -> None:
        self._packing = packing
        self._lanes = np.zeros(LANES)

    def add(self, data: NDArray[np.uint8], elements: int) -> int | None:
        """Take in the next elements; every part but the last has whole lanes.

        Return None, or the index of an element in the same block as the first that no
        encoder writes. Nothing can be added after that.
        """
        fused = _fused(self._packing.name)
        if fused is None or data.size != self._packing.body_bytes(elements):
            return self._add_decoded(data, elements)
        refused = fused(data, elements, self._lanes)
        return refused if refused >= 0 else None

    def value(self) -> float:
        """Return the norm: lanes are summed in order, not pairwise."""
        return math.sqrt(np.add.accumulate(self._lanes)[-1])

    def _add_decoded(self, data: NDArray[np.uint8], elements: int) -> int | None:
        scratch = np.empty(min(BLOCK, elements), np.float32)
        for block in blocks(elements):
            values = scratch[: block.stop - block.start]
            try:
                self._packing.decode(data, values, first=block.start)
            except CorruptError:
                return int(block.start)
            kernels.active().sum_squares(values, self._lanes)
        return None


def exceeds_largest(packing: Codec, body: NDArray[np.uint8], elements: int) -> bool:
    """Return whether a mean's norm is impossible for a mean of counted updates.

    A lossy codec may double the norm of its input, but not more.
    """
    norm = BodyNorm(packing)
    return norm.add(body, elements) is not None or norm.value() > 2 * LARGEST_NORM


def _fused(codec: str) -> Squares | None:
    """Return the kernel that decodes nothing, where a codec has one."""
    name = f"{codec.partition('-')[0]}_squares"
    kernel: Squares | None = getattr(kernels.active(), name, None)
    return kernel


NORM_TOLERANCE = 1e-6
"""Relative: a norm may be off by a rounding, not by a lie."""


class UpdateCheck:
    """Judges an update piece by piece, as its bytes arrive.

    An update that its own island refuses has no body, and passes. `on_refused` gets
    the reason when intact values cannot count.

    Raises:
        Refused: its size, codec or weight is not what the run's terms say.
    """

    def __init__(
        self,
        header: Header,
        layout: FragmentLayout,
        terms: Terms,
        *,
        on_refused: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self._header, self._on_refused = header, on_refused
        self._norm = BodyNorm(terms.up)
        self._elements = 0
        if not header.refused:
            require_terms(header, layout, terms)

    def piece(self, index: int, data: memoryview) -> None:
        """Take in the next piece of the body.

        Raises:
            CorruptError: it is not the one that was sealed.
            Refused: it is, and does not decode to finite values.
        """
        verify_piece(self._header, index, data)
        body = np.frombuffer(data, np.uint8)
        self.decoded(body, piece_elements(self._header.elements, index))

    def decoded(self, data: np.ndarray, elements: int) -> None:
        """Take in the next bytes, which are known to be the sealed ones.

        Raises:
            Refused: they do not decode to finite values. Sent again, they would not.
        """
        refused = self._norm.add(data, elements)
        if refused is not None:
            raise self._undecodable(refused, elements)
        self._elements += elements

    def _undecodable(self, refused: int, elements: int) -> Refused:
        header, start = self._header, refused // BLOCK * BLOCK
        first = self._elements + start
        last = self._elements + min(start + BLOCK, elements)
        reason = (
            f"values that are not finite, or that {header.codec} cannot hold, between "
            f"element {first} and {last}"
        )
        self._on_refused(reason)
        return Refused(
            f"The update of fragment {header.fragment} was sealed with {reason}. "
            "Find what made them, and seal the work again; the same bytes again are "
            "refused again."
        )

    def finish(self) -> None:
        """Raise Refused unless the whole body has the norm that its header says."""
        header, norm = self._header, self._norm.value()
        if header.refused:
            return
        if abs(norm - header.norm) > NORM_TOLERANCE * norm:
            raise Refused(
                f"The update says that its norm is {header.norm:.6g}, and it is "
                f"{norm:.6g}. Seal it again."
            )


def require_terms(header: Header, layout: FragmentLayout, terms: Terms) -> None:
    """Return when an update has the size, codec and weight that a fragment takes.

    Raises:
        Refused: it has not.
    """
    expected = (layout.elements, terms.up.name)
    if (header.elements, header.codec) != expected:
        raise Refused(
            f"An update of {header.elements} elements in {header.codec} is not what "
            f"fragment {header.fragment} takes: {expected[0]} elements in "
            f"{expected[1]}. Take the settings from the run."
        )
    if header.weight != 1 and not terms.is_weighted:
        raise Refused(
            f"weight={header.weight} is not 1, and outer.weight is 'uniform'. "
            "Take the settings from the run."
        )


def require_update(
    header: Header, body: np.ndarray, layout: FragmentLayout, terms: Terms
) -> None:
    """Return when an update, whose bytes are verified, is one that can count.

    Raises:
        Refused: its size, codec, weight or norm is not what the run's terms say, or its
            body does not decode to finite values.
    """
    check = UpdateCheck(header, layout, terms)
    check.decoded(body, header.elements)
    check.finish()


def require_state(
    header: Header, layout: FragmentLayout, terms: Terms, *, round: int
) -> None:
    """Return when a state can be that of a fragment after `round`; 0 founds it.

    Raises:
        Refused: it is of another round, size or optimizer.
    """
    vectors = 1 + MOMENTS[terms.outer.optimizer]
    expected = (round, vectors * layout.elements, terms.outer)
    outer = header.outer
    if round and outer and outer.optimizer == terms.outer.optimizer:
        outer = terms.outer  # lr and momentum may be those of another epoch
    if (header.round, header.elements, outer) != expected:
        raise Refused(
            f"A state of round {header.round} with {header.elements} elements and "
            f"{header.outer} cannot {'be' if round else 'found'} fragment "
            f"{header.fragment}, which takes "
            f"round {expected[0]}, {expected[1]} elements and {expected[2]}. "
            "Take the settings from the run."
        )
