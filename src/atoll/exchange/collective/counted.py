"""A world that knows how many bytes have gone through it."""

from __future__ import annotations

from atoll.exchange.collective.world import Parts, World


class CountedWorld:
    """A `World` that has a world. Words count as they are, parts by their size."""

    def __init__(self, inner: World) -> None:
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
