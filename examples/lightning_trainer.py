"""`lightning.Trainer` as an island. It resumes after a kill.

atoll join URL --island south -- examples/lightning_trainer.py south
"""

import sys

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader
from transformers_trainer import make_dataset, make_model

from atoll.integrations.lightning import IslandCallback, newest


class LanguageModel(LightningModule):
    """The model of the other trainer examples, so that they can share a run."""

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
    """Train until the run ends, then print the loss and the digest."""
    module, callback = LanguageModel(), IslandCallback(model="model")
    checkpoints = ModelCheckpoint(output, every_n_train_steps=10)
    options = {"logger": False, "enable_progress_bar": False, "accelerator": "cpu"}
    trainer = Trainer(max_epochs=-1, callbacks=[callback, checkpoints], **options)
    dataloader = DataLoader(make_dataset(4096), 8, shuffle=True)
    trainer.fit(module, dataloader, ckpt_path=newest(output))
    (results,) = trainer.validate(
        module, DataLoader(make_dataset(64), 8), verbose=False
    )
    print(f"loss {results['loss']:.4f}, digest {callback.island.digest}")


if __name__ == "__main__":
    main(sys.argv[1])
