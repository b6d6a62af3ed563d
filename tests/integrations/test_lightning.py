"""The real `lightning.Trainer`, as an island of a run in memory."""

from __future__ import annotations

import csv
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import DataLoader, TensorDataset

from atoll import kernels
from atoll.exchange import MemoryRun
from atoll.integrations.lightning import IslandCallback, newest
from atoll.torch import Island
from tests.torch.runs import bits, run_of

kernels.use("numpy")  # starts at once

pytestmark = [
    pytest.mark.torch,
    # torch tells Lightning of a name that it uses.
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    # Advice that depends on the machine, or on how few batches a test has.
    pytest.mark.filterwarnings("ignore:The .srun. command is available"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    # A life that goes on saves where the one before it has.
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists"),
    # Its rows are found again by the island, of which Lightning does not know.
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended"),
]


class Curve(LightningModule):  # type: ignore[misc] # lightning is not typed
    """Fits one curve, and keeps which rows it has seen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        linear = torch.nn.Linear
        self.net = torch.nn.Sequential(linear(1, 8), torch.nn.Tanh(), linear(8, 1))
        self.seen: list[int] = []

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        inputs, numbers = batch
        self.seen += numbers.tolist()
        return torch.nn.functional.mse_loss(self.net(inputs), inputs.sin())

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        self.log("loss", self.net(batch[0]).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def loader() -> DataLoader[Any]:
    points = torch.linspace(-3, 3, 32).unsqueeze(1)
    return DataLoader(
        TensorDataset(points, torch.arange(32)), batch_size=4, shuffle=True
    )


def run_to(rounds: int) -> MemoryRun:
    """Return a run whose anchor is never what an island has trained."""
    outer = {"optimizer": "nesterov", "lr": 0.7, "momentum": 0.5}
    return run_of(1, every=4, run={"end_rounds": rounds}, outer=outer)


def fit(
    folder: Path,
    run: Any,
    *callbacks: Callback,
    island: str = "a",
    resume: str | None = None,
    **arguments: Any,
) -> tuple[Curve, IslandCallback, Trainer]:
    """Train until the run or the trainer ends."""
    model, callback = Curve(), IslandCallback(run, island=island)
    given: dict[str, Any] = {
        "max_steps": 1000,
        "max_epochs": -1,
        "logger": False,
        "log_every_n_steps": 4,
        "accelerator": "cpu",
        "num_sanity_val_steps": 0,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        **arguments,
    }
    keeps = any(isinstance(each, ModelCheckpoint) for each in callbacks)
    trainer = Trainer(
        default_root_dir=folder,
        callbacks=[callback, *callbacks],
        enable_checkpointing=keeps,
        **given,
    )
    trainer.fit(model, loader(), DataLoader(loader().dataset, 8), ckpt_path=resume)
    return model, callback, trainer


def weights(model: torch.nn.Module) -> dict[str, bytes]:
    return {name: bits(value) for name, value in model.named_parameters()}


def anchor(callback: IslandCallback) -> dict[str, bytes]:
    assert callback.island is not None
    return {name: bits(value) for name, value in callback.island.anchor().items()}


def every(steps: int, folder: Path, **given: Any) -> ModelCheckpoint:
    return ModelCheckpoint(folder, every_n_train_steps=steps, save_top_k=-1, **given)


class AtStep(Callback):  # type: ignore[misc] # lightning is not typed
    """Does something before the batch of a step."""

    def __init__(self, step: int, act: Any) -> None:
        self._step, self._act = step, act

    def on_train_batch_start(self, trainer: Any, module: Any, *given: Any) -> None:
        if trainer.global_step == self._step:
            self._act(module)


class Broken(Exception):
    """What a machine that dies does to a training."""


def breaks(module: Any) -> None:
    raise Broken


def test_a_trainer_ends_with_its_run(tmp_path: Path) -> None:
    """It makes the run's inner steps, logs them, and ends with the anchor."""
    model, callback, trainer = fit(tmp_path, run_to(3), logger=CSVLogger(tmp_path))
    island = callback.island

    assert island is not None
    assert island.ended
    assert trainer.global_step == island.inner_steps == 12
    assert island.run_tokens == 12 * 4  # points have one token each
    assert weights(model) == anchor(callback)
    with next(tmp_path.rglob("metrics.csv")).open() as file:
        logged = [each["atoll/round"] for each in csv.DictReader(file)]
    assert [each for each in logged if each] == ["1", "2", "3"]


def test_an_inner_step_is_an_optimizer_step(tmp_path: Path) -> None:
    """Accumulated batches are one inner step, with all their tokens."""
    _, callback, trainer = fit(tmp_path, run_to(2), accumulate_grad_batches=2)
    island = callback.island

    assert island is not None
    assert trainer.global_step == island.inner_steps == 8
    assert island.run_tokens == 8 * 2 * 4


def test_a_step_that_a_scaler_skips_is_no_inner_step(tmp_path: Path) -> None:
    """Gradients that overflow in half precision train nothing, and count nothing."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30)
    plugin = MixedPrecision("16-mixed", "cpu", scaler=scaler)
    _, callback, trainer = fit(tmp_path, run_to(2), plugins=[plugin])

    assert callback.island is not None
    assert callback.island.inner_steps == 8
    assert trainer.global_step > 8
    assert callback.island.metrics()["atoll/updates_refused"] == 0


def test_the_anchor_is_validated_and_local_weights_come_back(tmp_path: Path) -> None:
    """Whoever looks during a validation sees the run's weights; training goes on."""
    seen: list[bool] = []
    trained: list[dict[str, bytes]] = []

    class Looks(Callback):  # type: ignore[misc] # lightning is not typed
        def on_validation_batch_start(self, trainer: Any, module: Any, *a: Any) -> None:
            island = next(e for e in trainer.callbacks if isinstance(e, IslandCallback))
            seen.append(weights(module) == anchor(island))

        def on_train_batch_end(self, trainer: Any, module: Any, *a: Any) -> None:
            trained.append(weights(module))

        def on_train_batch_start(self, trainer: Any, module: Any, *a: Any) -> None:
            if trained:
                assert weights(module) == trained[-1]

    fit(tmp_path, run_to(2), Looks(), val_check_interval=3)

    assert seen == [True] * len(seen)
    assert len(seen) >= 8
    assert len(trained) == 8


def test_a_broken_training_goes_on_with_what_it_had_learnt(tmp_path: Path) -> None:
    """A checkpoint holds the anchor; with its island it is the weights of that step."""
    run, at_save = run_to(3), dict[int, dict[str, bytes]]()

    class Keeps(Callback):  # type: ignore[misc] # lightning is not typed
        def on_train_batch_end(self, trainer: Any, module: Any, *a: Any) -> None:
            at_save[trainer.global_step] = weights(module)

    with pytest.raises(Broken):
        fit(tmp_path, run, Keeps(), every(6, tmp_path), AtStep(6, breaks))
    found = newest(tmp_path)
    assert found is not None
    saved = torch.load(found, weights_only=True)["state_dict"]
    begun: list[dict[str, bytes]] = []
    looks = AtStep(6, lambda module: begun.append(weights(module)))
    again = every(6, tmp_path)
    model, callback, trainer = fit(tmp_path, run, looks, again, resume=found)

    assert {name: bits(value) for name, value in saved.items()} != at_save[6]
    assert begun == [at_save[6]]
    assert callback.island is not None
    # Beyond step 6, with one round committed, two more windows of 4 inner steps.
    assert trainer.global_step == callback.island.inner_steps == 14
    assert weights(model) == anchor(callback)


def test_rows_go_on_within_an_epoch(tmp_path: Path) -> None:
    """What was trained before the checkpoint is not trained again after it."""
    run = run_to(5)
    with pytest.raises(Broken):
        fit(tmp_path, run, every(3, tmp_path), AtStep(3, breaks))
    whole, _, _ = fit(tmp_path / "whole", run_to(5), max_steps=8)
    resume, again = newest(tmp_path), every(3, tmp_path)
    model, _, _ = fit(tmp_path, run, again, resume=resume, max_steps=8)

    assert sorted(whole.seen) == list(range(32))
    assert len(model.seen) == 20
    assert len(set(model.seen)) == 20


def test_an_error_saves_the_island_that_it_ended(tmp_path: Path) -> None:
    """What Lightning saves on an exception has the island as it was then."""
    run = run_to(3)
    saves = every(100, tmp_path, save_on_exception=True)
    with pytest.raises(Broken):
        fit(tmp_path, run, saves, AtStep(6, breaks))
    again = every(100, tmp_path, save_on_exception=True)
    _, callback, trainer = fit(tmp_path, run, again, resume=newest(tmp_path))

    assert callback.island is not None
    assert trainer.global_step == callback.island.inner_steps == 14


def test_an_error_in_a_validation_waits_for_no_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The anchor is shown once, for the validation: to show it all ranks must meet."""
    shown: list[Island] = []
    evaluating = Island.evaluating

    def counted(island: Island) -> Any:
        shown.append(island)
        return evaluating(island)

    monkeypatch.setattr(Island, "evaluating", counted)

    class Breaks(Callback):  # type: ignore[misc] # lightning is not typed
        def on_validation_batch_start(self, *given: Any) -> None:
            raise Broken

    with pytest.raises(Broken):
        fit(tmp_path, run_to(3), Breaks(), val_check_interval=3)

    assert len(shown) == 1


def test_sigterm_saves_and_ends_the_process(tmp_path: Path) -> None:
    """It saves after the step that it came in, and the next life goes on there."""
    run = run_to(3)
    terminate = AtStep(5, lambda module: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SIGTERMException):
        fit(tmp_path, run, terminate)
    _, callback, trainer = fit(tmp_path, run, resume=newest(tmp_path))

    assert newest(tmp_path) == str(tmp_path / "island.ckpt")
    assert callback.island is not None
    assert callback.island.ended
    # Its farewell closed round 2 after 6 inner steps, and one round was left.
    assert trainer.global_step == callback.island.inner_steps == 10


def test_a_run_that_has_ended_gets_no_step(tmp_path: Path) -> None:
    """A trainer that is started again holds the run's weights, and trains nothing."""
    run = run_to(2)
    first, _, _ = fit(tmp_path / "first", run)
    again, _, trainer = fit(tmp_path / "again", run, island="b", min_steps=50)

    assert trainer.global_step == 0
    assert again.seen == []
    assert weights(again) == weights(first)
