"""One rank of an island that torchrun has started: `-m tests.e2e.sharded_island`.

Is given the kind of the island, its number, the run, its name, and a directory in which
each rank leaves what it came to. Without torchrun it is an island of one process.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from atoll import kernels
from tests.torch.rank_loops import train


def main(kind: str, number: str, run: str, name: str, folder: str) -> None:
    """Train until the run ends."""
    torch.set_num_threads(1)
    kernels.use("numpy")  # starts at once
    rank, ranks = int(os.environ.get("RANK", "0")), os.environ.get("WORLD_SIZE")
    if ranks is not None:
        dist.init_process_group("gloo")
    ended = train(rank, kind, int(ranks or "2"), int(number), run, name)
    (Path(folder) / f"{name}-{rank}.json").write_text(json.dumps(ended))
    if ranks is not None:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
