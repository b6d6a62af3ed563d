"""`lightning.Trainer` as an island: the hooks of a run.

The trainer steps, logs, validates and saves as always. The model holds the local
weights while it is trained, and the anchor while it is validated; a checkpoint file
holds the anchor as its weights, and the island as this callback's state. Arrays are
tensors there, so that `weights_only=True` loads them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DistributedSampler, RandomSampler, SequentialSampler

from atoll.errors import UsageError
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
from atoll.island.saved_state import SavedIsland, from_tree
from atoll.torch import Island
from atoll.torch.trainer_hooks import SavedIncarnation, TrainerSession, open_session

SAVED_ON_DEMAND = "island.ckpt"
"""The file of a save that the run requested, or that a signal or its end caused."""

_SAMPLERS = (RandomSampler, SequentialSampler, DistributedSampler)


def newest(directory: str | Path) -> str | None:
    """Return the checkpoint file that was written last; None if there is none.

    For `trainer.fit(model, ckpt_path=newest(directory))`.
    """
    files = [path for path in Path(directory).glob("**/*.ckpt") if path.is_file()]
    last = max(files, key=lambda path: path.stat().st_mtime_ns, default=None)
    return None if last is None else str(last)


class IslandCallback(Callback):
    """Makes a `lightning.Trainer` one island of a run.

    It joins when the training begins, and leaves when it ends: at the run's end, at
    `max_steps`, or by SIGTERM, for which it saves first. Afterwards the model holds the
    anchor.

    Args:
        run: as `atoll.torch.join` takes it; None reads ATOLL_RUN.
        island: this island's name; None reads ATOLL_ISLAND.
        model: the attribute of the LightningModule that is the run's model; None takes
            the whole module. Islands of one run have the same names of parameters.
        shard: whether to read only this island's rows of a map-style dataset: those
            that the run deals to it, or its share by number.
        tokens: counts the tokens of a batch; None counts those of its first tensor.
    """

    def __init__(
        self,
        run: MemoryRun | CollectiveRun | str | None = None,
        *,
        island: str | None = None,
        model: str | None = None,
        shard: bool = True,
        tokens: Callable[[Any], int] | None = None,
    ) -> None:
        self._run, self._name, self._shard = run, island, shard
        self._model = model
        self._tokens_of = tokens or tokens_of
        self._session: TrainerSession | None = None
        self._saved: SavedIsland | None = None
        self._is_resumed = self._wants_save = False
        self._rows: RunRows | None = None
        """The rows that the run deals out, if it does."""

        self._last_state: dict[str, Any] = {}
        self._tokens, self._losses = 0, list[torch.Tensor]()

    @property
    def island(self) -> Island | None:
        """The island, once the training has begun."""
        return None if self._session is None else self._session.island

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the island of the checkpoint that the trainer resumes from."""
        self._saved = island_of(state_dict)

    def state_dict(self) -> dict[str, Any]:
        """Return the island's state; after it left, its last one."""
        session = self._session
        if session is None or session.has_left:
            return self._last_state
        is_shown = session.shows_anchor
        session.show_local()
        state = state_of(session)
        if is_shown:
            session.show_anchor()
        return state

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Remember that the optimizer is restored."""
        self._is_resumed = True

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Save the run's weights instead of one island's."""
        session = self._session
        if session is None or session.has_left or "state_dict" not in checkpoint:
            return
        is_shown = session.shows_anchor
        session.show_anchor()
        weights = trainer.strategy.lightning_module_state_dict()
        checkpoint["state_dict"] = {
            name: value.clone() if isinstance(value, torch.Tensor) else value
            for name, value in weights.items()
        }
        if not is_shown:
            session.show_local()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Join, after the trainer has built and restored everything."""
        model = _model(trainer, pl_module, self._model)
        if self._session is not None:
            self._session.leave()
        past = SavedIncarnation(
            Path(_directory(trainer)), self._saved, is_resumed=self._is_resumed
        )
        optimizers = list(trainer.optimizers)
        session = open_session(
            model, optimizers, self._run, island=self._name, past=past
        )
        self._session, self._wants_save = session, False
        self._saved, self._is_resumed = None, False
        # Lightning handles SIGTERM, and the island polls Lightning for it.
        session.ask_to_end_when(lambda: trainer.received_sigterm)
        session.island.on_save(self._want_save)
        if session.island.ended:
            _stop(trainer)
        elif self._shard:
            self._deal(trainer, session.island)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Count the tokens of a batch, and its rows."""
        if self._rows is not None:
            self._rows.note_batch()
        self._tokens += self._tokens_of(batch)

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor
    ) -> None:
        """Keep the loss, which is a batch's share of the mean over the inner step."""
        self._losses.append(loss.detach().float())

    def on_before_optimizer_step(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        """Report the tokens and the loss of the coming inner step."""
        island = self.island
        if island is None:
            return
        loss = torch.stack(self._losses).sum() if self._losses else None
        island.report(tokens=self._tokens, loss=loss)
        self._tokens, self._losses = 0, []

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Log, stop and save as the run requests."""
        session = self._session
        assert session is not None
        session.note_step()
        if trainer.global_step % trainer.log_every_n_steps == 0:
            for logger in trainer.loggers:
                logger.log_metrics(session.island.metrics(), step=trainer.global_step)
        # Of several ranks only some may have the signal: all of them save together.
        has_signal = trainer.received_sigterm and trainer.world_size == 1
        is_out_of_rows = self._rows is not None and self._rows.is_over
        if session.island.should_stop or is_out_of_rows:
            _stop(trainer)
        is_last = session.island.ended and trainer.checkpoint_callback is not None
        if self._wants_save or has_signal or is_last:
            self._wants_save = False
            trainer.save_checkpoint(Path(_directory(trainer)) / SAVED_ON_DEMAND)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop when the run's rows have ended with an epoch: the next one is empty."""
        if self._rows is not None and self._rows.is_over:
            _stop(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Validate the run's weights."""
        if self._session is not None:
            self._session.show_anchor()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the local weights back, to train."""
        if self._session is not None:
            self._session.show_local()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave; a later save holds the last state of the island."""
        self._leave()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Leave, and publish no work that an error may have spoilt."""
        self._leave(exception)

    def _leave(self, error: BaseException | None = None) -> None:
        session = self._session
        if session is None or session.has_left:
            return
        try:
            # Permanently: showing the anchor again would be a collective call.
            session.show_local()
            self._last_state = state_of(session)
        finally:
            session.leave(error)

    def _deal(self, trainer: Trainer, island: Island) -> None:
        """Make the trainer's loaders read the rows of this rank only."""
        loop = trainer.fit_loop
        loaders = loop._combined_loader.flattened if loop._combined_loader else []
        for loader in loaders:
            if not can_be_dealt(loader, _SAMPLERS):
                warn_of_same_rows(loader, island)
                continue
            if island.settings.data.is_dealt:
                self._rows = deal_run_rows(loader, island)
            else:
                self._deal_share(trainer, loader, island)
            if loader.num_workers and loop._data_fetcher is not None:
                iter(loop._data_fetcher)  # its workers have started with other rows

    def _deal_share(self, trainer: Trainer, loader: Any, island: Island) -> None:
        """Make a loader read the share of the rows that the island's number has."""
        sampler = innermost(loader.batch_sampler).sampler
        shuffles = not isinstance(sampler, SequentialSampler)
        if isinstance(sampler, DistributedSampler):
            shuffles = sampler.shuffle
        rows = deal_rows(loader, island, shuffles=shuffles)
        rows.set_epoch(trainer.current_epoch)
        # Lightning resumes its count within an epoch, but restarts its loader.
        ready = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        rows.skip_once(ready * _size(loader))

    def _want_save(self) -> None:
        self._wants_save = True


def _model(trainer: Trainer, module: LightningModule, part: str | None) -> Any:
    """Return the model that joins: as the strategy wrapped it, or one attribute."""
    if part is None:
        return trainer.strategy.model
    submodule = module.get_submodule(part)
    if trainer.world_size > 1:
        raise UsageError(
            f"model={part!r} is a part of the module that {trainer.world_size} ranks "
            "train together. Join with the whole LightningModule on every island."
        )
    return submodule


def _directory(trainer: Trainer) -> str:
    """Return the directory of the trainer's checkpoints."""
    callback = trainer.checkpoint_callback
    directory = None if callback is None else vars(callback).get("dirpath")
    return str(directory or trainer.default_root_dir)


def _stop(trainer: Trainer) -> None:
    """End the training before the trainer's own minimum: the run is over."""
    trainer.should_stop = True
    trainer.fit_loop.min_epochs = None
    trainer.fit_loop.epoch_loop.min_steps = None


def _size(loader: Any) -> int:
    size = innermost(loader.batch_sampler).batch_size
    if not isinstance(size, int):
        raise UsageError(
            f"A loader with batch_size={size!r} cannot be resumed. Give it an integer."
        )
    return size


def state_of(session: TrainerSession) -> dict[str, Any]:
    """Return the island's state for a checkpoint file; the weights must be local."""
    with session.part() as part:
        state = _as_tensors(part.tree)
    assert isinstance(state, dict)
    return state


def island_of(state: Mapping[str, Any]) -> SavedIsland | None:
    """Return the island that a checkpoint file holds; None if it holds none.

    Raises:
        CorruptError: the state is not from `state_of`.
    """
    return from_tree(_as_arrays(state)) if state else None


def _as_tensors(value: Any) -> Any:
    """Return a tree with copies of its arrays, as tensors."""
    match value:
        case np.ndarray():
            return torch.from_numpy(value.copy())
        case dict():
            return {key: _as_tensors(item) for key, item in value.items()}
        case list() | tuple():
            return type(value)(_as_tensors(item) for item in value)
        case np.generic():
            return value.item()
        case _:
            return value


def _as_arrays(value: Any) -> Any:
    match value:
        case torch.Tensor():
            return value.detach().cpu().numpy()
        case Mapping():
            return {key: _as_arrays(item) for key, item in value.items()}
        case list() | tuple():
            return type(value)(_as_arrays(item) for item in value)
        case _:
            return value
