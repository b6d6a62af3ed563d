"""An object store in virtual time, and the client of a process.

Rule 1: a request and its answer are messages: each may be late, lost, duplicated or cut
    off, and takes effect when it arrives, if it does. The last request of a process
    that dies takes effect or not.
Rule 2: an object is complete or absent. A put takes time to send, and a process that
    dies meanwhile has put nothing.
Rule 3: reads see the last put. A list may be late: it may miss an object that was put
    just now, and still contain one that was removed.
Rule 4: a failing store answers with an error, before or after the effect of a request.
Rule 5: an object that is damaged stays so until it is put again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from atoll.errors import NoSuchObject, Unreachable
from atoll.simulate.network import ReplyFunction
from atoll.simulate.process import SimProcess
from atoll.simulate.scheduler import ProcessIncarnation
from atoll.simulate.storms import STORE
from atoll.simulate.world import SimWorld, StoreTroubles
from atoll.store import Data, Item, StoreTraits, check_key
from atoll.store.base import check_prefix, size_of, window

REQUEST_S = 10.0
"""Timeout of a request."""

SENT_BYTES_PER_S = 20_000.0
"""Upload rate of a process that is not slowed down."""

DAMAGE_S = 0.5
"""Delay of a damage to an object that is put later: its writer may read it first."""

HEAD_BYTES = 256
"""Approximate size of a request without the bytes of its object."""


@dataclass(frozen=True)
class Get:
    """Request for some bytes of an object."""

    incarnation: ProcessIncarnation
    key: str
    first: int
    size: int | None


@dataclass(frozen=True)
class Put:
    """Request to write an object: over another, or only if there is none."""

    incarnation: ProcessIncarnation
    key: str
    content: bytes = field(repr=False)
    is_new: bool


@dataclass(frozen=True)
class List:
    """Request for the objects under a prefix."""

    incarnation: ProcessIncarnation
    prefix: str


@dataclass(frozen=True)
class Remove:
    """Request to remove objects."""

    incarnation: ProcessIncarnation
    keys: tuple[str, ...]


Request = Get | Put | List | Remove


@dataclass
class Bucket:
    """The store's side: its objects and its faults. `begin` starts its process."""

    world: SimWorld
    objects: dict[str, bytes] = field(default_factory=dict)
    troubles: StoreTroubles = field(default_factory=StoreTroubles)
    on_put: Callable[[str, bytes], None] = field(default=lambda key, content: None)
    """Called with key and content of every object that is put."""

    changed_s: dict[str, float] = field(default_factory=dict)
    """When an object was put first, or removed."""

    _removed: dict[str, int] = field(default_factory=dict)
    """Sizes of removed objects, which late lists may contain."""

    _originals: dict[str, bytes] = field(default_factory=dict)
    """The content of damaged objects before the damage."""

    _awaited: list[tuple[str, str]] = field(default_factory=list)
    """Damages of objects that do not exist yet: the kind, and the prefix of the key."""

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
        if not request.incarnation.is_alive and self._rng.random() < 0.5:
            return  # cut off in the middle, with its sender
        if self._draw(max(self.troubles.outages, default=0.0)):
            if self._draw(0.5):
                with suppress(NoSuchObject):
                    self.perform(request)
            answer(Unreachable(f"503 for {type(request).__name__}: slow down."))
            return
        try:
            result = self.perform(request)
        except NoSuchObject as exc:
            answer(exc, size_bytes=HEAD_BYTES)
            return
        size = len(result) if isinstance(result, memoryview) else 0
        answer(result, size_bytes=HEAD_BYTES + size)

    def perform(self, request: Request) -> object:
        """Perform a request immediately, and return the answer."""
        match request:
            case Get():
                return self._get(request)
            case Put():
                return self._put(request.key, request.content, is_new=request.is_new)
            case List():
                return self._list(request.prefix)
            case Remove():
                self._remove(request.keys)
        return None

    def _get(self, request: Get) -> memoryview:
        content = self.objects.get(request.key)
        if content is None:
            raise NoSuchObject(f"There is no object {request.key!r}.", key=request.key)
        begin, end = window(len(content), request.first, request.size)
        return memoryview(content)[begin:end]

    def _put(self, key: str, content: bytes, *, is_new: bool) -> bool:
        if key in self.objects:
            if is_new:
                return False
        else:
            self.changed_s[key] = self.world.scheduler.now_s
            self._removed.pop(key, None)
        self.objects[key] = content
        self._originals.pop(key, None)
        self.on_put(key, content)
        for awaited in [
            damage for damage in self._awaited if key.startswith(damage[1])
        ]:
            self._awaited.remove(awaited)
            scheduler = self.world.scheduler
            at_s = scheduler.now_s + DAMAGE_S
            scheduler.at(at_s, partial(self.damage, *awaited))
        return True

    def damage(self, kind: str, prefix: str = "") -> str | None:
        """Damage an object whose key begins with `prefix`, and return its key.

        None: there is none yet, and the first one will be damaged when it is put.
        """
        scheduler = self.world.scheduler
        rng = scheduler.random(f"damage {kind} {prefix} {scheduler.now_s}")
        keys = sorted(key for key in self.objects if key.startswith(prefix))
        if not keys:
            self._awaited.append((kind, prefix))
            return None
        key = rng.choice(keys)
        content = self.objects[key]
        self._originals.setdefault(key, content)
        others = [
            other
            for other in keys
            if _kind(other) == _kind(key) and self.objects[other] != content
        ]
        if kind == "remove":
            self._remove([key])
        elif kind == "swap" and others:
            self.objects[key] = self.objects[rng.choice(others)]
        elif kind == "cut":
            self.objects[key] = content[: rng.randrange(len(content))]
        else:
            bit = rng.randrange(8 * len(content))
            changed = bytearray(content)
            changed[bit // 8] ^= 1 << bit % 8
            self.objects[key] = bytes(changed)
        scheduler.emit(STORE, "damage", f"{kind} {key}")
        return key

    def original(self, key: str) -> bytes | None:
        """Return an object as it was put, without later damage."""
        return self._originals.get(key, self.objects.get(key))

    def _list(self, prefix: str) -> list[Item]:
        listed = [
            Item(key, len(content))
            for key, content in self.objects.items()
            if key.startswith(prefix) and not self._is_unseen(key)
        ]
        listed += [
            Item(key, size)
            for key, size in self._removed.items()
            if key.startswith(prefix) and self._is_unseen(key)
        ]
        return sorted(listed)

    def _remove(self, keys: Iterable[str]) -> None:
        for key in keys:
            content = self.objects.pop(key, None)
            if content is not None:
                self._removed[key] = len(content)
                self.changed_s[key] = self.world.scheduler.now_s

    def _is_unseen(self, key: str) -> bool:
        """Return whether a list misses the last change of an object."""
        if not self.troubles.list_lags:
            return False
        age_s = self.world.scheduler.now_s - self.changed_s[key]
        lag_s = max(self.troubles.list_lags)
        return age_s < lag_s and age_s < lag_s * self._rng.random()

    def _draw(self, rate: float) -> bool:
        return rate > 0.0 and self._rng.random() < rate


def _kind(key: str) -> str:
    """Return the part of a key that objects of one kind share."""
    return re.sub(r"[^/]*[0-9][^/]*", "", key)


class SimStore:
    """Client of a `Bucket` for one incarnation of a process. Implements `Store`."""

    traits = StoreTraits()

    def __init__(self, world: SimWorld, process: SimProcess) -> None:
        self._network, self._process = world.network, process
        self._incarnation = process.incarnation
        self.is_locked: Callable[[], bool] = lambda: False
        """Whether the caller holds a lock that others wait for."""

    def put_new(self, key: str, parts: Sequence[Data]) -> bool:
        return bool(self._send(key, parts, is_new=True))

    def put(self, key: str, parts: Sequence[Data]) -> None:
        self._send(key, parts, is_new=False)

    def get(self, key: str, first: int = 0, size: int | None = None) -> memoryview:
        window(0, first, size)  # refuses negative numbers before the request is sent
        content = self._ask(Get(self._incarnation, check_key(key), first, size))
        assert isinstance(content, memoryview)
        return content

    def items(self, prefix: str) -> list[Item]:
        items = self._ask(List(self._incarnation, check_prefix(prefix)))
        assert isinstance(items, list)
        return items

    def remove(self, keys: Iterable[str]) -> None:
        self._ask(Remove(self._incarnation, tuple(map(check_key, keys))))

    def _send(self, key: str, parts: Sequence[Data], *, is_new: bool) -> object:
        size = size_of(parts)
        request = Put(self._incarnation, check_key(key), b"".join(parts), is_new)
        # The effect comes with the last byte: a process that dies before it has put
        # nothing, and one that is frozen meanwhile may continue an hour later.
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
