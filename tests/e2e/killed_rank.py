"""One rank of an island with checkpoints, whose second rank may kill itself.

Started by torchrun, or alone: `-m tests.e2e.killed_rank KIND RUN NAME FOLDER DIES_AT`.
Each rank leaves in the folder what it came to.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from atoll import kernels
from tests.torch.rank_resuming import live

KILLED = 1
"""The rank that dies, and not the island's leader."""


def main(kind: str, run: str, name: str, folder: str, dies_at: str) -> None:
    torch.set_num_threads(1)
    kernels.use("numpy")  # starts at once
    rank = int(os.environ.get("RANK", "0"))
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    saved = str(Path(folder) / f"{name}-saved")
    ended = live(rank, kind, run, saved, int(dies_at), KILLED, True, name)
    (Path(folder) / f"{name}-{rank}.json").write_text(json.dumps(ended))
    sys.exit("error" in ended)


if __name__ == "__main__":
    main(*sys.argv[1:])
