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
import random
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from datetime import UTC, datetime
from os import PathLike, fspath
from typing import TypeVar

from atoll.clock import Clock
from atoll.errors import CorruptError, NoSuchObject, Unreachable, UsageError
from atoll.exchange.all_reduce.frames import ReduceTerms
from atoll.store import (
    CountedStore,
    Data,
    ProbedStore,
    RangedStore,
    RequestCounts,
    RetryingStore,
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


class Rendezvous:
    """A store where ranks meet, asked again when it fails; close it."""

    def __init__(self, store: Store, *, url: str) -> None:
        self.url = re.sub(r"//[^/@]*@", "//", url)  # a password may be in it
        self._counted = CountedStore(store)
        probed = ProbedStore(RetryingStore(self._counted))
        require_put_new(probed.traits, store=self.url)
        self.store = RangedStore(probed)

    @property
    def requests(self) -> RequestCounts:
        """What was asked of the store until now."""
        return self._counted.requests

    def close(self) -> None:
        """End its threads. Safe to repeat."""
        self.store.close()

    def path(self, key: str) -> str:
        """Return where an object is, for a message."""
        return f"{self.url.rstrip('/')}/{key}"


def open_place(url: str | PathLike[str] | Store) -> Rendezvous:
    """Return the place that a URL, a path or a store names.

    Raises:
        UsageError: the URL is wrong, or the store cannot put an object only where
            there is none.
        StoreDenied: a permission is missing.
        Unreachable: the store does not answer.
    """
    if isinstance(url, str | PathLike):
        return Rendezvous(open_store(fspath(url)), url=fspath(url))
    return Rendezvous(url, url="the store")


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


class ObjectWait:
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


FORMAT = 1
MAX_ABOUT_BYTES = 4096
MAX_NAMED = 8
"""How many absent ranks a message names."""

_NUMBERS = re.compile(r".*/([0-9]{12})\.([0-9]{5})")
_DONE = re.compile(rb"[0-9]{1,12}\n")


@dataclass(frozen=True)
class RankProgress:
    """What one rank knows and tells of a name, by the objects in its place."""

    place: Rendezvous
    name: str
    rank: int
    world_size: int
    kept: dict[int, set[str]] = field(default_factory=dict)
    """What this rank has put in each round that is not collected yet."""

    def up(self, round_number: int, rank: int) -> str:
        return f"{self.name}/up/{round_number:012d}.{rank:05d}"

    def mean(self, round_number: int, part: int) -> str:
        return f"{self.name}/mean/{round_number:012d}.{part:05d}"

    def begin(self, start_round: int | None) -> int:
        """Return which round this rank's first call is.

        Raises:
            UsageError: the name is for something else, or that round is not to be had.
        """
        self._require_same_about()
        done = self.done(self.rank)
        first = done if start_round is None else start_round
        if first not in (done, done - 1) or (first < done and self._has_sent(done)):
            raise UsageError(
                f"start_round={first} cannot be: rank {self.rank} has done {done} "
                f"rounds of {self.name!r}, and what is older is collected. Begin with "
                f"{done}, or leave start_round out; or choose a new name."
            )
        if done:
            self._find_kept()
            self._collect_before(done - 1)
        return first

    def put(self, round_number: int, key: str, frame: Sequence[Data]) -> bool:
        """Put what belongs to a round. False: it is there already, and stays."""
        self.kept.setdefault(round_number, set()).add(key)
        return self.place.store.put_new(key, frame)

    def finish(self, round_number: int) -> None:
        """Tell that this rank has done a round, and collect the one before."""
        said = b"%d\n" % (round_number + 1)
        self.place.store.put(self._done_key(self.rank), [said])
        self._collect_before(round_number)

    def done(self, rank: int) -> int:
        """Return how many rounds a rank has done."""
        key = self._done_key(rank)
        try:
            said = bytes(self.place.store.get(key, 0, 32))
        except NoSuchObject:
            return 0
        if not _DONE.fullmatch(said):
            raise CorruptError(
                f"{self.place.path(key)} holds {said!r}, which is no number of rounds. "
                "Choose a new name, on every rank."
            )
        return int(said)

    def absent(
        self, agreed: ReduceTerms, round_number: int, deadline: Deadline
    ) -> Unreachable:
        """Return the error that says who is missing, where, and since when."""
        missing = dict(self._missing(agreed, round_number))
        if not missing:
            return Unreachable(
                f"Round {round_number} of {self.name!r} waited {deadline.text}, and "
                f"the last of {self.world_size} ranks has come just now. Call again; "
                "what this rank has sent stays."
            )
        said = "; ".join(
            f"rank {rank} ({self.place.path(key)}), which has done {self.done(rank)}"
            for rank, key in list(missing.items())[:MAX_NAMED]
        )
        more = len(missing) - MAX_NAMED
        return Unreachable(
            f"Round {round_number} of {self.name!r} waits {deadline.text} for "
            f"{len(missing)} of {self.world_size} ranks: {said}"
            f"{f'; and {more} more' if more > 0 else ''}. Start them, or wait for "
            f"longer than timeout_s={deadline.timeout_s:g}; what this rank has sent "
            "stays."
        )

    def _missing(
        self, agreed: ReduceTerms, round_number: int
    ) -> Iterator[tuple[int, str]]:
        """Yield whose values are not there; if all are, whose part is not."""
        # Who reads everybody's values waits for nothing else: nobody puts a part.
        waits_for_parts = not agreed.is_direct
        for rank in range(self.world_size):
            if not self._is_there(key := self.up(round_number, rank)):
                waits_for_parts = False
                yield rank, key
        for part in range(agreed.num_parts if waits_for_parts else 0):
            if not self._is_there(key := self.mean(round_number, part)):
                yield agreed.owner(part, round_number), key

    def _has_sent(self, round_number: int) -> bool:
        return self._is_there(self.up(round_number, self.rank))

    def _is_there(self, key: str) -> bool:
        try:
            self.place.store.get(key, 0, 1)
        except NoSuchObject:
            return False
        return True

    def _require_same_about(self) -> None:
        """Agree what the name is for, or say how it differs."""
        about = {"format": FORMAT, "world_size": self.world_size}
        key, text = f"{self.name}/about", json.dumps(about, sort_keys=True)
        if self.place.store.put_new(key, [text.encode()]):
            return
        found = bytes(self.place.store.get(key, 0, MAX_ABOUT_BYTES))
        if found != text.encode():
            raise UsageError(
                f"{self.place.path(key)} says {found[:200]!r}, and this rank {text}. "
                "Start every rank with the same world_size and the same Atoll, or "
                "choose a new name."
            )

    def _collect_before(self, round_number: int) -> None:
        old = [each for each in self.kept if each < round_number]
        if old:
            keys = sorted(key for each in old for key in self.kept[each])
            self.place.store.remove(keys)
        for each in old:
            del self.kept[each]

    def _find_kept(self) -> None:
        """Find what an earlier life has put, and did not live to collect."""
        for item in self.place.store.items(f"{self.name}/"):
            found = _NUMBERS.fullmatch(item.key)
            if found and self._is_ours(item.key, found):
                self.kept.setdefault(int(found[1]), set()).add(item.key)

    def _is_ours(self, key: str, found: re.Match[str]) -> bool:
        if key.startswith(f"{self.name}/up/"):
            return int(found[2]) == self.rank
        owner = (int(found[1]) + int(found[2])) % self.world_size
        return key.startswith(f"{self.name}/mean/") and owner == self.rank

    def _done_key(self, rank: int) -> str:
        return f"{self.name}/done/{rank:05d}"
