"""A rank that is killed at any point and started again changes nothing for anybody."""

from __future__ import annotations

import multiprocessing
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from atoll.algorithm.merge import mean
from tests.exchange.all_reduce.ranks import join, live, reduce, size_of, values

ROUNDS, VICTIM = 3, 1
ALIVE_S = 120.0

Lives = multiprocessing.get_context("forkserver")
Lives.set_forkserver_preload(["tests.exchange.all_reduce.ranks"])


def outlive(root: Path, rank: int, world_size: int) -> list[bytes]:
    """Be a rank that stays, and return the means of all rounds."""
    ranks = join(root, rank, world_size)
    return [
        reduce(ranks, values(rank, number, size=size_of(world_size))).tobytes()
        for number in range(ROUNDS)
    ]


def dies(root: Path, world_size: int, dies_at: int) -> bool:
    """Run the rank that is to die, and return whether it did; else it has ended."""
    words = (root, VICTIM, world_size, ROUNDS, dies_at)
    process = Lives.Process(target=live, args=words)
    process.start()
    process.join(ALIVE_S)
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode != 0


def possible(number: int, world_size: int) -> set[bytes]:
    """Return the means of a round with what either life of the victim brings."""
    return {
        mean(
            [
                values(
                    rank, number, size=size_of(world_size), life=life * (rank == VICTIM)
                )
                for rank in range(world_size)
            ]
        ).tobytes()
        for life in (0, 1)
    }


# What a rank does in a store: the probe (5 acts, 3 of them changes), what the name is
# for, and its rounds. Of two ranks, each round: puts its values (7th act), reads the
# other's, says that it is done, and from the second on removes the one before. Of four:
# puts its values, reads two ranges of three, puts a part, reads three, says that it is
# done (18th). A number with a minus counts what changes the store, and dies before it.
DEATHS = [
    *((2, dies_at) for dies_at in (7, 8, 9, 10, 12, 13, -5, -6, -9)),
    *((4, dies_at) for dies_at in (7, 8, 13, 14, 17, 18, 26, 30, 31)),
    *((4, dies_at) for dies_at in (-5, -6, -7, -9, -11)),
]


@pytest.mark.parametrize(("world_size", "dies_at"), DEATHS)
def test_the_others_have_the_mean_of_one_of_its_lives(
    world_size: int, dies_at: int, tmp_path: Path
) -> None:
    """All of them the same, in every round; and so has the victim what it was told."""
    others = [rank for rank in range(world_size) if rank != VICTIM]
    with ThreadPoolExecutor(len(others)) as threads:
        coming = [threads.submit(outlive, tmp_path, r, world_size) for r in others]
        assert dies(tmp_path, world_size, dies_at)
        assert not dies(tmp_path, world_size, 0)
        found = [each.result(ALIVE_S) for each in coming]

    for number in range(ROUNDS):
        means = {each[number] for each in found}
        assert len(means) == 1
        assert means <= possible(number, world_size)
        told = tmp_path / f"told-{number}"
        if told.exists():
            assert told.read_bytes() in means
    left = sorted(each.name for each in (tmp_path / "test" / "up").iterdir())
    assert left == [f"{ROUNDS - 1:012d}.{r:05d}" for r in range(world_size)]
