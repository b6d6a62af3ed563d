"""Nesterov's outer step and the XXH3-128 of its results, piece by piece."""

from __future__ import annotations

import numpy as np
import xxhash

from atoll.kernels.layouts import F32, STATE_PIECE, U8, U16
from atoll.kernels.with_numpy.floats import bf16_decode, fp32_decode
from atoll.kernels.with_numpy.outer import nesterov


def nesterov_hashed(
    anchor: F32, velocity: F32, mean: F32 | U16, lr: float, momentum: float, hashes: U8
) -> int:
    """Take Nesterov's step, and write the hashes of each piece of the results.

    The slices start at a piece. `mean` is fp32, or a bf16 body that is decoded on the
    way. `hashes` has a row per piece: 16 bytes of XXH3-128 of the anchor's bytes, then
    16 of the velocity's. Returns the index of the first number of `mean` that is not
    finite, or -1; the state is then spoilt.
    """
    fresh = np.empty(min(mean.size, STATE_PIECE), np.float32)
    for piece, first in enumerate(range(0, anchor.size, STATE_PIECE)):
        here = slice(first, min(first + STATE_PIECE, anchor.size))
        decoded = fresh[: here.stop - here.start]
        refused = _decode(mean[here], decoded)
        if refused >= 0:
            return first + refused
        nesterov(anchor[here], velocity[here], decoded, lr, momentum)
        both = (xxhash.xxh3_128_digest(x[here].data) for x in (anchor, velocity))
        hashes[piece] = np.frombuffer(b"".join(both), np.uint8)
    return -1


def _decode(mean: F32 | U16, out: F32) -> int:
    if mean.dtype == np.uint16:
        return bf16_decode(mean.view(np.uint16), out)
    return fp32_decode(mean.view(np.float32), out)
