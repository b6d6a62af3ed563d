"""One file of a simulated disk: its bytes, and which of them would survive."""

from __future__ import annotations

import random


class SimFile:
    """Bytes that are durable up to a point.

    A failed sync leaves bytes in doubt: no later sync says anything about them, and
    after a power cut they may be zeros.
    """

    __slots__ = ("_doubts", "_ends", "_synced", "content", "survives")

    def __init__(self, content: bytes = b"", *, is_durable: bool = False) -> None:
        self.content = bytearray(content)
        self.survives = is_durable
        """Whether the file itself is durable, be it empty."""

        self._synced = len(content) if is_durable else 0
        self._ends: list[int] = []
        """Where each append since the last sync ended."""

        self._doubts: list[tuple[int, int]] = []

    @property
    def is_durable(self) -> bool:
        return self.survives and self._synced == len(self.content)

    @property
    def durable(self) -> bytes:
        return bytes(self.content[: self._synced])

    def append(self, data: bytes) -> None:
        self.content += data
        self._ends.append(len(self.content))

    def sync(self) -> None:
        self._synced, self.survives = len(self.content), True
        self._ends.clear()

    def doubt(self) -> None:
        """Note that a sync has failed."""
        if self._synced < len(self.content):
            self._doubts.append((self._synced, len(self.content)))

    def after_power_cut(self, rng: random.Random) -> bytes | None:
        """Return what is left, or None if the file is not."""
        if not self.survives and rng.random() < 0.25:
            return None
        left = self.content[: self._kept(rng)]
        for first, last in self._doubts:
            if rng.random() < 0.5:
                left[first:last] = bytes(min(last, len(left)) - min(first, len(left)))
        return bytes(left)

    def _kept(self, rng: random.Random) -> int:
        match rng.choice(("nothing", "all", "appends", "torn")):
            case "nothing":
                return self._synced
            case "all":
                return len(self.content)
            case "appends":
                return rng.choice([self._synced, *self._ends])
            case _:
                return rng.randint(self._synced, len(self.content))
