"""The rendezvous of the ranks of an all-reduce in a store, and the progress of each.

    <name>/about                    put if absent: the purpose of the name
    <name>/up/<round>.<rank>        put if absent: all values of a rank, one frame
    <name>/mean/<round>.<part>      put if absent: a part of the reduced values
    <name>/done/<rank>              overwritten by its rank: its number of rounds done

Rule 1: a rank begins a round when it has done the one before. So a rank that has done a
        round knows that all have done the one before it, which can be deleted.
Rule 2: a rank removes only the objects that it has put.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from datetime import UTC, datetime
from os import PathLike, fspath
from typing import TypeVar

from atoll import store as stores
from atoll.errors import CorruptError, NoSuchObject, Unreachable, UsageError
from atoll.exchange.all_reduce.frames import ReduceTerms
from atoll.retry import ABSENT_OBJECT, retried
from atoll.runtime import Clock

T = TypeVar("T")

CONCURRENCY = 4
"""Threads that wait for objects and read them."""


class TooLate(Exception):
    """An object does not exist in time. Never leaves this package."""


class Rendezvous:
    """A store where ranks meet, with retries. The owner must close it."""

    def __init__(self, store: stores.Store, *, url: str) -> None:
        self.url = re.sub(r"//[^/@]*@", "//", url)  # a password may be in it
        self._counted = stores.CountedStore(store)
        probed = stores.ProbedStore(stores.RetryingStore(self._counted))
        stores.require_put_new(probed.traits, store=self.url)
        self.store = stores.RangedStore(probed)

    @property
    def requests(self) -> stores.RequestCounts:
        """Counts of the requests to the store so far."""
        return self._counted.requests

    def close(self) -> None:
        """End its threads. Safe to repeat."""
        self.store.close()

    def path(self, key: str) -> str:
        """Return the URL of an object, for a message."""
        return f"{self.url.rstrip('/')}/{key}"


def open_rendezvous(url: str | PathLike[str] | stores.Store) -> Rendezvous:
    """Return the rendezvous at a URL, at a path or in a store.

    Raises:
        UsageError: the URL is wrong, or the store has no conditional put.
        StoreDenied: a permission is missing.
        Unreachable: the store does not answer.
    """
    if isinstance(url, str | PathLike):
        return Rendezvous(stores.open_store(fspath(url)), url=fspath(url))
    return Rendezvous(url, url="the store")


@dataclass(frozen=True)
class Deadline:
    """When a wait began and when it ends; messages give its beginning in UTC."""

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
        """The beginning of the wait, and its duration."""
        waited_s = round(self.timeout_s - self.left_s)
        return f"since {self.since:%Y-%m-%d %H:%M:%S} UTC ({waited_s} s)"


class ObjectWait:
    """Waits for several objects concurrently; if one wait ends early, all do."""

    def __init__(self, deadline: Deadline) -> None:
        self._deadline = deadline
        self._is_cancelled = threading.Event()

    def until_exists(self, read: Callable[[], T]) -> T:
        """Call `read` until its object exists, and return its result.

        Raises:
            TooLate: the object did not exist in time, or another wait has failed.
        """
        return retried(read, ABSENT_OBJECT, sleep=self._sleep)

    def _sleep(self, seconds: float) -> None:
        left_s = self._deadline.left_s
        if left_s <= 0 or self._is_cancelled.wait(min(seconds, left_s)):
            raise TooLate

    def run_all(self, acts: Sequence[Callable[[], T]]) -> list[T]:
        """Call all of them concurrently; raise the first error of one of them."""
        if len(acts) < 2:
            return [act() for act in acts]
        with ThreadPoolExecutor(CONCURRENCY, "atoll-all-reduce") as threads:
            futures = [threads.submit(act) for act in acts]
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            errors = [exc for call in done if (exc := call.exception()) is not None]
            if errors:
                self._is_cancelled.set()
                threads.shutdown(cancel_futures=True)
                # A wait that was cancelled because of another's error is not the cause.
                raise min(errors, key=lambda exc: isinstance(exc, TooLate))
            return [future.result() for future in futures]


FORMAT = 1
MAX_ABOUT_BYTES = 4096
MAX_NAMED = 8
"""How many absent ranks a message names."""

_NUMBERS = re.compile(r".*/([0-9]{12})\.([0-9]{5})")
_DONE = re.compile(rb"[0-9]{1,12}\n")


@dataclass(frozen=True)
class RankProgress:
    """The state of one rank under a name, in the objects of a rendezvous."""

    rendezvous: Rendezvous
    name: str
    rank: int
    world_size: int
    own_keys: dict[int, set[str]] = field(default_factory=dict)
    """Objects that this rank has put in each round that is not deleted yet."""

    def up(self, round_number: int, rank: int) -> str:
        return f"{self.name}/up/{round_number:012d}.{rank:05d}"

    def mean(self, round_number: int, part: int) -> str:
        return f"{self.name}/mean/{round_number:012d}.{part:05d}"

    def begin(self, start_round: int | None) -> int:
        """Return the round of this rank's first call.

        Raises:
            UsageError: the name has another purpose, or the round is not available.
        """
        self._require_same_purpose()
        done = self.done(self.rank)
        first = done if start_round is None else start_round
        if first not in (done, done - 1) or (first < done and self._has_sent(done)):
            raise UsageError(
                f"start_round={first} cannot be: rank {self.rank} has done {done} "
                f"rounds of {self.name!r}, and older rounds are deleted. Begin with "
                f"{done}, or omit start_round; or choose a new name."
            )
        if done:
            self._find_own_keys()
            self._delete_before(done - 1)
        return first

    def put(self, round_number: int, key: str, frame: Sequence[stores.Data]) -> bool:
        """Put an object of a round. False: it exists already, and stays."""
        self.own_keys.setdefault(round_number, set()).add(key)
        return self.rendezvous.store.put_new(key, frame)

    def finish(self, round_number: int) -> None:
        """Record that this rank has done a round, and delete the one before."""
        count = b"%d\n" % (round_number + 1)
        self.rendezvous.store.put(self._done_key(self.rank), [count])
        self._delete_before(round_number)

    def done(self, rank: int) -> int:
        """Return the number of rounds that a rank has done."""
        key = self._done_key(rank)
        try:
            count = bytes(self.rendezvous.store.get(key, 0, 32))
        except NoSuchObject:
            return 0
        if not _DONE.fullmatch(count):
            raise CorruptError(
                f"{self.rendezvous.path(key)} holds {count!r}, which is no number "
                "of rounds. Choose a new name, on every rank."
            )
        return int(count)

    def absent(
        self, terms: ReduceTerms, round_number: int, deadline: Deadline
    ) -> Unreachable:
        """Return the error that names the missing ranks, their objects and the wait."""
        missing = dict(self._missing(terms, round_number))
        if not missing:
            return Unreachable(
                f"Round {round_number} of {self.name!r} waited {deadline.text}, and "
                f"the last of {self.world_size} ranks has come just now. Call again; "
                "this rank's values stay."
            )
        ranks = "; ".join(
            f"rank {rank} ({self.rendezvous.path(key)}), which has done "
            f"{self.done(rank)}"
            for rank, key in list(missing.items())[:MAX_NAMED]
        )
        unnamed = len(missing) - MAX_NAMED
        return Unreachable(
            f"Round {round_number} of {self.name!r} waits {deadline.text} for "
            f"{len(missing)} of {self.world_size} ranks: {ranks}"
            f"{f'; and {unnamed} more' if unnamed > 0 else ''}. Start them, or wait "
            f"for longer than timeout_s={deadline.timeout_s:g}; this rank's values "
            "stay."
        )

    def _missing(
        self, terms: ReduceTerms, round_number: int
    ) -> Iterator[tuple[int, str]]:
        """Yield ranks whose values are missing; if none are, those whose part is."""
        # In a direct round all ranks read all values, and no rank puts a part.
        waits_for_parts = not terms.is_direct
        for rank in range(self.world_size):
            if not self._exists(key := self.up(round_number, rank)):
                waits_for_parts = False
                yield rank, key
        for part in range(terms.num_parts if waits_for_parts else 0):
            if not self._exists(key := self.mean(round_number, part)):
                yield terms.owner(part, round_number), key

    def _has_sent(self, round_number: int) -> bool:
        return self._exists(self.up(round_number, self.rank))

    def _exists(self, key: str) -> bool:
        try:
            self.rendezvous.store.get(key, 0, 1)
        except NoSuchObject:
            return False
        return True

    def _require_same_purpose(self) -> None:
        """Record the purpose of the name, or compare it with the recorded one."""
        purpose = {"format": FORMAT, "world_size": self.world_size}
        key, text = f"{self.name}/about", json.dumps(purpose, sort_keys=True)
        if self.rendezvous.store.put_new(key, [text.encode()]):
            return
        recorded = bytes(self.rendezvous.store.get(key, 0, MAX_ABOUT_BYTES))
        if recorded != text.encode():
            raise UsageError(
                f"{self.rendezvous.path(key)} holds {recorded[:200]!r}, and this rank "
                f"has {text}. Start every rank with the same world_size and the same "
                "Atoll, or choose a new name."
            )

    def _delete_before(self, round_number: int) -> None:
        old = [number for number in self.own_keys if number < round_number]
        if old:
            keys = sorted(key for number in old for key in self.own_keys[number])
            self.rendezvous.store.remove(keys)
        for number in old:
            del self.own_keys[number]

    def _find_own_keys(self) -> None:
        """Find objects that an earlier incarnation has put and not deleted."""
        for item in self.rendezvous.store.items(f"{self.name}/"):
            match = _NUMBERS.fullmatch(item.key)
            if match and self._is_own(item.key, match):
                self.own_keys.setdefault(int(match[1]), set()).add(item.key)

    def _is_own(self, key: str, match: re.Match[str]) -> bool:
        if key.startswith(f"{self.name}/up/"):
            return int(match[2]) == self.rank
        owner = (int(match[1]) + int(match[2])) % self.world_size
        return key.startswith(f"{self.name}/mean/") and owner == self.rank

    def _done_key(self, rank: int) -> str:
        return f"{self.name}/done/{rank:05d}"
