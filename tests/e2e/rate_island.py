"""A torch loop under `atoll.torch.WSD`, as a process that tells its learning rates.

    python -m tests.e2e.rate_island URL NAME --folder FOLDER

Writes to FOLDER/NAME.json the rate that each step of the schedule was made with.
"""

from __future__ import annotations

import json
import time

import torch

import atoll.torch
from atoll import kernels
from tests.e2e.island_process import arguments

RATE, WARMUP, DECAY, REWARM = 0.01, 10, 40, 8


def main() -> None:
    said = arguments().parse_args()
    kernels.use("numpy")  # starts at once
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    rates: dict[int, float] = {}
    with atoll.torch.join(model, optimizer, said.url, island=said.name) as island:
        scheduler = atoll.torch.WSD(
            optimizer, island, warmup=WARMUP, decay=DECAY, rewarm_steps=REWARM
        )
        while True:
            rates[island.run_steps] = float(scheduler.get_last_lr()[0])
            model(torch.ones(4)).square().mean().backward()
            island.report(tokens=4)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            time.sleep(said.step_s)
    (said.folder / f"{said.name}.json").write_text(json.dumps(rates))


if __name__ == "__main__":
    main()
