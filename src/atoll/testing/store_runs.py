"""Runs in a store for tests: time passes only while somebody waits."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import TypeVar

from atoll.exchange import Exchange, Frame, Outcome
from atoll.exchange.bucket import BucketReader, StoreExchange
from atoll.exchange.bucket.create import make_run
from atoll.exchange.bucket.view import BEAT_S
from atoll.settings import RunSettings
from atoll.store import Store

T = TypeVar("T")


class WaitingTime:
    """A clock that moves while somebody pauses, and does then what is due.

    One for all islands of a test. Implements `Timing`.
    """

    def __init__(self) -> None:
        self._now_s = 0.0
        self._count = itertools.count()
        self._due: list[tuple[float, int, float, Callable[[], None]]] = []

    def now_s(self) -> float:
        return self._now_s

    def pause(self, seconds: float) -> None:
        until_s = self._now_s + seconds
        while self._due and self._due[0][0] <= until_s:
            self._now_s, _, every_s, act = heappop(self._due)
            self._plan(every_s, act)
            act()
        self._now_s = max(self._now_s, until_s)

    def every(self, seconds: float, act: Callable[[], None]) -> None:
        self._plan(seconds, act)

    def together(self, acts: Sequence[Callable[[], T]]) -> list[T]:
        return [act() for act in acts]

    def _plan(self, seconds: float, act: Callable[[], None]) -> None:
        heappush(self._due, (self._now_s + seconds, next(self._count), seconds, act))


class Unhurried(StoreExchange):
    """Lets a heartbeat's time pass before it is asked: what others did is seen then."""

    def outcome(self, fragment: int, round: int, *, wait_s: float) -> Outcome | None:
        self._timing.pause(BEAT_S)
        return super().outcome(fragment, round, wait_s=wait_s)

    def state(self, fragment: int) -> Frame:
        self._timing.pause(BEAT_S)
        return super().state(fragment)


class StoreRun:
    """A run in a store, and what attaches islands to it."""

    def __init__(self, store: Store, settings: RunSettings) -> None:
        self.store, self.time = store, WaitingTime()
        self._lives = itertools.count(1)
        make_run(store, settings, url="a test's store")

    def __call__(self, *, key: bytes) -> Exchange:
        """Return the exchange for one life of an island that holds `key`."""
        lookout = BucketReader.open(self.store, self.time, url="a test's store")
        nonce = next(self._lives).to_bytes(16, "little")
        return Unhurried(lookout, key=key, nonce=nonce)
