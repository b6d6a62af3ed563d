"""Schedules that end at a step of their own, in a run that does not.

A cosine that was planned for 10 000 steps is at zero from there on, or begins to rise
again, and a late island that counts its own steps is somewhere else on it.
"""

from __future__ import annotations

import functools
import gc
import warnings
from collections.abc import Iterable, Iterator

from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    PolynomialLR,
)

from atoll.errors import AtollWarning
from atoll.settings import RunSettings

LENGTHS = (
    ("num_training_steps",),
    ("num_warmup_steps", "num_stable_steps", "num_decay_steps"),
)
"""What transformers calls the steps that its schedules are made for."""


def length_of(scheduler: LRScheduler) -> int | None:
    """Return the steps that a schedule was made for; None if it goes on for ever.

    A plain function in a `LambdaLR` says nothing of its length, and a `LinearLR` that
    ends at the full rate is a warm-up.
    """
    match scheduler:
        case CosineAnnealingLR():
            return int(scheduler.T_max)
        case OneCycleLR():
            return int(scheduler.total_steps)
        case PolynomialLR():
            return int(scheduler.total_iters)
        case LinearLR() if scheduler.end_factor < scheduler.start_factor:
            return int(scheduler.total_iters)
        case LambdaLR():
            return _length_of_lambdas(scheduler.lr_lambdas)
    return None


def warn_of_fixed(optimizer: Optimizer, settings: RunSettings) -> None:
    """Say that a schedule of fixed length is used in a run without an end."""
    run = settings.run
    if run.end_rounds is not None or run.end_tokens is not None:
        return
    if not any("initial_lr" in group for group in optimizer.param_groups):
        return  # no scheduler has been made for it
    for scheduler in _schedulers_of(optimizer):
        if (length := length_of(scheduler)) is not None:
            warnings.warn(
                f"{type(scheduler).__name__} ends after {length} steps of this island, "
                "and the run has no end. Use atoll.torch.WSD, which is on the run's "
                "clock, or set run.end_rounds.",
                AtollWarning,
                stacklevel=2,
            )
            return


def _schedulers_of(optimizer: Optimizer) -> Iterator[LRScheduler]:
    """Find who changes an optimizer's rate: it does not know itself.

    All objects are looked through, once in the life of an island. Only types are asked:
    an object that is half made, or a stand-in, must not be touched.
    """
    for each in gc.get_objects():
        if issubclass(type(each), LRScheduler) and (
            vars(each).get("optimizer") is optimizer
        ):
            yield each


def _length_of_lambdas(lambdas: Iterable[object]) -> int | None:
    for each in lambdas:
        said = each.keywords if isinstance(each, functools.partial) else {}
        for names in LENGTHS:
            if all(name in said for name in names):
                return sum(int(said[name]) for name in names)
    return None
