"""An object store in virtual time, and the way of a process to it.

Rule 1: a request and its answer are messages: each may be late, lost, doubled or cut
    off, and takes effect when it arrives, if it does. Who has died meanwhile may have
    had its way or not.
Rule 2: an object is there whole or not at all. What is put takes time to send, and who
    dies in the middle of it has put nothing.
Rule 3: what was put is read at once. A list may be late: an object that was put just
    now may be missing from it, and one that was removed may still be there.
Rule 4: a store that fails says so before or after it has done what was asked.
Rule 5: an object that is damaged stays so until somebody puts it again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from atoll.errors import NoSuchObject, Unreachable
from atoll.simulate.network import (
    ReplyFunction,
)
from atoll.simulate.process import (
    SimProcess,
)
from atoll.simulate.scheduler import (
    ProcessIncarnation,
)
from atoll.simulate.storms import STORE
from atoll.simulate.world import (
    SimWorld,
    StoreTroubles,
)
from atoll.store import (
    Data,
    Item,
    StoreTraits,
    check_key,
)
from atoll.store.base import check_prefix, size_of, window

REQUEST_S = 10.0
"""How long a request waits for its answer."""

SENT_BYTES_PER_S = 20_000.0
"""How fast an object leaves a process that nothing slows down."""

DAMAGE_S = 0.5
"""How soon an object is damaged that was awaited: its writer may have read it."""

HEAD_BYTES = 256
"""What a request takes beside the bytes of its object, about."""


@dataclass(frozen=True)
class Get:
    """Asks for some bytes of an object."""

    life: ProcessIncarnation
    key: str
    first: int
    size: int | None


@dataclass(frozen=True)
class Put:
    """Brings an object, in the place of another or only where there is none."""

    life: ProcessIncarnation
    key: str
    whole: bytes = field(repr=False)
    is_new: bool


@dataclass(frozen=True)
class List:
    """Asks which objects there are."""

    life: ProcessIncarnation
    prefix: str


@dataclass(frozen=True)
class Remove:
    """Takes objects away."""

    life: ProcessIncarnation
    keys: tuple[str, ...]


Request = Get | Put | List | Remove


@dataclass
class Bucket:
    """The store's side: what it keeps, and how it fails. `begin` starts its process."""

    world: SimWorld
    objects: dict[str, bytes] = field(default_factory=dict)
    troubles: StoreTroubles = field(default_factory=StoreTroubles)
    on_put: Callable[[str, bytes], None] = field(default=lambda key, whole: None)
    """Told of every object as it comes to be there."""

    changed_s: dict[str, float] = field(default_factory=dict)
    """When an object was put first, or removed."""

    _gone: dict[str, int] = field(default_factory=dict)
    """Sizes of what was removed: late lists may have it."""

    _originals: dict[str, bytes] = field(default_factory=dict)
    """What damaged objects were before."""

    _awaited: list[tuple[str, str]] = field(default_factory=list)
    """What is to be damaged as soon as it is there: how, and its key's beginning."""

    def __post_init__(self) -> None:
        self._process = self.world.add(STORE)
        self.troubles.damage = self.damage
        self.world.stores[STORE] = self.troubles
        self._rng = self.world.scheduler.random(STORE)

    def begin(self) -> None:
        self._process.start(self._live)

    def _live(self) -> None:
        self.world.network.listen(self._process, self._listen)

    def _listen(self, request: object, answer: ReplyFunction) -> None:
        assert isinstance(request, Request)
        if not request.life.is_alive and self._rng.random() < 0.5:
            return  # cut off in the middle, with its sender
        if self._draw(max(self.troubles.outages, default=0.0)):
            if self._draw(0.5):
                with suppress(NoSuchObject):
                    self.perform(request)
            answer(Unreachable(f"503 for {type(request).__name__}: slow down."))
            return
        try:
            found = self.perform(request)
        except NoSuchObject as exc:
            answer(exc, size_bytes=HEAD_BYTES)
            return
        size = len(found) if isinstance(found, memoryview) else 0
        answer(found, size_bytes=HEAD_BYTES + size)

    def perform(self, request: Request) -> object:
        """Do what is asked, at once; return the answer."""
        match request:
            case Get():
                return self._get(request)
            case Put():
                return self._put(request.key, request.whole, is_new=request.is_new)
            case List():
                return self._list(request.prefix)
            case Remove():
                self._remove(request.keys)
        return None

    def _get(self, request: Get) -> memoryview:
        whole = self.objects.get(request.key)
        if whole is None:
            raise NoSuchObject(f"There is no object {request.key!r}.", key=request.key)
        begin, end = window(len(whole), request.first, request.size)
        return memoryview(whole)[begin:end]

    def _put(self, key: str, whole: bytes, *, is_new: bool) -> bool:
        if key in self.objects:
            if is_new:
                return False
        else:
            self.changed_s[key] = self.world.scheduler.now_s
            self._gone.pop(key, None)
        self.objects[key] = whole
        self._originals.pop(key, None)
        self.on_put(key, whole)
        for awaited in [each for each in self._awaited if key.startswith(each[1])]:
            self._awaited.remove(awaited)
            scheduler = self.world.scheduler
            at_s = scheduler.now_s + DAMAGE_S
            scheduler.at(at_s, partial(self.damage, *awaited))
        return True

    def damage(self, how: str, prefix: str = "") -> str | None:
        """Damage an object whose key begins with `prefix`, and return its key.

        None: there is none yet, and the first one will be damaged when it is put.
        """
        scheduler = self.world.scheduler
        rng = scheduler.random(f"damage {how} {prefix} {scheduler.now_s}")
        found = sorted(key for key in self.objects if key.startswith(prefix))
        if not found:
            self._awaited.append((how, prefix))
            return None
        key = rng.choice(found)
        whole = self.objects[key]
        self._originals.setdefault(key, whole)
        others = [
            each
            for each in found
            if _kind(each) == _kind(key) and self.objects[each] != whole
        ]
        if how == "remove":
            self._remove([key])
        elif how == "swap" and others:
            self.objects[key] = self.objects[rng.choice(others)]
        elif how == "cut":
            self.objects[key] = whole[: rng.randrange(len(whole))]
        else:
            bit = rng.randrange(8 * len(whole))
            changed = bytearray(whole)
            changed[bit // 8] ^= 1 << bit % 8
            self.objects[key] = bytes(changed)
        scheduler.tell(STORE, "damage", f"{how} {key}")
        return key

    def original(self, key: str) -> bytes | None:
        """Return an object as it was put, whatever has become of it since."""
        return self._originals.get(key, self.objects.get(key))

    def _list(self, prefix: str) -> list[Item]:
        listed = [
            Item(key, len(whole))
            for key, whole in self.objects.items()
            if key.startswith(prefix) and not self._is_unseen(key)
        ]
        listed += [
            Item(key, size)
            for key, size in self._gone.items()
            if key.startswith(prefix) and self._is_unseen(key)
        ]
        return sorted(listed)

    def _remove(self, keys: Iterable[str]) -> None:
        for key in keys:
            whole = self.objects.pop(key, None)
            if whole is not None:
                self._gone[key] = len(whole)
                self.changed_s[key] = self.world.scheduler.now_s

    def _is_unseen(self, key: str) -> bool:
        """Return whether a list misses what was done to an object last."""
        if not self.troubles.list_lags:
            return False
        age_s = self.world.scheduler.now_s - self.changed_s[key]
        lag_s = max(self.troubles.list_lags)
        return age_s < lag_s and age_s < lag_s * self._rng.random()

    def _draw(self, rate: float) -> bool:
        return rate > 0.0 and self._rng.random() < rate


def _kind(key: str) -> str:
    """Return what is the same in the keys of objects of one kind."""
    return re.sub(r"[^/]*[0-9][^/]*", "", key)


class SimStore:
    """A process's way to a `Bucket`, for one life of it. Implements `Store`."""

    traits = StoreTraits()

    def __init__(self, world: SimWorld, process: SimProcess) -> None:
        self._network, self._process = world.network, process
        self._life = process.life
        self.is_locked: Callable[[], bool] = lambda: False
        """Whether the caller holds a lock that others wait for."""

    def put_new(self, key: str, parts: Sequence[Data]) -> bool:
        return bool(self._send(key, parts, is_new=True))

    def put(self, key: str, parts: Sequence[Data]) -> None:
        self._send(key, parts, is_new=False)

    def get(self, key: str, first: int = 0, size: int | None = None) -> memoryview:
        window(0, first, size)  # who asks for less than nothing is told before
        found = self._ask(Get(self._life, check_key(key), first, size))
        assert isinstance(found, memoryview)
        return found

    def items(self, prefix: str) -> list[Item]:
        found = self._ask(List(self._life, check_prefix(prefix)))
        assert isinstance(found, list)
        return found

    def remove(self, keys: Iterable[str]) -> None:
        self._ask(Remove(self._life, tuple(map(check_key, keys))))

    def _send(self, key: str, parts: Sequence[Data], *, is_new: bool) -> object:
        size = size_of(parts)
        request = Put(self._life, check_key(key), b"".join(parts), is_new)
        # The effect comes with the last byte: who dies before has put nothing, and who
        # stands still meanwhile goes on with it an hour later.
        self._process.work(size / SENT_BYTES_PER_S)
        return self._ask(request, size=size)

    def _ask(self, request: Request, *, size: int = 0) -> object:
        assert not self.is_locked(), f"a lock is held over {request}"
        return self._network.call(
            self._process,
            STORE,
            request,
            size_bytes=HEAD_BYTES + size,
            timeout_s=REQUEST_S,
        )
