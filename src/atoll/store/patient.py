"""A store that is asked again: what fails for a moment is not told to anybody.

Rule 1: waits grow, with jitter, so that islands that failed together do not come back
        together.
Rule 2: a put of a new object whose answer was lost may have been done. If the object
        is there afterwards and has our bytes, it is ours, or equal to ours.
Rule 3: how often and how long is bounded; then the last failure is told.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from atoll.errors import Unreachable
from atoll.store.port import Data, Item, Store, Traits, size_of

T = TypeVar("T")


@dataclass(frozen=True)
class Tries:
    """How often a store is asked again, and how long to wait before."""

    most: int = 6
    first_s: float = 0.25
    longest_s: float = 8.0

    def waits_s(self, rng: random.Random) -> Iterator[float]:
        """Yield the pauses between the tries: doubled each, and half of it chance."""
        longest_s = self.first_s
        for _ in range(self.most - 1):
            yield rng.uniform(0.5, 1.0) * min(longest_s, self.longest_s)
            longest_s *= 2


class Patient:
    """Asks another store again when it fails. Implements `Store`.

    Args:
        pause: Waits so many seconds; one that is to end soon may raise instead.
    """

    def __init__(
        self,
        store: Store,
        *,
        pause: Callable[[float], None] | None = None,
        tries: Tries | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self._store = store
        self._pause = pause or _pause
        self.tries = tries or Tries()
        self._rng = rng or random.Random()

    @property
    def traits(self) -> Traits:
        return self._store.traits

    def put_new(self, key: str, parts: Sequence[Data]) -> bool:
        is_unsure = False

        def put() -> bool:
            nonlocal is_unsure
            try:
                is_ours = self._store.put_new(key, parts)
            except Unreachable:
                is_unsure = True
                raise
            return is_ours or (is_unsure and self._holds(key, parts))

        return self._again(put)

    def put(self, key: str, parts: Sequence[Data]) -> None:
        self._again(lambda: self._store.put(key, parts))

    def get(self, key: str, first: int = 0, size: int | None = None) -> memoryview:
        return self._again(lambda: self._store.get(key, first, size))

    def items(self, prefix: str) -> list[Item]:
        return self._again(lambda: self._store.items(prefix))

    def remove(self, keys: Iterable[str]) -> None:
        every = list(keys)
        self._again(lambda: self._store.remove(every))

    def _holds(self, key: str, parts: Sequence[Data]) -> bool:
        """Return whether the object at a key has these bytes, and no others."""
        size = size_of(parts)
        found, at = self._store.get(key, 0, size + 1), 0
        if len(found) != size:
            return False
        for part in parts:
            view = memoryview(part).cast("B")
            if found[at : at + len(view)] != view:
                return False
            at += len(view)
        return True

    def _again(self, act: Callable[[], T]) -> T:
        waits_s = self.tries.waits_s(self._rng)
        while True:
            try:
                return act()
            except Unreachable:
                if (wait_s := next(waits_s, None)) is None:
                    raise
            self._pause(wait_s)


def _pause(seconds: float) -> None:
    threading.Event().wait(seconds)
