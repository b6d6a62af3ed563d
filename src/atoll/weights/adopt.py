"""What an outcome does to local weights, in place and block by block."""

from __future__ import annotations

import numpy as np

from atoll.algorithm import adopt as text
from atoll.weights.layout import BLOCK, F32, FragmentLayout, blocks


def adopt(
    layout: FragmentLayout,
    how: str,
    anchor: F32,
    local: F32,
    base: F32,
    *,
    keep_local: float = 0.0,
) -> None:
    """Turn `local`, the weights now, into the weights after the outcome.

    `how` is "rebase" (`base`: local at the seal), "mix" (`base` unused), "carry"
    (`base`: the old anchor as loaded) or "replace" (`base` unused).
    """
    scratch = np.empty(min(BLOCK, layout.elements), np.float32)
    for block in blocks(layout.elements):
        here, agreed = local[block], anchor[block]
        if how == "rebase":
            here[:] = text.rebase(agreed, here, base[block])
        elif how == "mix":
            here[:] = text.mix(agreed, here, keep_local=keep_local)
        elif how == "carry":
            loaded = scratch[: len(here)]
            layout.load(agreed, loaded, first=block.start)
            here[:] = text.carry(loaded, base[block], here)
        else:
            assert how == "replace", how
            here[:] = agreed
