"""The transport port of a collective: a fixed number of ranks, and its byte counter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

U8 = NDArray[np.uint8]


class RankUnreachable(Exception):
    """A rank cannot be reached any more; what was met says why."""


Parts = Sequence[tuple[int, U8]]
"""Bytes to or from ranks, several of one rank in the order in which they go."""


@runtime_checkable
class CollectiveWorld(Protocol):
    """A fixed number of ranks, each of which reaches every other one.

    `ControlChannel` sends and receives messages, one thread per rank; the thread that
    reduces rounds swaps. What fails is over: nothing is tried again.
    """

    @property
    def rank(self) -> int:
        """Which of them this is, from 0 on."""
        ...

    @property
    def size(self) -> int:
        """How many there are."""
        ...

    def send(self, rank: int, word: bytes) -> None:
        """Give a word to a rank, after all before it.

        Raises:
            Gone: the rank is gone.
        """
        ...

    def receive(self, rank: int) -> bytes:
        """Wait for the next word of a rank.

        Raises:
            Gone: the rank is gone, and has left no more.
        """
        ...

    def swap(self, outgoing: Parts, incoming: Parts) -> None:
        """Send and fill parts, all at once; who receives knows their sizes.

        Raises:
            Gone: a rank is gone. What was to be filled may be garbage.
        """
        ...


class CountedWorld:
    """A world that counts the bytes that another world moves."""

    def __init__(self, inner: CollectiveWorld) -> None:
        self._inner = inner
        self.bytes_up = 0
        self.bytes_down = 0

    @property
    def rank(self) -> int:
        return self._inner.rank

    @property
    def size(self) -> int:
        return self._inner.size

    def send(self, rank: int, word: bytes) -> None:
        self._inner.send(rank, word)
        self.bytes_up += len(word)

    def receive(self, rank: int) -> bytes:
        word = self._inner.receive(rank)
        self.bytes_down += len(word)
        return word

    def swap(self, outgoing: Parts, incoming: Parts) -> None:
        self._inner.swap(outgoing, incoming)
        self.bytes_up += sum(len(part) for _, part in outgoing)
        self.bytes_down += sum(len(part) for _, part in incoming)

    def costs(self) -> dict[str, float]:
        """Return what went over the network, under the names that loggers see."""
        return {
            "atoll/collective_bytes_up": self.bytes_up,
            "atoll/collective_bytes_down": self.bytes_down,
        }
