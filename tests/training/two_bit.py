"""A 2-bit codec without error feedback: what must not be good enough."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from examples.minimal import TinyGPT


class TwoBit:
    """Makes an island send what such a codec would decode to.

    That is -1, 0 or 1 times the update's largest magnitude, whichever is nearest.

    With one fragment and no overlap the weights before a window's first inner step are
    the anchor, and those after its last are replaced by the outcome: rounding them just
    before the seal changes the update, and nothing else. Hooks run in the order they
    were registered, so this must be made before the island joins.
    """

    def __init__(
        self, model: TinyGPT, optimizer: Optimizer, *, sync_every: int
    ) -> None:
        self._weights = list(model.parameters())
        self._anchor: list[torch.Tensor] = []
        self._sync_every, self._steps = sync_every, 0
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    def _before(self, *_: object) -> None:
        if self._steps % self._sync_every == 0:
            self._anchor = [weights.detach().clone() for weights in self._weights]

    @torch.no_grad()
    def _after(self, *_: object) -> None:
        self._steps += 1
        if self._steps % self._sync_every == 0:
            self._round()

    def _round(self) -> None:
        pairs = list(zip(self._anchor, self._weights, strict=True))
        scale = max(float((anchor - local).abs().max()) for anchor, local in pairs)
        for anchor, local in pairs:
            local.copy_(anchor - scale * torch.round((anchor - local) / scale))
