"""`lightning.Trainer` as an island. Killed and started again, it goes on.

atoll join URL --island south -- examples/lightning_trainer.py south
"""

import sys

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader
from transformers_trainer import make_model, make_rows

from atoll.integrations.lightning import IslandCallback, newest


class Language(LightningModule):
    """The model of the other examples, so that they can share a run."""

    def __init__(self) -> None:
        super().__init__()
        self.model = make_model()

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        return self.model(**batch).loss

    def validation_step(self, batch: dict[str, torch.Tensor], index: int) -> None:
        self.log("loss", self.model(**batch).loss)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main(output: str) -> None:
    """Train until the run ends, and show what it has come to."""
    module, callback = Language(), IslandCallback(model="model")
    saves = ModelCheckpoint(output, every_n_train_steps=10)
    quiet = {"logger": False, "enable_progress_bar": False, "accelerator": "cpu"}
    trainer = Trainer(max_epochs=-1, callbacks=[callback, saves], **quiet)
    data = DataLoader(make_rows(4096), 8, shuffle=True)
    trainer.fit(module, data, ckpt_path=newest(output))
    (said,) = trainer.validate(module, DataLoader(make_rows(64), 8), verbose=False)
    print(f"loss {said['loss']:.4f}, digest {callback.island.digest}")


if __name__ == "__main__":
    main(sys.argv[1])
