"""The island of a training loop.

It warns of schedules with a fixed length in a run without an end: a cosine that was
planned for 10 000 steps is at zero from there on, or begins to rise again, and a late
island that counts its own steps is at another position of it.
"""

from __future__ import annotations

import functools
import gc
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

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

from atoll.errors import AtollWarning, RunEnded, UsageError
from atoll.island.checkpoints import IslandCheckpoints, OnSave
from atoll.island.identity import island_seed
from atoll.island.signals import Interrupted, Termination
from atoll.settings import RunSettings
from atoll.torch.host import IslandHandle


@dataclass(frozen=True)
class Evaluation:
    """The anchor that is in the model while `evaluating`."""

    round: int
    """The lowest round over the fragments."""


class Island:
    """One island of a run. Use it as a context manager around the training loop."""

    def __init__(
        self,
        handle: IslandHandle,
        modules: Sequence[torch.nn.Module],
        counted: torch.optim.Optimizer | None,
        *,
        on_end: str,
        keeping: IslandCheckpoints | None = None,
    ) -> None:
        self._handle, self._modules = handle, modules
        self._keeping, self._on_save = keeping, OnSave()
        self._has_saved_at_end, self._saves = False, handle.saves
        self._on_end = on_end
        self._termination = Termination()
        handle.is_end_requested = lambda: self._termination.is_asked
        self._is_evaluating = False
        self._is_asked_to_save = False
        self._has_checked_schedule = False
        """Whether the schedule of the learning rate has been checked."""

        self._hook: RemovableHandle | None = None
        self._before: RemovableHandle | None = None
        if counted is not None:
            # Under torch.compile(optimizer.step) the hook would be traced as well.
            opaque = torch.compiler.disable(self._after_step)  # type: ignore[no-untyped-call]
            self._hook = counted.register_step_post_hook(opaque)
        if keeping is not None and counted is not None:
            before = torch.compiler.disable(self._before_step)  # type: ignore[no-untyped-call]
            self._before = counted.register_step_pre_hook(before)

    @property
    def name(self) -> str:
        """This island's name in the run."""
        return self._handle.name

    @property
    def slot(self) -> int:
        """A small number that belongs to the name for the duration of the run."""
        return self._handle.slot

    @property
    def place(self) -> tuple[int, int]:
        """The index of this process's share of the island's data, and their number.

        (0, 1) in an island of one process. Ranks that train on the same data, as those
        of tensor parallel or of a pipeline do, have the same place.
        """
        return self._handle.data_share

    @property
    def settings(self) -> RunSettings:
        """The run's settings, which all islands share."""
        return self._handle.settings

    @property
    def round(self) -> int:
        """The last round that every fragment has committed, as far as known here."""
        return self._handle.round

    @property
    def inner_steps(self) -> int:
        """Inner steps of this island since it joined, or as its checkpoint counts."""
        return self._handle.tally.inner_steps

    @property
    def run_steps(self) -> int:
        """The run's schedule step, which a late island takes over when it joins."""
        return self._handle.run_steps

    @property
    def run_tokens(self) -> int:
        """Tokens of all islands that have reached the anchor."""
        return self._handle.run_tokens

    @property
    def seed(self) -> int:
        """A seed that differs between islands, and is the same in every start."""
        return island_seed(self._handle.run, self.name)

    @property
    def digest(self) -> str:
        """A digest over the anchor and velocity, the same on every island."""
        return self._handle.digest

    @property
    def ended(self) -> bool:
        """Whether the run is over."""
        return self._handle.has_ended

    @property
    def should_stop(self) -> bool:
        """Whether the loop should end; with `on_end="flag"` this is the only signal.

        True when the run is over, and after a SIGTERM inside the `with` block.
        """
        return self._handle.has_ended or self._handle.must_stop

    def report(self, *, tokens: int = 0, loss: Any = None, **metrics: Any) -> None:
        """Report tokens and metrics of the coming inner step, without a device sync.

        Call it once per inner step, before `optimizer.step()`. Each rank of an island
        reports its own: tokens of ranks with different data are added up, and metrics
        are the leader's.
        """
        plain = {name: _detached(value) for name, value in metrics.items()}
        self._handle.tally.note_report(
            tokens, _detached(loss), plain, count="batch.numel(), not a tensor"
        )
        self._finish_saving()
        self._handle.count_tokens(tokens)

    def metrics(self) -> dict[str, float]:
        """Return this island's counters and the values of its last report.

        Reads a reported tensor's value, which may wait for a device.
        """
        reported = {
            f"atoll/{name}": float(value)
            for name, value in self._handle.tally.reported.items()
        }
        return {
            "atoll/round": self.round,
            "atoll/run_steps": self.run_steps,
            "atoll/run_tokens": self.run_tokens,
            **self._handle.metrics(),
            **reported,
        }

    def stepped(self) -> None:
        """Count one inner step by hand: for `count="manual"`.

        Raises:
            RunEnded: the run is over, and `on_end` is "raise".
        """
        if self._hook is not None:
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

    def leave(self) -> None:
        """Leave the run; work that has not counted goes with departing updates."""
        self._require_local()
        self._remove_hook()
        if self._keeping is not None and not self._handle.has_left:
            self._keeping.leave()
        self._handle.leave(depart=True, is_alone=False)
        self._close_keeping()

    def on_save(self, function: Callable[[], object]) -> None:
        """Register a function that is called whenever this island is to save.

        That is on an operator's request, and after SIGTERM before the island leaves:
        between two inner steps, in the training thread.
        """
        self._on_save.add(function)

    def anchor(self) -> dict[str, torch.Tensor]:
        """Return the agreed weights by name, on the CPU and in fp32.

        In an island of several ranks all call it: the leader gets the weights of all
        ranks, 4 bytes for each parameter, and the others get none.
        """
        return self._handle.anchor()

    @contextmanager
    def evaluating(self) -> Iterator[Evaluation]:
        """Put the newest anchor into the model, and restore everything on exit.

        With overlap the anchor may be a round ahead of the local weights.
        """
        self._require_local()
        self._is_evaluating = True
        parts = [part for module in self._modules for part in module.modules()]
        modes = [(part, part.training) for part in parts]
        buffers = [(b, b.clone()) for module in self._modules for b in module.buffers()]
        local = self._handle.keep_local()
        try:
            yield Evaluation(round=self._handle.load_anchor())
        finally:
            for buffer, saved in buffers:
                buffer.copy_(saved)
            self._handle.restore_local(local)
            for module, is_training in modes:
                module.training = is_training
            self._is_evaluating = False

    def __enter__(self) -> Self:
        self._termination.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        self._termination.heed()
        self._remove_hook()
        # Work before an error may have caused it: then only sealed updates count.
        departs = error is None or not isinstance(error, Exception)
        departs = departs or isinstance(error, RunEnded)
        is_alone = error is not None and not isinstance(error, RunEnded)
        try:
            if self._keeping is not None and departs and not self._handle.has_left:
                self._keeping.leave()
            if self._returns:
                self._handle.pause()
            else:
                self._handle.leave(depart=departs, is_alone=is_alone)
            self._close_keeping(is_broken=is_alone and not departs)
        finally:  # a SIGTERM while leaving does not interrupt it
            self._termination.__exit__(kind, error, trace)
        return isinstance(error, RunEnded | Interrupted)

    @property
    def _returns(self) -> bool:
        """Whether this incarnation is interrupted, and the next resumes exactly."""
        is_exact = self._keeping is not None and self._keeping.is_exact
        return is_exact and self._has_saved_at_end and not self._handle.has_ended

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: object, kwargs: object
    ) -> None:
        self._finish_saving()

    def _finish_saving(self) -> None:
        """Finish a checkpoint, and end the loop if it was the last one."""
        if self._keeping is None or not self._keeping.is_unfinished:
            return
        self._keeping.finish()
        if self._is_asked_to_save:
            self._is_asked_to_save = False
            self._tell_savers()
            self._raise_if_ended()

    def _close_keeping(self, *, is_broken: bool = False) -> None:
        if self._keeping is not None:
            keeping, self._keeping = self._keeping, None
            keeping.abandon() if is_broken else keeping.close()

    def _save_if_asked(self) -> None:
        """Save on an operator's request, and once before the island ends."""
        is_last = self._handle.must_stop and not self._has_saved_at_end
        is_wanted = self._handle.saves > self._saves
        self._saves = self._handle.saves  # a restarted coordinator counts from 0
        if not is_last and not is_wanted:
            return
        self._has_saved_at_end |= is_last
        if self._keeping is not None:
            self._keeping.save_last()
        if not self._waits_for_loop:
            self._tell_savers()
        else:
            self._is_asked_to_save = True

    @property
    def _waits_for_loop(self) -> bool:
        """Whether the loop has not finished its own work after the inner step."""
        return self._keeping is not None and self._keeping.is_unfinished

    def _tell_savers(self) -> None:
        if self._keeping is not None:
            self._keeping.wait()
        self._on_save()

    def _after_step(
        self, optimizer: torch.optim.Optimizer, args: object, kwargs: object
    ) -> None:
        if not self._has_checked_schedule:
            self._has_checked_schedule = True
            warn_of_fixed(optimizer, self.settings)
        if not _was_skipped(optimizer):
            self._stepped()

    def _require_local(self) -> None:
        if self._is_evaluating:
            raise UsageError(
                "The model holds the anchor while it is evaluated. "
                "Leave the evaluating() block before training, syncing or leaving."
            )

    def _stepped(self) -> None:
        self._require_local()
        self._handle.stepped()
        if self._handle.must_stop:
            self._termination.heed()  # from here on saving may take long
        if self._keeping is not None and not self._handle.has_ended:
            self._keeping.stepped()
        self._save_if_asked()
        if not (self._has_saved_at_end and self._waits_for_loop):
            self._raise_if_ended()

    def _raise_if_ended(self) -> None:
        if not self.should_stop or self._on_end != "raise":
            return
        if self._handle.has_ended:
            raise RunEnded(f"The run has reached its last round, {self.round}.")
        raise RunEnded("SIGTERM came: this island leaves the run.")

    def _remove_hook(self) -> None:
        for hook in (self._hook, self._before):
            if hook is not None:
                hook.remove()


def handle_of(island: Island) -> IslandHandle:
    """Return an island's handle, for other modules of this package."""
    return island._handle


def register_scheduler(island: Island, scheduler: object) -> object:
    """Save a scheduler with the island from now on; return its saved state, or None."""
    keeping = island._keeping
    return None if keeping is None else keeping.add_scheduler(scheduler)


def register_data(island: Island, data: object) -> None:
    """Save an island's data with it from now on, and restore its position."""
    if island._keeping is not None:
        island._keeping.add_data(data)


def _detached(value: Any) -> Any:
    """Return the value without the graph that made it, which would stay in memory."""
    return value.detach() if isinstance(value, torch.Tensor) else value


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
