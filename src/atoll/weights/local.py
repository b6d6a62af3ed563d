"""Local weights around a sync: `seal` before it, `adopt` after it, block by block.

`seal` encodes the pseudo-gradient as the body of an update. `adopt` puts an outcome
into the local weights, in place.
"""

from __future__ import annotations

import numpy as np

from atoll import kernels
from atoll.algorithm import adopt as text
from atoll.errors import NonFinite
from atoll.weights.layout import BLOCK, F32, FragmentLayout, blocks
from atoll.weights.verify import Norm
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

    The pseudo-gradient is the loaded anchor minus the local weights. With `anchor`
    None, `local` already is the difference to send. `residual` is not changed and
    `residual_after` gets the codec's residual: sealing is tentative, and the
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
    """Write the values to send of a block: difference plus decayed residual.

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


def adopt(
    layout: FragmentLayout,
    mode: str,
    anchor: F32,
    local: F32,
    base: F32,
    *,
    keep_local: float = 0.0,
) -> None:
    """Turn `local`, the weights now, into the weights after the outcome.

    `mode` is "rebase" (`base`: local at the seal), "mix" (`base` unused), "carry"
    (`base`: the old anchor as loaded) or "replace" (`base` unused).
    """
    scratch = np.empty(min(BLOCK, layout.elements), np.float32)
    for block in blocks(layout.elements):
        weights, agreed = local[block], anchor[block]
        if mode == "rebase":
            weights[:] = text.rebase(agreed, weights, base[block])
        elif mode == "mix":
            weights[:] = text.mix(agreed, weights, keep_local=keep_local)
        elif mode == "carry":
            loaded = scratch[: len(weights)]
            layout.load(agreed, loaded, first=block.start)
            weights[:] = text.carry(loaded, base[block], weights)
        else:
            assert mode == "replace", mode
            weights[:] = agreed
