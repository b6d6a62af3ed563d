"""The island of a training loop.

It warns of schedules with a fixed length in a run without an end: a cosine that was
planned for 10 000 steps is at zero from there on, or begins to rise again, and a late
island that counts its own steps is at another position of it.
"""

from __future__ import annotations

import functools
import gc
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    PolynomialLR,
)
from torch.utils.hooks import RemovableHandle

from atoll.errors import AtollWarning, UsageError
from atoll.island.base import IslandHandle
from atoll.island.checkpoints import IslandCheckpoints
from atoll.island.handle import TrainedIsland
from atoll.settings import RunSettings
from atoll.torch.model import HeldWeights


@dataclass(frozen=True)
class Evaluation:
    """The anchor that is in the model while `evaluating`."""

    round: int
    """The lowest round over the fragments."""


class Island(TrainedIsland):
    """One island of a run. Use it as a context manager around the training loop."""

    _token_count = "batch.numel(), not a tensor"
    _anchor_is_shown = "The model holds the anchor while it is evaluated."

    def __init__(
        self,
        handle: IslandHandle,
        weights: HeldWeights,
        modules: Sequence[torch.nn.Module],
        counted: Optimizer | None,
        *,
        on_end: str,
        checkpointing: IslandCheckpoints | None = None,
    ) -> None:
        super().__init__(handle, on_end=on_end, checkpointing=checkpointing)
        self._weights, self._modules = weights, modules
        handle.counters.machine = _machine_of(modules)
        self._has_checked_schedule = False
        """Whether the schedule of the learning rate has been checked."""

        self._hooks: list[RemovableHandle] = []
        if counted is not None:
            # Under torch.compile(optimizer.step) the hook would be traced as well.
            opaque = torch.compiler.disable(self._after_step)  # type: ignore[no-untyped-call]
            self._hooks.append(counted.register_step_post_hook(opaque))
        if checkpointing is not None and counted is not None:
            before = torch.compiler.disable(self._before_step)  # type: ignore[no-untyped-call]
            self._hooks.append(counted.register_step_pre_hook(before))
        self._is_counted_by_hook = counted is not None

    def stepped(self) -> None:
        """Count one inner step by hand: for `count="manual"`.

        Raises:
            RunEnded: the run is over, and `on_end` is "raise".
        """
        if self._is_counted_by_hook:
            raise UsageError(
                "Inner steps are counted by the optimizer's hook. "
                'Join with count="manual" to count them yourself.'
            )
        self._stepped()

    def sync_now(self) -> None:
        """Put all work into the open rounds now, and return when it is adopted.

        Others keep their schedule, so this may wait for them; it replaces the next send
        of each fragment.
        """
        self._require_local()
        self._handle.sync_now()
        self._raise_if_ended()

    def anchor(self) -> dict[str, torch.Tensor]:
        """Return the agreed weights by name, on the CPU and in fp32.

        In an island of several ranks all call it: the leader gets the weights of all
        ranks, 4 bytes for each parameter, and the others get none.
        """
        return self._weights.anchor()

    @contextmanager
    def evaluating(self) -> Iterator[Evaluation]:
        """Put the newest anchor into the model, and restore everything on exit.

        With overlap the anchor may be a round ahead of the local weights.
        """
        self._require_local()
        parts = [part for module in self._modules for part in module.modules()]
        modes = [(part, part.training) for part in parts]
        buffers = [(b, b.clone()) for module in self._modules for b in module.buffers()]
        local = self._weights.keep_local()
        try:
            self._evaluated_round = self._weights.load_anchor()
            yield Evaluation(round=self._evaluated_round)
        finally:
            for buffer, saved in buffers:
                buffer.copy_(saved)
            self._weights.restore_local(local)
            for module, is_training in modes:
                module.training = is_training
            self._evaluated_round = None

    def _before_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        self._finish_saving()

    def _after_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if not self._has_checked_schedule:
            self._has_checked_schedule = True
            warn_of_fixed(optimizer, self.settings)
        if not _was_skipped(optimizer):
            self._stepped()

    def _stepped(self) -> None:
        self._require_local()
        self._count_step()

    def _detached(self, value: Any) -> Any:
        """Return the value without its graph, which would stay in memory."""
        return value.detach() if isinstance(value, torch.Tensor) else value

    def _detach(self) -> None:
        for hook in self._hooks:
            hook.remove()


def handle_of(island: Island) -> IslandHandle:
    """Return an island's handle, for other modules of this package."""
    return island._handle


def register_scheduler(island: Island, scheduler: object) -> object:
    """Save a scheduler with the island from now on; return its saved state, or None."""
    checkpointing = island._checkpointing
    return None if checkpointing is None else checkpointing.add_scheduler(scheduler)


def register_data(island: Island, data: object) -> None:
    """Save an island's data with it from now on, and restore its position."""
    if island._checkpointing is not None:
        island._checkpointing.add_data(data)


def _was_skipped(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a gradient scaler made this step do nothing.

    A scaler leaves out the call of `step` itself, unless the optimizer is fused: then
    it hands over `found_inf`, and the step's own kernel does nothing.
    """
    found_inf = vars(optimizer).get("found_inf")
    return found_inf is not None and bool(found_inf.item())


LENGTHS = (
    ("num_training_steps",),
    ("num_warmup_steps", "num_stable_steps", "num_decay_steps"),
)
"""Names of the steps of transformers' schedules."""


def length_of(scheduler: LRScheduler) -> int | None:
    """Return the length of a schedule in steps; None if it has no end.

    A plain function in a `LambdaLR` has no known length, and a `LinearLR` that
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
    """Warn if a schedule of fixed length is used in a run without an end."""
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
    """Yield the schedulers of an optimizer, which has no reference to them.

    All objects are searched, once per island. Only their types are read: an object that
    is half constructed, or a proxy, must not be touched.
    """
    for candidate in gc.get_objects():
        if issubclass(type(candidate), LRScheduler) and (
            vars(candidate).get("optimizer") is optimizer
        ):
            yield candidate


def _length_of_lambdas(lambdas: Iterable[object]) -> int | None:
    for function in lambdas:
        if not isinstance(function, functools.partial):
            continue
        arguments = function.keywords
        for names in LENGTHS:
            if all(name in arguments for name in names):
                return sum(int(arguments[name]) for name in names)
    return None


def _machine_of(modules: Sequence[torch.nn.Module]) -> str:
    """Return the device of a model and the version of torch, without a device sync."""
    parameters = (p for module in modules for p in module.parameters())
    device = next((p.device for p in parameters), torch.device("cpu"))
    is_cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if is_cuda else device.type
    return f"{name}, torch {torch.__version__}"
