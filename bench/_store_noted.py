"""A store that tells what a round needs from what waiting costs, for `store.py`.

What waits for others looks again and again: it lists the round, or asks for what is
not there yet. How often depends on how long the others take, so that a bound can only
be stated without it. Heartbeats come by the clock, whatever the rounds do: each puts
a member document and reads the controls once, and other reads of the controls belong
to a round.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Sequence

from atoll.errors import NoSuchObject
from atoll.store import (
    Data,
    Item,
    Store,
    StoreTraits,
)

ROUNDS, MEMBERS, CONTROLS = "rounds/", "members/", "control/"


class Noted:
    """Sorts the requests to another store by why they are made. Implements `Store`.

    Args:
        needed: How many looks a round makes though nobody waits.
    """

    def __init__(self, store: Store, *, needed: int) -> None:
        self._store, self._needed = store, needed
        self._lock = threading.Lock()
        self._made: Counter[str] = Counter()

    @property
    def traits(self) -> StoreTraits:
        return self._store.traits

    def put_new(self, key: str, parts: Sequence[Data]) -> bool:
        self._note(key, "put")
        return self._store.put_new(key, parts)

    def put(self, key: str, parts: Sequence[Data]) -> None:
        self._note(key, "put")
        self._store.put(key, parts)

    def get(self, key: str, first: int = 0, size: int | None = None) -> memoryview:
        # When it is made, as requests are counted: the bill may be asked for before
        # a heartbeat has its answer.
        self._note(key, "get")
        try:
            return self._store.get(key, first, size)
        except NoSuchObject:
            if key.startswith(ROUNDS):
                self._note(key, "miss")
            raise

    def items(self, prefix: str) -> list[Item]:
        self._note(prefix, "list")
        return self._store.items(prefix)

    def remove(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._note(key, "remove")
            self._store.remove([key])

    def take(self) -> dict[str, int]:
        """Return how many requests were looks and heartbeats since this was asked."""
        with self._lock:
            made, self._made = self._made, Counter()
        looks = max(0, made["list"] + made["miss"] - self._needed)
        beats = made["beat"] + min(made["controls"], made["heartbeats"])
        return {"looks": looks, "beats": beats}

    def _note(self, key: str, what: str) -> None:
        with self._lock:
            if key.startswith(ROUNDS):
                self._made[what] += 1
            elif key.startswith(CONTROLS):
                self._made["controls"] += 1
            else:
                self._made["beat"] += 1
                self._made["heartbeats"] += what == "put" and key.startswith(MEMBERS)
