"""A world of threads: ranks that share a process."""

from __future__ import annotations

from queue import SimpleQueue

import numpy as np

from atoll.exchange.collective.world import Parts, RankUnreachable

_Lines = dict[tuple[int, int, str], SimpleQueue[bytes | None]]


class MemoryWorld:
    """One rank of a world in memory. Implements `CollectiveWorld`."""

    def __init__(self, rank: int, size: int, lines: _Lines) -> None:
        self._rank, self._size, self._lines = rank, size, lines

    @classmethod
    def of(cls, size: int) -> list[MemoryWorld]:
        """Return all the ranks of a new world."""
        lines: _Lines = {
            (source, target, plane): SimpleQueue()
            for source in range(size)
            for target in range(size)
            for plane in ("messages", "parts")
        }
        return [cls(rank, size, lines) for rank in range(size)]

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    def send(self, rank: int, message: bytes) -> None:
        self._lines[self._rank, rank, "messages"].put(message)

    def receive(self, rank: int) -> bytes:
        return self._next(rank, "messages")

    def swap(self, outgoing: Parts, incoming: Parts) -> None:
        for rank, part in outgoing:
            self._lines[self._rank, rank, "parts"].put(part.tobytes())
        for rank, part in incoming:
            part[:] = np.frombuffer(self._next(rank, "parts"), np.uint8)

    def close(self) -> None:
        """Disconnect from all ranks, like a killed process."""
        for (source, _, _), line in self._lines.items():
            if source == self._rank:
                line.put(None)

    def _next(self, rank: int, plane: str) -> bytes:
        data = self._lines[rank, self._rank, plane].get()
        if data is None:
            self._lines[rank, self._rank, plane].put(None)
            raise RankUnreachable(f"rank {rank} has closed its lines")
        return data
