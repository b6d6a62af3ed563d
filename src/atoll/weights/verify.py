"""Whether a frame from outside is what a fragment takes: judged before it counts."""

from __future__ import annotations

import numpy as np

from atoll.errors import Refused
from atoll.weights.layout import BLOCK, FragmentLayout, blocks
from atoll.weights.norm import Norm
from atoll.weights.terms import Terms
from atoll.wire import MOMENTS, Codec, Header, codec

NORM_TOLERANCE = 1e-6
"""Relative: a norm may be off by a rounding, not by a lie."""


def require_update(
    header: Header, body: np.ndarray, layout: FragmentLayout, terms: Terms
) -> None:
    """Return when an update is one that this fragment can count.

    An update that its own island refuses has no body, and passes.

    Raises:
        Refused: its size, codec, weight or norm is not what the run's terms say.
        CorruptError: its body does not decode to finite values.
    """
    if header.refused:
        return
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
    norm = norm_of(codec(header.codec), body, header.elements)
    if abs(norm - header.norm) > NORM_TOLERANCE * norm:
        raise Refused(
            f"The update says that its norm is {header.norm:.6g}, and it is "
            f"{norm:.6g}. Seal it again."
        )


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


def norm_of(up: Codec, body: np.ndarray, elements: int) -> float:
    """Return the norm of a decoded body: fp64 in 64 lanes, as a sealed update says it.

    Raises:
        CorruptError: the body does not decode to finite values.
    """
    norm = Norm()
    scratch = np.empty(min(BLOCK, elements), np.float32)
    for block in blocks(elements):
        values = scratch[: block.stop - block.start]
        up.decode(body, values, first=block.start)
        norm.add(values)
    return norm.value()
