"""From anchor and local weights to the sealed bytes of an update, block by block."""

from __future__ import annotations

import numpy as np

from atoll import kernels
from atoll.errors import NonFinite
from atoll.weights.layout import BLOCK, F32, FragmentLayout, blocks
from atoll.weights.norm import Norm
from atoll.wire import Codec


def seal(
    layout: FragmentLayout,
    anchor: F32 | None,
    local: F32,
    body: np.ndarray,
    *,
    up: Codec,
    seed: int = 0,
    residual: F32 | None = None,
    residual_after: F32 | None = None,
    decay: float = 1.0,
) -> float:
    """Encode pseudo-gradient plus decayed residual into `body`; return its norm.

    The pseudo-gradient is what was loaded minus what is there. With `anchor` None,
    `local` already is the difference to send. `residual` stays as it is and
    `residual_after` gets what the codec left over: sealing is tentative, and the
    caller keeps both until it has the outcome. The norm is that of the decoded update.

    Raises:
        NonFinite: naming the parameter. `body` and `residual_after` are then garbage.
    """
    work, decoded = np.empty((2, min(BLOCK, layout.elements)), np.float32)
    norm = Norm()
    for block in blocks(layout.elements):
        size = block.stop - block.start
        values, sent = work[:size], decoded[:size]
        want(
            layout, anchor, local[block], block, values, residual=residual, decay=decay
        )
        encode(layout, up, values, body, block.start, seed)
        up.decode(body, sent, first=block.start)
        if residual_after is None:
            norm.add(sent)
        else:
            norm.add_beside(sent, values, residual_after[block])
    return norm.value()


def want(
    layout: FragmentLayout,
    anchor: F32 | None,
    local: F32,
    block: slice,
    out: F32,
    *,
    residual: F32 | None,
    decay: float,
) -> None:
    """Write what is to be sent of a block: the difference, and the decayed residual.

    `local` and `out` start where the block does, the other vectors where `layout` does.
    """
    if anchor is None:
        out[:] = local
        if residual is not None:
            out += residual[block] * np.float32(decay)
        return
    loaded = anchor[block]
    if layout.is_cast:
        layout.load(loaded, out, first=block.start)
        loaded = out
    if residual is None:
        kernels.active().difference(loaded, local, out)
    else:
        kernels.active().difference_fed(loaded, local, residual[block], decay, out)


def encode(
    layout: FragmentLayout,
    up: Codec,
    values: F32,
    body: np.ndarray,
    first: int,
    seed: int,
) -> None:
    """Encode values from element `first` on into the body of the whole fragment.

    Raises:
        NonFinite: naming the parameter.
    """
    start = up.offset(first)
    piece = body[start : start + up.body_bytes(len(values))]
    try:
        up.encode(values, piece, seed=seed, first=first)
    except NonFinite as exc:
        name = layout.name_at(exc.index)
        raise NonFinite(
            f"non-finite: the pseudo-gradient of {name!r} is NaN, infinite or beyond "
            f"what {up.name} can hold",
            index=exc.index,
        ) from exc
