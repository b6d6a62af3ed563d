"""What a checkpoint of a torch loop is made of."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from atoll.island.joining import is_alone
from atoll.island.keeping import Keeping, as_policy

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


def keeping_of(
    checkpoint: object, model: torch.nn.Module, optimizer: Optimizers, run: object
) -> Keeping | None:
    """Restore what `checkpoint=` holds, and return what saves it; None without one.

    Raises:
        UsageError: it is neither a policy nor a directory, or its objects do not fit.
        CorruptError: there are checkpoints, and none is valid.
    """
    if checkpoint is None:
        return None
    several = list(optimizer) if isinstance(optimizer, Sequence) else optimizer
    objects = {"model": model, "optimizer": several}
    return Keeping(as_policy(checkpoint), objects, is_alone=is_alone(run))
