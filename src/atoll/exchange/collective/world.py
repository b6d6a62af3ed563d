"""The port between a collective and the network that its ranks share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

U8 = NDArray[np.uint8]


class Gone(Exception):
    """A rank cannot be reached any more; what was met says why."""


Parts = Sequence[tuple[int, U8]]
"""Bytes to or from ranks, several of one rank in the order in which they go."""


@runtime_checkable
class World(Protocol):
    """A fixed number of ranks, each of which reaches every other one.

    `Circle` sends and receives words, one thread for each rank; the thread that
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
