"""`transformers.Trainer` as an island: the events of a trainer in a run.

The trainer steps, logs, evaluates and saves as always. The model holds the local
weights from the beginning of a step to its end, and the anchor while the trainer
evaluates or saves in between; so its checkpoints hold the run's weights, never one
island's own.
"""

from __future__ import annotations

import atexit
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from accelerate.data_loader import BatchSamplerShard, SeedableRandomSampler
from accelerate.optimizer import AcceleratedOptimizer
from torch.utils.data import RandomSampler, SequentialSampler
from transformers import (
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_utils import SaveStrategy

from atoll.errors import AtollWarning, UsageError
from atoll.exchange import CollectiveRun, MemoryRun
from atoll.integrations.data import (
    RunRows,
    can_be_dealt,
    deal_rows,
    deal_run_rows,
    innermost,
    tokens_of,
    warn_of_same_rows,
)
from atoll.integrations.transformers.checkpoint import (
    find_part,
    forget_part,
    last_number,
    save_part,
)
from atoll.island.signals import Interrupted
from atoll.torch import Island
from atoll.torch.join import is_perhaps_spread
from atoll.torch.trainer_hooks import SavedIncarnation, TrainerSession, open_session

_SHUFFLES = {SeedableRandomSampler: True, RandomSampler: True, SequentialSampler: False}


class IslandCallback(TrainerCallback):
    """Makes a `transformers.Trainer` one island of a run: see `attach`.

    The island joins when the training begins, and leaves when it ends: at the run's
    end, at `max_steps`, or by SIGTERM, for which the trainer saves first. Afterwards
    the model holds the anchor.

    Args:
        run: as `atoll.torch.join` takes it; None reads ATOLL_RUN.
        island: this island's name; None reads ATOLL_ISLAND.
        shard: whether to read only this island's rows of a map-style dataset: those
            that the run deals to it, or its share by number.
    """

    def __init__(
        self,
        run: MemoryRun | CollectiveRun | str | None = None,
        *,
        island: str | None = None,
        shard: bool = True,
    ) -> None:
        self._run, self._name, self._shard = run, island, shard
        self._first = _First(self)
        self._trainer: Trainer | None = None
        self._session: TrainerSession | None = None
        self._batches: Batches | None = None
        self._rows: RunRows | None = None
        """The rows that the run deals out, if it does."""

        self._wants_save = self._is_over = False
        self._number = 0

    @property
    def island(self) -> Island | None:
        """The island, once the training has begun."""
        return None if self._session is None else self._session.island

    def attach(self, trainer: Trainer) -> None:
        """Train `trainer` as the island. Call this before `trainer.train()`.

        Adds the callback to the trainer, before its other callbacks: the island has
        joined when they see the training begin. Safe to repeat; a second trainer
        replaces the first.
        """
        self._trainer = trainer
        handler = trainer.callback_handler
        if self not in handler.callbacks:
            handler.callbacks.insert(0, self)

    def leave(self, error: BaseException | None = None) -> None:
        """Leave the run after a training that was broken off. Safe to repeat.

        A trainer reports no errors to its callbacks. If you catch one and continue,
        call this; a process that exits leaves by itself. Work since the last seal is
        not published: an error may have spoilt it.
        """
        session = self._session
        if session is not None and not session.has_left:
            kind = Interrupted if self._is_asked_to_end() else UsageError
            session.leave(error or kind("The training was broken off."))
        self._stop_counting()

    def train_on(self) -> None:
        """Put the local weights back into the model, if it was evaluated or saved."""
        if self._session is not None:
            self._session.show_local()

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Join, after the trainer has built and restored everything."""
        if state.is_hyper_param_search:
            raise UsageError(
                "A search for hyperparameters trains many models, and a run trains "
                "one. Leave IslandCallback out of it."
            )
        trainer, directory = self._attached(state), Path(args.output_dir)
        _require_together(trainer, self._run)
        self.leave()
        past = SavedIncarnation(
            directory, find_part(state, directory), is_resumed=state.global_step > 0
        )
        self._number = last_number(directory)
        session = open_session(
            trainer.model_wrapped,
            [_unwrapped(trainer.optimizer)],
            self._run,
            island=self._name,
            past=past,
        )
        self._session = session
        atexit.register(self._leave_at_exit)
        try:
            self._begin(trainer, session)
        except BaseException as exc:
            self.leave(exc)
            raise
        if args.eval_on_start:
            session.show_anchor()

    def on_pre_optimizer_step(
        self, *args: Any, optimizer: torch.optim.Optimizer, **kwargs: Any
    ) -> None:
        """Report the tokens and the loss of the coming inner step."""
        assert self._session is not None
        assert self._batches is not None
        tokens, loss = self._batches.pop()
        if not self._is_over:
            self._session.island.report(tokens=tokens, loss=loss)
            return
        # The trainer makes a step before it looks whether it is to stop. An optimizer
        # does nothing to a parameter without a gradient.
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> TrainerControl:
        """Stop, save and evaluate as the run requests, and as the trainer would."""
        assert self._session is not None
        if self._is_over:
            state.global_step -= 1
            _clear_requests(control)
            control.should_training_stop = True
            return control
        self._session.note_step()
        island = self._session.island
        control.should_save |= self._wants_save
        if self._rows is not None and self._rows.is_over:
            control.should_training_stop = True
        if island.should_stop:
            control.should_training_stop = True
            control.should_save |= args.save_strategy != SaveStrategy.NO
            # After a signal there is no time to evaluate, and save_strategy="best"
            # would skip the save after an evaluation that is not the best.
            control.should_evaluate &= island.ended
        self._prepare_weights(args, state, control)
        return control

    def on_epoch_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> TrainerControl:
        """Do as after a step."""
        if self._is_over or self._is_asked_to_end():
            _clear_requests(control)
        if self._rows is not None and self._rows.is_over:
            control.should_training_stop = True
        self._prepare_weights(args, state, control)
        return control

    def on_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Warn if the evaluated weights were not the anchor."""
        session = self._session
        if session is not None and not session.has_left and not session.shows_anchor:
            warnings.warn(
                "The local weights of one island were evaluated, not the anchor. "
                "Evaluate by eval_strategy, or by a callback's should_evaluate.",
                AtollWarning,
                stacklevel=2,
            )

    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Add the island to the trainer's checkpoint."""
        if self._session is None or self._session.has_left:
            return
        self.train_on()
        self._number += 1
        save_part(
            self._session,
            _path(args, state),
            state,
            number=self._number,
            is_leader=args.process_index == 0,
        )
        self._wants_save = False

    def on_log(self, *args: Any, logs: dict[str, float], **kwargs: Any) -> None:
        """Leave at the training's last log: afterwards it may load the best model."""
        if "train_runtime" in logs:
            self._finish()

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """Leave, if that has not happened yet."""
        self._finish()

    def _attached(self, state: TrainerState) -> Trainer:
        """Return the attached trainer, if it is the one that calls this callback."""
        if self._trainer is None or self._trainer.state is not state:
            raise UsageError(
                "IslandCallback is not attached to the trainer that trains. Call "
                "callback.attach(trainer) before trainer.train()."
            )
        return self._trainer

    def _begin(self, trainer: Trainer, session: TrainerSession) -> None:
        model, args = trainer.model, trainer.args
        assert isinstance(model, torch.nn.Module)
        scale = args.world_size if args.average_tokens_across_devices else 1
        self._wants_save, self._is_over = False, session.island.ended
        session.island.on_save(self._want_save)
        _arrange(trainer, self._first, self)
        self._rows = None
        if self._shard and not self._is_over:
            loader = trainer.callback_handler.train_dataloader
            self._rows = _deal(loader, session.island)
        if self._rows is not None:
            args.ignore_data_skip = True  # the run knows which rows are left
        self._batches = Batches(
            model, scale=scale, is_over=self._is_over, rows=self._rows
        )

    def _prepare_weights(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl
    ) -> None:
        """Put the anchor into the model if the trainer is to evaluate or to save."""
        session = self._session
        if session is None or not (control.should_evaluate or control.should_save):
            return
        if args.process_index == 0 and control.should_save:
            forget_part(_path(args, state))
        session.show_anchor()

    def _want_save(self) -> None:
        self._wants_save = True

    def _is_asked_to_end(self) -> bool:
        island = self.island
        return island is not None and island.should_stop and not island.ended

    def _finish(self) -> None:
        if self._session is not None:
            self._session.leave()
        self._stop_counting()

    def _leave_at_exit(self) -> None:
        # The pool of a store may be shut down by now: then the lease runs out instead.
        with suppress(RuntimeError):
            self.leave()

    def _stop_counting(self) -> None:
        atexit.unregister(self._leave_at_exit)
        if self._batches is not None:
            self._batches.close()
            self._batches = None


class Batches:
    """Adds up tokens and losses of the batches that one inner step is made of.

    A forward hook counts them, because callbacks do not get the batches.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        scale: float,
        is_over: bool,
        rows: RunRows | None = None,
    ) -> None:
        self._rows, self._scale = rows, scale
        """Factor of a loss that is one process's share of the mean over all tokens."""

        self._is_over = is_over
        """Whether the run is over, so that no step of the trainer counts."""

        self._tokens, self._losses = 0, list[torch.Tensor]()
        self._is_share = False
        # Under torch.compile the hook would be traced as well.
        opaque = torch.compiler.disable(self._after_forward)  # type: ignore[no-untyped-call]
        self._hook = model.register_forward_hook(opaque, with_kwargs=True)

    def close(self) -> None:
        """Remove the hook."""
        self._hook.remove()

    def pop(self) -> tuple[int, torch.Tensor | None]:
        """Return tokens and loss since the last call, without a device sync."""
        tokens, losses = self._tokens, self._losses
        self._tokens, self._losses = 0, []
        if not losses:
            return tokens, None
        total = torch.stack(losses).sum()
        return tokens, total * self._scale if self._is_share else total / len(losses)

    def _after_forward(
        self, module: torch.nn.Module, args: Any, kwargs: dict[str, Any], output: Any
    ) -> None:
        if not module.training or not torch.is_grad_enabled():
            return
        if self._is_over and isinstance(output, dict) and "loss" in output:
            output["loss"] = output["loss"] * 0.0  # it must not be reported either
            return
        if self._rows is not None:
            self._rows.note_batch()
        self._tokens += tokens_of(kwargs or args)
        # With the number of all items a loss is its batch's share, else it is a mean.
        self._is_share = "num_items_in_batch" in kwargs
        loss = output.get("loss") if isinstance(output, dict) else None
        if isinstance(loss, torch.Tensor):
            self._losses.append(loss.detach().float())


class _First(TrainerCallback):
    """The callback that runs before all others."""

    def __init__(self, callback: IslandCallback) -> None:
        self._callback = callback

    def on_epoch_begin(self, *args: Any, **kwargs: Any) -> None:
        self._callback.train_on()

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._callback.train_on()

    def on_epoch_end(self, *args: Any, **kwargs: Any) -> None:
        self._callback.train_on()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float],
        **kwargs: Any,
    ) -> None:
        """Add the island's metrics to the log."""
        island = self._callback.island
        if island is not None:
            metrics = island.metrics()
            logs.update(metrics)
            state.log_history[-1].update(metrics)


