"""Where ranks meet: a store, how to wait in it, and what to say when nobody comes."""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import UTC, datetime
from os import PathLike, fspath
from typing import TypeVar

from atoll.clock import Clock
from atoll.errors import NoSuchObject, UsageError
from atoll.store import (
    Counted,
    Patient,
    Probed,
    Ranged,
    Requests,
    Store,
    open_store,
    require_put_new,
)

T = TypeVar("T")

AT_ONCE = 4
"""How many objects are waited for, and read, together."""

FIRST_S, GROWTH, LONGEST_S = 0.02, 1.5, 5.0
"""Pauses between looks: ten minutes of waiting for a rank cost about 130 reads."""


class TooLate(Exception):
    """An object has not come in time. Never leaves this package."""


class Place:
    """A store where ranks meet, asked again when it fails; close it."""

    def __init__(self, store: Store, *, url: str) -> None:
        self.url = re.sub(r"//[^/@]*@", "//", url)  # a password may be in it
        self._counted = Counted(store)
        probed = Probed(Patient(self._counted))
        require_put_new(probed.traits, store=self.url)
        self.store = Ranged(probed)

    @property
    def requests(self) -> Requests:
        """What was asked of the store until now."""
        return self._counted.requests

    def close(self) -> None:
        """End its threads. Safe to repeat."""
        self.store.close()

    def path(self, key: str) -> str:
        """Return where an object is, for a message."""
        return f"{self.url.rstrip('/')}/{key}"


def open_place(url: str | PathLike[str] | Store) -> Place:
    """Return the place that a URL, a path or a store names.

    Raises:
        UsageError: the URL is wrong, or the store cannot put an object only where
            there is none.
        StoreDenied: a permission is missing.
        Unreachable: the store does not answer.
    """
    if isinstance(url, str | PathLike):
        return Place(open_store(fspath(url)), url=fspath(url))
    return Place(url, url="the store")


@dataclass(frozen=True)
class Deadline:
    """Until when to wait; since when is said to people in their time."""

    clock: Clock
    timeout_s: float
    since_s: float
    since: datetime

    @classmethod
    def begin(cls, clock: Clock, timeout_s: float) -> Deadline:
        if not timeout_s > 0:
            raise UsageError(f"timeout_s={timeout_s} must be above 0.")
        return cls(clock, timeout_s, clock.now_s(), datetime.now(UTC))

    @property
    def left_s(self) -> float:
        return self.since_s + self.timeout_s - self.clock.now_s()

    @property
    def text(self) -> str:
        """Since when we wait, and for how long."""
        waited_s = round(self.timeout_s - self.left_s)
        return f"since {self.since:%Y-%m-%d %H:%M:%S} UTC ({waited_s} s)"


class Waiting:
    """Waits for several objects together, and gives all up when one is given up."""

    def __init__(self, deadline: Deadline) -> None:
        self._deadline = deadline
        self._given_up = threading.Event()

    def until_there(self, read: Callable[[], T]) -> T:
        """Return what `read` does, as soon as it finds its object.

        Raises:
            TooLate: it was not there in time, or another is given up.
        """
        for pause_s in _pauses_s():
            try:
                return read()
            except NoSuchObject as exc:
                left_s = self._deadline.left_s
                if left_s <= 0 or self._given_up.wait(min(pause_s, left_s)):
                    raise TooLate from exc
        raise AssertionError("pauses never end")

    def together(self, acts: Sequence[Callable[[], T]]) -> list[T]:
        """Do all, several at once; what the first of them raises is raised."""
        if len(acts) < 2:
            return [act() for act in acts]
        with ThreadPoolExecutor(AT_ONCE, "atoll-all-reduce") as threads:
            futures = [threads.submit(act) for act in acts]
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            errors = [exc for each in done if (exc := each.exception()) is not None]
            if errors:
                self._given_up.set()
                threads.shutdown(cancel_futures=True)
                # Who gives up because of another's error is not the reason.
                raise min(errors, key=lambda exc: isinstance(exc, TooLate))
            return [future.result() for future in futures]


def _pauses_s() -> Iterator[float]:
    pause_s = FIRST_S
    while True:
        yield random.uniform(0.5, 1.0) * pause_s
        pause_s = min(pause_s * GROWTH, LONGEST_S)
