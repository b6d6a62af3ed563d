"""From the counted updates of a round to the agreed body, block by block.

Memory does not grow with the islands but for a block per level of the sum's tree,
except for merges that must see every
island's value of a coordinate (`trimmed`) or of a tensor (`radial`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from atoll import kernels
from atoll.algorithm import merge as text
from atoll.weights.layout import BLOCK, F32, FragmentLayout, blocks
from atoll.weights.spare import Spare
from atoll.wire import Codec


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
    spare: Spare | None = None,
) -> np.ndarray:
    """Return the agreed body: the mean of the decoded updates, encoded once.

    `after_block` is called when a block of every update has been read. The body is in
    memory of `spare`, if there is any.

    Raises:
        NonFinite: the mean overflows what `down` can hold.
        CorruptError: a body does not decode.
    """
    agreed = (spare or Spare()).body(down.body_bytes(layout.elements))
    if merge == "radial":
        mean = _radial(layout, contributions)
        down.encode(mean, agreed)
        return agreed
    mean = np.empty(min(BLOCK, layout.elements), np.float32)
    for block in blocks(layout.elements):
        here = mean[: block.stop - block.start]
        if merge == "trimmed":
            here[:] = text.trimmed(_decode_all(contributions, block))
        else:
            _mean(contributions, block, here)
        start = down.offset(block.start)
        piece = agreed[start : start + down.body_bytes(len(here))]
        down.encode(here, piece, first=block.start)
        if after_block:
            after_block()
    return agreed


def _mean(contributions: Sequence[Contribution], block: slice, out: F32) -> None:
    weights = [contribution.weight for contribution in contributions]
    is_even = len(set(weights)) == 1
    shares = [None] * len(weights) if is_even else text.shares(weights)
    out[:] = 0.0
    _add_tree(list(zip(contributions, shares, strict=True)), block, out)
    if is_even and len(weights) > 1:
        kernels.active().divide(out, np.float32(len(weights)))


def _add_tree(
    terms: Sequence[tuple[Contribution, float | None]], block: slice, out: F32
) -> None:
    """Add the sum of share times value to a block of zeros, in the text's order.

    A block of scratch for each level that has more than a leaf on its right: their
    number grows with the logarithm of the number of islands.
    """
    if len(terms) == 1:
        ((contribution, share),) = terms
        contribution.codec.decode_add(
            contribution.body, out, weight=share, first=block.start
        )
        return
    half = text.first_half(len(terms))
    _add_tree(terms[:half], block, out)
    if len(terms) - half == 1:
        _add_tree(terms[half:], block, out)
        return
    right = np.zeros_like(out)
    _add_tree(terms[half:], block, right)
    kernels.active().accumulate(out, right)


def _decode_all(contributions: Sequence[Contribution], block: slice) -> list[F32]:
    values = []
    for contribution in contributions:
        out = np.empty(block.stop - block.start, np.float32)
        contribution.codec.decode(contribution.body, out, first=block.start)
        values.append(out)
    return values


def _radial(layout: FragmentLayout, contributions: Sequence[Contribution]) -> F32:
    """Return the radial-directional mean, tensor by tensor."""
    whole = slice(0, layout.elements)
    values = _decode_all(contributions, whole)
    weights = [contribution.weight for contribution in contributions]
    mean = np.empty(layout.elements, np.float32)
    for first, last in zip(layout.offsets[:-1], layout.offsets[1:], strict=True):
        here = [value[first:last] for value in values]
        mean[first:last] = text.radial(here, weights)
    return mean
