"""Data parallel on the tokens that the islands had: the usual way, to compare with.

One process does what one for each era would: the gradient of the rows of all eras
together is the average of their gradients.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from atoll.demo.dataset import Era
from atoll.demo.model import (
    CONTEXT,
    DATA_PARALLEL_LR,
    GPT,
    ROWS,
    batches,
    evaluate,
    held_out_rows,
    loss_of,
    make_optimizer,
    set_lr,
)
from atoll.demo.results import IslandResults, ParallelResults, Point

OnStep = Callable[[int, int, float], None]
"""Called with the step, the number of steps and the loss."""


def train_beside(
    islands: Sequence[IslandResults],
    eras: Sequence[Era],
    *,
    on_step: OnStep = lambda step, steps, loss: None,
) -> ParallelResults:
    """Train the demo's model on as many tokens as these islands did together."""
    steps = max(each["inner_steps"] for each in islands)
    return train(GPT(), eras, steps=steps, on_step=on_step)


def train(
    model: GPT,
    eras: Sequence[Era],
    *,
    steps: int,
    rows: int = ROWS,
    lr: float = DATA_PARALLEL_LR,
    looks: int = 12,
    on_step: OnStep = lambda step, steps, loss: None,
) -> ParallelResults:
    """Train on the batches that the islands had, those of one step together.

    Args:
        looks: how often, and evenly, the held-out text is looked at.
    """
    optimizer, judge = make_optimizer(model), Judge(model, held_out_rows(eras))
    data = [batches(era.text, rows=rows, seed=shard) for shard, era in enumerate(eras)]
    look_after = {steps * look // looks for look in range(looks + 1)}
    step_tokens, started_s = rows * CONTEXT * len(eras), time.monotonic()
    judge.look(0)
    for step in range(1, steps + 1):
        set_lr(optimizer, lr, done=(step - 1) / steps)
        loss = loss_of(model, torch.cat([next(each) for each in data]))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        on_step(step, steps, loss.item())
        if step in look_after:
            judge.look(step * step_tokens)
    return {
        "steps": steps,
        "tokens": steps * step_tokens,
        "lr": lr,
        "seconds": time.monotonic() - started_s - judge.spent_s,
        "loss": judge.losses[-1][1],
        "held_out": judge.losses,
    }


@dataclass
class Judge:
    """Looks at the held-out text, and knows how much of the time that took."""

    model: GPT
    held_out: Tensor
    losses: list[Point] = field(default_factory=list)
    spent_s: float = 0.0

    def look(self, tokens: int) -> None:
        started_s = time.monotonic()
        self.losses.append((float(tokens), evaluate(self.model, self.held_out)))
        self.spent_s += time.monotonic() - started_s
