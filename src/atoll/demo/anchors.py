"""Anchors that are kept while a run goes on, and judged when it is over.

Judging them at once would let every other island wait for this one. Anchors are the
same on all islands, so that each judges a share of them.
"""

from __future__ import annotations

from torch import Tensor

from atoll.demo.model import GPT, evaluate
from atoll.demo.recipe import num_rounds
from atoll.demo.results import Point
from atoll.torch import Island


class Anchors:
    """One shard's copies of the anchor: all have about `looks`, evenly over the run.

    The last one is shard 0's.
    """

    def __init__(self, *, looks: int, shard: int, of: int) -> None:
        self._looks, self._shard, self._of = looks, shard, of
        self._taken = -1
        self._kept: dict[int, dict[str, Tensor]] = {}

    def look(self, island: Island) -> None:
        """Keep the anchor if it is time to, and this shard's turn."""
        due = island.round * self._looks // num_rounds(island.settings)
        if due > self._taken:
            self._taken = due
            if (self._looks - due) % self._of == self._shard:
                self._kept[island.round] = island.anchor()

    def judge(self, model: GPT, held_out: Tensor, *, round_tokens: int) -> list[Point]:
        """Return each anchor's loss by the tokens of all islands that are in it.

        Afterwards the model is the last of them.
        """
        losses: list[Point] = []
        for round, weights in sorted(self._kept.items()):
            model.load_state_dict(weights)
            losses.append((float(round * round_tokens), evaluate(model, held_out)))
        return losses
