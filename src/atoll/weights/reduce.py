"""From the counted updates of a round to the agreed body, block by block.

Memory does not grow with the number of islands, except for merges that must see every
island's value of a coordinate (`trimmed`) or of a tensor (`radial`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from atoll import kernels
from atoll.algorithm import merge as text
from atoll.weights.layout import BLOCK, F32, FragmentLayout, blocks
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
) -> np.ndarray:
    """Return the agreed body: the mean of the decoded updates, encoded once.

    Raises:
        NonFinite: the mean overflows what `down` can hold.
        CorruptError: a body does not decode.
    """
    agreed = np.empty(down.body_bytes(layout.elements), np.uint8)
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
    return agreed


def _mean(contributions: Sequence[Contribution], block: slice, out: F32) -> None:
    first, *others = contributions
    weights = [contribution.weight for contribution in contributions]
    out[:] = 0.0
    if len(set(weights)) == 1:
        first.codec.decode(first.body, out, first=block.start)
        for other in others:
            other.codec.decode_add(other.body, out, first=block.start)
        if others:
            kernels.active().divide(out, np.float32(len(weights)))
        return
    for contribution, share in zip(contributions, text.shares(weights), strict=True):
        contribution.codec.decode_add(
            contribution.body, out, weight=share, first=block.start
        )


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
