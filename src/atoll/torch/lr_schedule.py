"""A learning rate on the run's clock: warm-up, stable, and a decay when it is time.

Rule 1: the rate is a function of the run's position. So islands at the same position
        have the same rate, whenever they joined, and however often `step` is called.
Rule 2: the run's position arrives with an outcome, and the island's own inner steps
        advance it: see `atoll.island.progress`.
Rule 3: only an island whose optimizer has no moments yet, in a run that has already
        begun, has a lower rate for a while.

A decay ends with the run, where its end is set, if not before. A decay that an operator
began with a round is measured in inner steps, even with unit="tokens": all islands know
the step of a round, but an island that joins later lacks the token count of that round.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.optim.lr_scheduler import LRScheduler

from atoll.errors import AtollWarning, UsageError
from atoll.island.progress import RunClock
from atoll.torch.island import Island, handle_of, register_scheduler

Unit = Literal["inner_steps", "tokens"]


class WSD(LRScheduler):
    """Warm-up, stable, decay: each param group's own rate times one factor.

    Call `step()` after each `optimizer.step()`. Several optimizers have one each. With
    `join(..., checkpoint=...)` its state is saved and restored automatically.

    Args:
        optimizer: the optimizer; its rates are the stable ones.
        island: the island that `join` returned.
        warmup: length of the rise from zero, in `unit` of the run.
        decay: length of the fall to zero, in `unit`; 0 means no decay, unless an
            operator starts one. It ends with the run, where the end is known; else, or
            before, it begins with the round of `run.decay_round`.
        unit: "inner_steps" of the run's schedule, or the "tokens" of all islands.
        rewarm_steps: inner steps in which a late island's rate rises to the run's.

    Raises:
        UsageError: the run is shorter than warm-up and decay, a decay has no known
            length, or a number is out of range.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        island: Island,
        *,
        warmup: int,
        decay: int = 0,
        unit: Unit = "inner_steps",
        rewarm_steps: int = 20,
    ) -> None:
        _require_whole(warmup=warmup, decay=decay, rewarm_steps=rewarm_steps)
        if unit not in ("inner_steps", "tokens"):
            raise UsageError(f"unit={unit!r} is neither 'inner_steps' nor 'tokens'.")
        self._island, self._handle = island, handle_of(island)
        self._warmup, self._unit = warmup, unit
        self._rewarm_steps = rewarm_steps
        sync = island.settings.sync
        self._sync_every = None if sync.is_async else sync.sync_every
        self._clock = self._handle.status.clock
        self._last_sync = self._clock.syncs
        self._tokens = 0.0
        """The highest count that this clock has shown: it never goes back."""

        # A rate may jump to the run's only if the optimizer has moments already.
        is_fresh = not (island.inner_steps or optimizer.state)
        is_late = island.run_steps > 0 and is_fresh
        self._rewarm_from = island.inner_steps if is_late else None
        self._has_warned = False
        self._terms: dict[str, Any] = {
            "decay": decay,
            "is_steps": unit == "inner_steps",
            "sync_every": self._sync_every,
        }
        require_room(self._clock, warmup=warmup, **self._terms)
        super().__init__(optimizer)
        saved = register_scheduler(island, self)
        if isinstance(saved, dict):
            self.load_state_dict(saved)
            self._update_lr(self.last_epoch)

    def get_lr(self) -> list[float | torch.Tensor]:
        """Return the rates of the coming inner step, one for each param group."""
        factor = self._factor()
        return [base * factor for base in self.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a later incarnation: plain values, and no island."""
        return {
            "last_epoch": self.last_epoch,
            "step_count": self._step_count,
            "base_lrs": [float(rate) for rate in self.base_lrs],
            "last_lr": [float(rate) for rate in self.get_last_lr()],
            "rewarm_from": self._rewarm_from,
            "run_steps": self._island.run_steps,
            "tokens": self._tokens,
            "clock": self._clock.to_dict(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a state, on the run's present clock.

        If the island is at the step of the state, the rates are bit-identical.

        Raises:
            UsageError: the optimizer has another number of param groups.
        """
        base = list(state_dict["base_lrs"])
        if len(base) != len(self.optimizer.param_groups):
            raise UsageError(
                f"The state is of {len(base)} param groups, and the optimizer has "
                f"{len(self.optimizer.param_groups)}. Build it as it was saved."
            )
        self.last_epoch = state_dict["last_epoch"]
        self._step_count = state_dict["step_count"]
        self.base_lrs = base
        self._last_lr = list(state_dict["last_lr"])
        self._rewarm_from = state_dict["rewarm_from"]
        if state_dict["run_steps"] == self._island.run_steps:
            self._clock = RunClock.from_dict(state_dict["clock"])
            self._last_sync = self._handle.status.clock.syncs
            self._tokens = state_dict["tokens"]

    def _factor(self) -> float:
        self._update_clock()
        plan = decay_of(self._clock, **self._terms)
        if plan.fault and not self._has_warned:
            self._has_warned = True
            warnings.warn(plan.fault, AtollWarning, stacklevel=4)
        step, tokens = self._island.run_steps, self._tokens
        return self._risen(step, tokens) * plan.factor(step, tokens) * self._rewarmed()

    def _update_clock(self) -> None:
        """Take the clock of the last sync; the token count never goes back."""
        clock = self._handle.status.clock
        if clock.syncs != self._last_sync:
            self._clock, self._last_sync = clock, clock.syncs
        if self._unit == "tokens":
            self._tokens = max(self._tokens, self._reckoned())

    def _reckoned(self) -> float:
        """Return the estimated tokens of all islands at this step.

        Until a round has counted, all are assumed to train as this island does.
        """
        step, clock = self._island.run_steps, self._clock
        counted = clock.tokens_at(step, sync_every=self._sync_every)
        if counted is not None:
            self._require_tokens(clock.tokens)
            return counted
        steps, tokens = self._handle.trained
        if not steps:
            return 0.0
        self._require_tokens(tokens)
        return tokens * step / steps * self._island.settings.run.start_islands

    def _require_tokens(self, tokens: int) -> None:
        if not tokens:
            raise UsageError(
                "unit='tokens', and no tokens have been reported. Call "
                "island.report(tokens=...) before each step, or use "
                "unit='inner_steps'."
            )

    def _risen(self, step: int, tokens: float) -> float:
        if not self._warmup:
            return 1.0
        done = step + 1 if self._unit == "inner_steps" else tokens
        return min(1.0, done / self._warmup)

    def _rewarmed(self) -> float:
        if self._rewarm_from is None or not self._rewarm_steps:
            return 1.0
        steps = self._island.inner_steps - self._rewarm_from
        return min(1.0, (steps + 1) / self._rewarm_steps)


def _require_whole(**numbers: int) -> None:
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise UsageError(
                f"{name}={value!r} must be a whole number of at least 0. Count inner "
                "steps, or tokens."
            )


@dataclass(frozen=True, kw_only=True)
class Decay:
    """The range in which the rate falls; none if the length is 0."""

    first: int = 0
    length: int = 0
    is_steps: bool = True
    fault: str = ""
    """The reason why the requested decay is impossible; empty if it is possible."""

    def factor(self, step: int, tokens: float) -> float:
        """Return the factor of the rate for the inner step after `step`.

        In steps, the rate falls by 1 / (length + 1) with each; the last one has that
        much left, which stays if the run continues.
        """
        if not self.length:
            return 1.0
        if not self.is_steps:
            remaining = (self.first + self.length - tokens) / self.length
            return min(1.0, max(0.0, remaining))
        steps = min(max(step - self.first + 1, 0), self.length)
        return 1.0 - steps / (self.length + 1)


def decay_of(
    clock: RunClock, *, decay: int, is_steps: bool, sync_every: int | None
) -> Decay:
    """Return the decay that follows from the run's clock.

    `sync_every` is None in an asynchronous run, whose rounds have no fixed steps.
    """
    if clock.decay_round is not None and sync_every is not None:
        return _begun_by_round(
            clock.decay_round, clock, decay if is_steps else 0, sync_every
        )
    end = _end(clock, is_steps=is_steps, sync_every=sync_every)
    if not decay or end is None:
        return Decay()
    return Decay(first=end - decay, length=decay, is_steps=is_steps)


def _begun_by_round(round: int, clock: RunClock, decay: int, sync_every: int) -> Decay:
    first = (round - 1) * sync_every
    end = _end(clock, is_steps=True, sync_every=sync_every)
    if end is not None:
        remaining = max(0, end - first)
        return Decay(first=first, length=min(decay, remaining) if decay else remaining)
    if decay:
        return Decay(first=first, length=decay)
    return Decay(
        fault=f"run.decay_round={round} begins a decay whose length in inner steps "
        "is unknown. Set run.end_rounds, or give WSD(..., decay=STEPS) with "
        "unit='inner_steps'."
    )


def require_room(
    clock: RunClock,
    *,
    warmup: int,
    decay: int,
    is_steps: bool,
    sync_every: int | None,
) -> None:
    """Raise unless warm-up and decay fit into the run.

    Raises:
        UsageError: they do not. The message has the remedy.
    """
    if decay and is_steps and sync_every is None:
        raise UsageError(
            f"decay={decay} with unit='inner_steps' has no end in a run with "
            "sync.mode='async': its rounds have no fixed steps. Use unit='tokens' and "
            "run.end_tokens."
        )
    plan = decay_of(clock, decay=decay, is_steps=is_steps, sync_every=sync_every)
    if plan.fault:
        raise UsageError(plan.fault)
    end = _end(clock, is_steps=is_steps, sync_every=sync_every)
    planned_decay = decay if clock.decay_round is None else 0
    if end is not None and warmup + planned_decay > end:
        raise UsageError(
            f"warmup={warmup} and decay={planned_decay} are longer than the run, which "
            f"ends after {end} {'inner steps' if is_steps else 'tokens'}. Make one of "
            "them shorter, or let the run end later."
        )


def _end(clock: RunClock, *, is_steps: bool, sync_every: int | None) -> int | None:
    """Return the end of the run in steps or tokens, if it is known."""
    if not is_steps:
        return clock.end_tokens
    if clock.last_round is None or sync_every is None:
        return None
    return clock.last_round * sync_every
