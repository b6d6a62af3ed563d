"""Words on their way to one rank, sent one after the other behind who says them.

A word is on its way until the other rank has taken it, which one that is stopped never
does: nobody else may have to wait for that.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from atoll.exchange.collective.world import Gone, World


class Outbox:
    """Sends to one rank. `gone` is called once, if that is not there any more."""

    def __init__(self, world: World, rank: int, gone: Callable[[Gone], None]) -> None:
        self._world, self._rank, self._gone = world, rank, gone
        self._changed = threading.Condition()
        self._words: deque[bytes] = deque()
        self._is_over = False
        name = f"atoll-to-rank-{rank}"
        threading.Thread(target=self._send, name=name, daemon=True).start()

    def put(self, word: bytes, *, if_idle: bool = False) -> None:
        """Let a word be sent after those before it, or only if there are none."""
        with self._changed:
            if not (if_idle and self._words):
                self._words.append(word)
                self._changed.notify_all()

    def flush(self, wait_s: float) -> None:
        """Return when everything was taken, or time is up."""
        with self._changed:
            self._changed.wait_for(lambda: not self._words, wait_s)

    def close(self) -> None:
        """Send nothing beyond what is on its way. Safe to repeat."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def _send(self) -> None:
        while (word := self._next()) is not None:
            try:
                self._world.send(self._rank, word)
            except Gone as exc:
                self._drop()
                self._gone(exc)
                return
            with self._changed:
                self._words.popleft()
                self._changed.notify_all()

    def _drop(self) -> None:
        with self._changed:
            self._words.clear()
            self._changed.notify_all()

    def _next(self) -> bytes | None:
        """Return the next word, which stays in the box until it was taken."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or self._words)
            return self._words[0] if self._words else None
