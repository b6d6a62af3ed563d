"""Three processes that share only a directory, or a bucket, average a tensor.

Give the URL of a bucket, or nothing: then they meet in a directory of their own.
"""

from __future__ import annotations

import multiprocessing
import sys
import tempfile

import torch

from atoll.torch import StoreAllReduce

WORLD_SIZE = 3


def average(url: str, rank: int) -> None:
    """Be one rank: three rounds, each of which moves all ranks together."""
    reduce = StoreAllReduce(url, rank, WORLD_SIZE, name="example", timeout_s=120)
    weights = torch.full((4,), float(rank))
    while reduce.round < 3:
        weights += rank  # what this rank has learnt
        reduce(weights)
    print(rank, weights.tolist(), flush=True)


def main(url: str) -> None:
    """Start the ranks, and wait for them."""
    start = multiprocessing.get_context("spawn").Process
    ranks = [start(target=average, args=(url, each)) for each in range(WORLD_SIZE)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    sys.exit(any(each.exitcode for each in ranks))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    with tempfile.TemporaryDirectory() as directory:
        main(directory)
