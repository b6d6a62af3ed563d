"""Trainers of transformers and Lightning over rows that the run deals out."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from lightning import LightningModule
from lightning import Trainer as LightningTrainer
from torch.utils.data import DataLoader, TensorDataset

from atoll import RunEnded
from atoll.data import RunOrder, Spans
from atoll.exchange import MemoryRun
from atoll.integrations.lightning import IslandCallback as LightningCallback
from atoll.integrations.transformers import IslandCallback
from tests.integrations.tiny import tiny_model
from tests.torch.runs import run_of, together

pytestmark = [
    pytest.mark.torch,
    # torch tells Lightning of a name that it uses.
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    # Advice that depends on the machine, or on how few batches a test has.
    pytest.mark.filterwarnings("ignore:The .srun. command is available"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
]

ROWS, BATCH = 50, 4


def dealing_run(islands: int) -> MemoryRun:
    table = {"order": "run", "unit_rows": 4, "seed": 3}
    return run_of(islands, every=3, data=table)


def counted(run: MemoryRun) -> list[int]:
    """Return the rows of all counted updates."""
    order, rows = RunOrder(rows=ROWS, seed=3, is_shuffled=True), list[int]()
    with suppress(RunEnded):
        for number in count(1):
            outcome = run.outcome(0, number, wait_s=0.0)
            if outcome is None:
                break
            roster = outcome.agreed.header.roster
            assert roster is not None
            for entry in roster.counted:
                turns = [t for span in Spans.unpack(entry.spans) for t in range(*span)]
                rows += order.rows_at(np.array(turns, np.int64)).tolist()
    return rows


class Words(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Row n has n as its label of the first word; the other labels are ignored."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        words = torch.tensor([index % 32, 1, 2, 3])
        return {"input_ids": words, "labels": words, "position": torch.tensor(index)}


def train_transformers(folder: Path, run: Any, name: str, **given: Any) -> list[int]:
    """Train with the Trainer of transformers; return the rows of its batches."""
    seen: list[int] = []

    def collated(batch: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        return {key: torch.stack([row[key] for row in batch]) for key in batch[0]}

    class Trainer(transformers.Trainer):  # type: ignore[misc] # it is not typed
        def training_step(self, model: Any, inputs: Any, *more: Any) -> Any:
            seen.extend(inputs.pop("position").tolist())
            return super().training_step(model, inputs, *more)

    callback = IslandCallback(run, island=name)
    arguments = {
        "max_steps": 1000,
        "per_device_train_batch_size": BATCH,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "remove_unused_columns": False,
        **given,
    }
    trainer = Trainer(
        tiny_model(),
        transformers.TrainingArguments(str(folder / name), **arguments),
        train_dataset=Words(),
        data_collator=collated,
    )
    callback.attach(trainer)
    try:
        trainer.train()
    finally:
        callback.leave()
    return seen


class Curve(LightningModule):  # type: ignore[misc] # lightning is not typed
    """Keeps the rows that it has seen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Linear(1, 1)
        self.seen: list[int] = []

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        (numbers,) = batch
        self.seen += numbers.tolist()
        loss: torch.Tensor = self.net(numbers[:, None] / ROWS).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def train_lightning(folder: Path, run: Any, name: str, **given: Any) -> list[int]:
    """Train with the Trainer of Lightning; return the rows of its batches."""
    model = Curve()
    arguments = {"max_steps": 1000, "max_epochs": -1, **given}
    trainer = LightningTrainer(
        default_root_dir=folder / name,
        callbacks=[LightningCallback(run, island=name)],
        enable_checkpointing=False,
        logger=False,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        **arguments,
    )
    data = TensorDataset(torch.arange(ROWS))
    trainer.fit(model, DataLoader(data, batch_size=BATCH, shuffle=True))
    return model.seen


TRAINERS: dict[str, Callable[..., list[int]]] = {
    "transformers": train_transformers,
    "lightning": train_lightning,
}


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_trainer_ends_when_every_row_is_trained(tmp_path: Path, trainer: str) -> None:
    """In the run's order over the edges of its epochs, and the rosters list them."""
    run = dealing_run(1)
    seen = TRAINERS[trainer](tmp_path, run, "a")

    order = RunOrder(rows=ROWS, seed=3, is_shuffled=True)
    assert seen == order.rows_at(np.arange(ROWS)).tolist()
    assert sorted(counted(run)) == list(range(ROWS))


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_trainer_that_ends_early_leaves_its_rows_to_the_next(
    tmp_path: Path, trainer: str
) -> None:
    """What its loader had fetched ahead is trained by the other island, once."""
    run = dealing_run(1)
    first = TRAINERS[trainer](tmp_path, run, "a", max_steps=5)
    second = TRAINERS[trainer](tmp_path, run, "b")

    assert len(first) == 5 * BATCH
    assert sorted(first + second) == list(range(ROWS))
    assert sorted(counted(run)) == list(range(ROWS))


def test_two_trainers_share_a_pass(tmp_path: Path) -> None:
    """Two islands at the same time: each row is in one of them."""
    run = dealing_run(2)
    seen = together(
        lambda: train_lightning(tmp_path, run, "a"),
        lambda: train_lightning(tmp_path, run, "b"),
    )

    assert all(seen)
    assert sorted(seen[0] + seen[1]) == list(range(ROWS))
    assert sorted(counted(run)) == list(range(ROWS))
