"""The transport port of a collective: a fixed number of ranks, and its byte counter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

U8 = NDArray[np.uint8]


class RankUnreachable(Exception):
    """A rank can no longer be reached; the message has the transport's reason."""


Parts = Sequence[tuple[int, U8]]
"""Bytes to or from ranks; several parts of one rank keep their order."""


@runtime_checkable
class CollectiveWorld(Protocol):
    """A fixed number of ranks, each of which reaches every other one.

    `ControlChannel` sends and receives messages, one thread per rank; the thread that
    reduces rounds swaps. A failure is final: no operation is retried.
    """

    @property
    def rank(self) -> int:
        """This process's rank, from 0 on."""
        ...

    @property
    def size(self) -> int:
        """The number of ranks."""
        ...

    def send(self, rank: int, message: bytes) -> None:
        """Send a message to a rank, after all earlier ones.

        Raises:
            RankUnreachable: the rank is gone.
        """
        ...

    def receive(self, rank: int) -> bytes:
        """Wait for the next message from a rank.

        Raises:
            RankUnreachable: the rank is gone, and no message from it remains.
        """
        ...

    def swap(self, outgoing: Parts, incoming: Parts) -> None:
        """Send and fill parts, all concurrently; the receiver knows their sizes.

        Raises:
            RankUnreachable: a rank is gone. The incoming parts may be garbage.
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

    def send(self, rank: int, message: bytes) -> None:
        self._inner.send(rank, message)
        self.bytes_up += len(message)

    def receive(self, rank: int) -> bytes:
        message = self._inner.receive(rank)
        self.bytes_down += len(message)
        return message

    def swap(self, outgoing: Parts, incoming: Parts) -> None:
        self._inner.swap(outgoing, incoming)
        self.bytes_up += sum(len(part) for _, part in outgoing)
        self.bytes_down += sum(len(part) for _, part in incoming)

    def costs(self) -> dict[str, float]:
        """Return the bytes that went over the network, under their metric names."""
        return {
            "atoll/collective_bytes_up": self.bytes_up,
            "atoll/collective_bytes_down": self.bytes_down,
        }
