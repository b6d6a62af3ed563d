"""The port to an object store.

Rule 1: an object is there whole, or not at all.
Rule 2: an object that is put with `put_new` is never changed; only its owner overwrites
    a key.
Rule 3: a key that was put can be read at once; a list may be late.
Rule 4: the abilities that a store lacks are in its `traits`, so that no work is lost to
    find out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from atoll.errors import UsageError

Data = bytes | bytearray | memoryview

MAX_KEY_BYTES = 512
MAX_PART_BYTES = 200
"""Below what buckets and file systems allow, so that a temporary name still fits."""

MAX_OBJECT_BYTES = 2**32
"""Below the 5 GB that S3 takes in one request: only one request can be conditional."""

_KEY = re.compile(r"[a-z0-9._-]+(/[a-z0-9._-]+)*")


@dataclass(frozen=True)
class StoreTraits:
    """What a store can do."""

    has_put_new: bool = True
    """Of two that put a new object at one key, exactly one is told that it did."""

    has_ranges: bool = True
    """A part of an object can be read without the rest."""


@dataclass(frozen=True, order=True)
class Item:
    """An object in a list."""

    key: str
    size: int


class Store(Protocol):
    """Keeps objects by key. Any number of threads may call, at once.

    A key is a relative path of parts in lower case, as `check_key` says. What a method
    raises is `Unreachable` when asking again may help, and `StoreDenied` when somebody
    has to give a permission first.
    """

    @property
    def traits(self) -> StoreTraits:
        """What this store can do."""
        ...

    def put_new(self, key: str, parts: Sequence[Data]) -> bool:
        """Put an object where there is none. False: there is one, and it stays.

        Without `traits.has_put_new` an object may be replaced.
        """
        ...

    def put(self, key: str, parts: Sequence[Data]) -> None:
        """Put an object, in the place of what was there."""
        ...

    def get(self, key: str, first: int = 0, size: int | None = None) -> memoryview:
        """Return up to `size` bytes from `first` on: fewer where the object ends.

        Raises:
            NoSuchObject: there is none.
        """
        ...

    def items(self, prefix: str) -> list[Item]:
        """Return the objects whose keys begin with `prefix`, in the order of keys.

        A prefix ends with a slash, or is empty. An object that was put or removed just
        now may be missing or there.
        """
        ...

    def remove(self, keys: Iterable[str]) -> None:
        """Remove objects; one that is not there is fine."""
        ...


def is_key(key: str) -> bool:
    """Return whether `key` can name an object of ours; others may be beside them."""
    parts = key.split("/")
    return bool(
        _KEY.fullmatch(key)
        and len(key) <= MAX_KEY_BYTES
        and all(len(part) <= MAX_PART_BYTES for part in parts)
        and not any(set(part) == {"."} for part in parts)
    )


def check_key(key: str) -> str:
    """Return `key` if it can name an object.

    Raises:
        UsageError: it has other characters, too many, or a part of dots.
    """
    if not is_key(key):
        raise UsageError(
            f"{key[:80]!r} cannot be an object's key. Use parts of a-z, 0-9, dots, "
            f"dashes and underscores between slashes, {MAX_KEY_BYTES} bytes at most."
        )
    return key


def check_prefix(prefix: str) -> str:
    """Return `prefix` if it is empty, or a key and a slash."""
    if prefix:
        check_key(prefix.removesuffix("/"))
        if not prefix.endswith("/"):
            raise UsageError(f"{prefix!r} is no prefix: it does not end with a slash.")
    return prefix


def size_of(parts: Sequence[Data]) -> int:
    """Return the bytes of an object to be put.

    Raises:
        UsageError: they are more than one request can take.
    """
    size = sum(memoryview(part).nbytes for part in parts)
    if size > MAX_OBJECT_BYTES:
        raise UsageError(
            f"An object of {size} bytes is too large for one request: "
            f"{MAX_OBJECT_BYTES} at most. Choose more fragments."
        )
    return size


def window(total: int, first: int, size: int | None) -> tuple[int, int]:
    """Return where a range that was asked for begins and ends in `total` bytes."""
    if first < 0 or (size is not None and size < 0):
        raise UsageError(f"first={first}, size={size}: a range begins and ends from 0.")
    begin = min(first, total)
    return begin, total if size is None else min(total, first + size)