def _require_together(trainer: Trainer, run: object) -> None:
    """Refuse processes that a launcher has started together and that train alone.

    Each of them would join under the same name.
    """
    is_world = torch.distributed.is_available() and torch.distributed.is_initialized()
    count = torch.distributed.get_world_size() if is_world else 1
    if count == 1 or isinstance(run, CollectiveRun):
        return
    if not is_perhaps_spread(trainer.model_wrapped):
        raise UsageError(
            f"{count} processes were started together, and the trainer of each trains "
            "alone. On processors it needs use_cpu=True to train with the others."
        )


def _arrange(trainer: Trainer, first: TrainerCallback, last: TrainerCallback) -> None:
    """Put `first` before the other callbacks, and `last` after them.

    So the others see the metrics of `first`, and `last` sees their requests. The list
    is a new one because the trainer is iterating over the old one.
    """
    handler = trainer.callback_handler
    others = [
        callback for callback in handler.callbacks if callback not in (first, last)
    ]
    handler.callbacks = [first, *others, last]


def _deal(loader: Any, island: Island) -> RunRows | None:
    """Make the trainer's loader read the rows of this rank only.

    Return the sampler if the run deals them out.
    """
    if not can_be_dealt(loader, tuple(_SHUFFLES)):
        warn_of_same_rows(loader, island)
        return None
    shuffles = _SHUFFLES[type(innermost(loader.batch_sampler).sampler)]
    ranks = 1
    if isinstance(dealt := loader.batch_sampler, BatchSamplerShard):
        # Every rank has its own rows then, so it reads all batches of its sampler.
        ranks, dealt.num_processes, dealt.process_index = dealt.num_processes, 1, 0
    if island.settings.data.is_dealt:
        return deal_run_rows(loader, island, ranks=ranks)
    deal_rows(loader, island, shuffles=shuffles, ranks=ranks)
    return None


def _unwrapped(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer whose steps are real, inside Accelerate's."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    assert isinstance(optimizer, torch.optim.Optimizer)
    return optimizer


def _clear_requests(control: TrainerControl) -> None:
    control.should_log = control.should_evaluate = control.should_save = False


def _path(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"
