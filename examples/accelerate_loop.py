"""A loop with Accelerate as an island. Killed and started again, it goes on.

atoll join URL --island west -- examples/accelerate_loop.py west
"""

import itertools
import sys

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers_trainer import make_model, make_rows

import atoll.torch


def main(output: str) -> None:
    """Train until the run ends, and show what it has come to."""
    accelerator = Accelerator()
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, wrapped = accelerator.prepare(model, optimizer)
    # Inner steps are counted where they are made: inside Accelerate's optimizer.
    with atoll.torch.join(model, optimizer, checkpoint=output) as island:
        loader = DataLoader(make_rows(4096), batch_size=8, shuffle=True)
        loader = accelerator.prepare(atoll.torch.shard(loader, island))
        for batch in itertools.chain.from_iterable(itertools.repeat(loader)):
            loss = model(**batch).loss
            accelerator.backward(loss)
            island.report(tokens=batch["input_ids"].numel(), loss=loss)
            wrapped.step()
            wrapped.zero_grad()
    with island.evaluating(), torch.no_grad():
        rows = torch.stack([row["input_ids"] for row in make_rows(64)])
        loss = model(input_ids=rows, labels=rows).loss
    print(f"loss {loss:.4f}, digest {island.digest}")


if __name__ == "__main__":
    main(sys.argv[1])
