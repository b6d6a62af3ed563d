"""Anchors that are kept while a run goes on, and judged when it is over.

Judging them at once would let every other island wait for this one.
"""

from __future__ import annotations

from torch import Tensor

from atoll.demo.model import GPT, evaluate
from atoll.demo.recipe import num_rounds
from atoll.demo.results import Point
from atoll.torch import Island


class Anchors:
    """Copies of the anchor at about `looks` rounds, evenly over the run."""

    def __init__(self, *, looks: int) -> None:
        self._looks = looks
        self._taken = -1
        self._kept: dict[int, dict[str, Tensor]] = {}

    def look(self, island: Island) -> None:
        """Keep the anchor if it is time to."""
        due = island.round * self._looks // num_rounds(island.settings)
        if self._looks and due > self._taken:
            self._taken = due
            self._kept[island.round] = island.anchor()

    def judge(self, model: GPT, held_out: Tensor, *, round_tokens: int) -> list[Point]:
        """Return each anchor's loss by the tokens of all islands that are in it.

        Afterwards the model is the last anchor.
        """
        losses: list[Point] = []
        for round, weights in sorted(self._kept.items()):
            model.load_state_dict(weights)
            losses.append((float(round * round_tokens), evaluate(model, held_out)))
        return losses
