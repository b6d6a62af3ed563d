"""Ranks as threads or processes, and values to reduce that are known in advance."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from atoll.exchange.all_reduce import AllReduce, Sections, open_rendezvous
from atoll.store import Data, FileStore, Item, Store
from atoll.wire import PIECE_ELEMENTS

Values = NDArray[np.float32]

LARGE = 5 * PIECE_ELEMENTS + 3
"""Six pieces: more than there are ranks in most tests, and not a multiple."""


def size_of(world_size: int) -> int:
    """Return how many values make every one of some ranks reduce a part, or none."""
    return LARGE if world_size > 3 else 1000


def values(rank: int, number: int, *, size: int, life: int = 0) -> Values:
    """Return what a rank contributes to a round in one of its lives."""
    rng = np.random.default_rng([rank, number, life])
    return rng.standard_normal(size, np.float32)


def join(store: Store | Path, rank: int, world_size: int, **more: object) -> AllReduce:
    """Return a rank's way to reduce, at a place of its own."""
    said = {"name": "test", "timeout_s": 60.0} | more
    place = open_rendezvous(store)
    return AllReduce(place, rank=rank, world_size=world_size, **said)  # type: ignore[arg-type]  # words by name


def reduce(ranks: AllReduce, mine: Values, *, op: str = "mean") -> Values:
    """Reduce fp32 values."""
    sections = Sections({"float32": len(mine)})
    found = ranks(mine.view(np.uint8), sections, layout=f"{len(mine)}", op=op)
    return found.view(np.float32)


def together(acts: Sequence[Callable[[], Values]]) -> list[Values]:
    """Do all at once, and return what each returned."""
    with ThreadPoolExecutor(len(acts)) as threads:
        return [each.result() for each in [threads.submit(act) for act in acts]]


class Mortal(FileStore):
    """Files of a process that dies at its n-th act, before doing it or after."""

    def __init__(self, root: Path, *, dies_at: int, is_after: bool) -> None:
        super().__init__(root)
        self._left, self._is_after = dies_at, is_after

    def put_new(self, key: str, parts: Sequence[Data]) -> bool:
        self._die(is_after=False)
        done = super().put_new(key, parts)
        self._die(is_after=True)
        return done

    def put(self, key: str, parts: Sequence[Data]) -> None:
        self._die(is_after=False)
        super().put(key, parts)
        self._die(is_after=True)

    def get(self, key: str, first: int = 0, size: int | None = None) -> memoryview:
        found = super().get(key, first, size)  # those that find nothing are not counted
        self._die(is_after=True)
        return found

    def items(self, prefix: str) -> list[Item]:
        return super().items(prefix)

    def remove(self, keys: Iterable[str]) -> None:
        self._die(is_after=False)
        super().remove(keys)
        self._die(is_after=True)

    def _die(self, *, is_after: bool) -> None:
        if is_after == self._is_after:
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


def live(root: Path, rank: int, world_size: int, rounds: int, dies_at: int) -> None:
    """Be a rank until all rounds are done, or until death; tell each round's mean."""
    life = 0 if dies_at else 1
    store = Mortal(root, dies_at=abs(dies_at), is_after=dies_at > 0)
    ranks = join(store if dies_at else root, rank, world_size)
    while ranks.round < rounds:
        number = ranks.round
        mine = values(rank, number, size=size_of(world_size), life=life)
        found = reduce(ranks, mine)
        (root / f"told-{number}").write_bytes(found.tobytes())
