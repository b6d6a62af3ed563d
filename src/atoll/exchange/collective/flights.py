"""Updates that a rank has announced, and what became of each."""

from __future__ import annotations

import threading
from collections.abc import Callable

from atoll.errors import Refused
from atoll.exchange.base import Frame, Outcome
from atoll.wire import update_digest

Key = tuple[int, int]
"""Fragment and round."""

Found = Outcome | Exception


class Flights:
    """One rank's updates on their way. Any thread may call."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._flying: dict[Key, Frame] = {}
        self._landed: dict[Key, Found] = {}
        self._alone: dict[int, int] = {}

    def add(self, frame: Frame) -> bool:
        """Keep an update until its round is decided; False: it is kept already.

        Raises:
            Refused: another one is.
        """
        header = frame.header
        key = (header.fragment, header.round)
        with self._changed:
            flying = self._flying.get(key)
            if flying is None:
                self._landed.pop(key, None)
                self._flying[key] = frame
                return True
        if update_digest(flying.header) != update_digest(header):
            raise Refused(
                f"Another update of island {header.island!r} stands for round "
                f"{header.round} of fragment {header.fragment}. Wait for its outcome."
            )
        return False

    def frame(self, key: Key) -> Frame | None:
        """Return the update of a round that is not decided."""
        with self._changed:
            return self._flying.get(key)

    def all(self) -> list[Key]:
        """Return the rounds that are not decided, in their order."""
        with self._changed:
            return sorted(self._flying, key=lambda key: key[::-1])

    def land(self, key: Key, found: Found) -> None:
        """Let it be known what became of an update."""
        with self._changed:
            self._flying.pop(key, None)
            self._landed[key] = found
            self._changed.notify_all()

    def let_go(self, key: Key, refused: Exception | None = None) -> None:
        """Keep an update no longer: the coordinator has it, or has refused it."""
        with self._changed:
            self._flying.pop(key, None)
            self._alone[key[0]] = key[1]
            if refused is not None:
                self._landed[key] = refused
            self._changed.notify_all()

    def is_let_go(self, key: Key) -> bool:
        """Return whether the coordinator has had the update of a fragment's round."""
        with self._changed:
            return self._alone.get(key[0], 0) >= key[1]

    def wake(self) -> None:
        """Let who waits look again."""
        with self._changed:
            self._changed.notify_all()

    def wait(
        self, key: Key, wait_s: float, *, is_over: Callable[[], bool]
    ) -> Found | None:
        """Return what a round came to, once; None: nothing yet, or others know it."""
        with self._changed:
            self._changed.wait_for(lambda: is_over() or key not in self._flying, wait_s)
            return self._landed.pop(key, None)
