"""Three processes average a tensor through an object store or a shared directory.

Pass the URL of a bucket; by default they use a temporary directory.
"""

from __future__ import annotations

import multiprocessing
import sys
import tempfile

import torch

from atoll.torch import StoreAllReduce

WORLD_SIZE = 3


def average(url: str, rank: int) -> None:
    """Run one rank: after each of three rounds all ranks have the same weights."""
    reduce = StoreAllReduce(url, rank, WORLD_SIZE, name="example", timeout_s=120)
    weights = torch.full((4,), float(rank))
    while reduce.round < 3:
        weights += rank  # stands for the training of this rank
        reduce(weights)
    sys.stdout.write(f"{rank} {weights.tolist()}\n")  # one write: ranks share the pipe


def main(url: str) -> None:
    """Start all ranks and wait for them."""
    spawn = multiprocessing.get_context("spawn")
    processes = [
        spawn.Process(target=average, args=(url, rank)) for rank in range(WORLD_SIZE)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    sys.exit(any(process.exitcode for process in processes))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    with tempfile.TemporaryDirectory() as directory:
        main(directory)
