"""A training loop with Accelerate as an island. It resumes after a kill.

atoll join URL --island west -- examples/accelerate_loop.py west
"""

import itertools
import sys

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers_trainer import make_dataset, make_model

import atoll.torch


def main(output: str) -> None:
    """Train until the run ends, then print the loss and the digest."""
    accelerator = Accelerator()
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, prepared = accelerator.prepare(model, optimizer)
    # Join with the bare optimizer: Accelerate's wrapper calls it once per inner step.
    with atoll.torch.join(model, optimizer, checkpoint=output) as island:
        dataloader = DataLoader(make_dataset(4096), batch_size=8, shuffle=True)
        dataloader = accelerator.prepare(atoll.torch.shard(dataloader, island))
        for batch in itertools.chain.from_iterable(itertools.repeat(dataloader)):
            loss = model(**batch).loss
            accelerator.backward(loss)
            island.report(tokens=batch["input_ids"].numel(), loss=loss)
            prepared.step()
            prepared.zero_grad()
    with island.evaluating(), torch.no_grad():
        input_ids = torch.stack([row["input_ids"] for row in make_dataset(64)])
        loss = model(input_ids=input_ids, labels=input_ids).loss
    print(f"loss {loss:.4f}, digest {island.digest}")


if __name__ == "__main__":
    main(sys.argv[1])
