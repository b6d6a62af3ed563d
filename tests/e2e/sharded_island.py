"""One rank of an island that torchrun has started: `-m tests.e2e.sharded_island`.

Is given the kind of the island, its number, the run, its name, and a directory in which
each rank leaves what it came to. Without torchrun it is an island of one process.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from atoll import kernels
from tests.torch.rank_loops import train, train_pipeline

RANKS = 2
HIDDEN = 8
"""Two tensor-parallel ranks divide it."""


def main(kind: str, number: str, run: str, name: str, folder: str) -> None:
    """Train until the run ends."""
    torch.set_num_threads(1)
    kernels.use("numpy")  # starts at once
    rank, is_several = int(os.environ.get("RANK", "0")), "WORLD_SIZE" in os.environ
    if is_several:
        dist.init_process_group("gloo")
    ended = live(rank, kind, int(number), run, name)
    (Path(folder) / f"{name}-{rank}.json").write_text(json.dumps(ended))
    if is_several:
        dist.destroy_process_group()


def live(rank: int, kind: str, number: int, run: str, name: str) -> dict[str, Any]:
    """Train as a kind of island does; "alone" takes the micro-batches of two ranks."""
    if kind == "pipeline":
        return train_pipeline(rank, number, run, name, HIDDEN, 0)
    parts = 1 if kind == "whole" else RANKS
    kind = "alone" if kind == "whole" else kind
    return train(rank, kind, parts, number, run, name, HIDDEN, 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
    # A thread of gloo that frees a tensor while the interpreter is finalized aborts the
    # process (pytorch/pytorch#179291), so skip the finalization.
    os._exit(0)
