"""The port to an object store.

Rule 1: an object exists completely, or not at all.
Rule 2: an object that is put with `put_new` is never changed; only its owner overwrites
    a key.
Rule 3: a key that was put can be read immediately; a list may be late.
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
"""Below the limits of buckets and file systems, so that a temporary name fits too."""

MAX_OBJECT_BYTES = 2**32
"""Below the 5 GB of S3 for one request: only a single request can be conditional."""

_KEY = re.compile(r"[a-z0-9._-]+(/[a-z0-9._-]+)*")


@dataclass(frozen=True)
class StoreTraits:
    """The abilities of a store."""

    has_put_new: bool = True
    """Conditional put: of two clients that create one key, exactly one succeeds."""

    has_ranges: bool = True
    """A part of an object can be read without the rest."""


@dataclass(frozen=True, order=True)
class Item:
    """An object in a list."""

    key: str
    size: int


class Store(Protocol):
    """Keeps objects by key. Any number of threads may call concurrently.

    A key is a relative path of parts in lower case: see `check_key`. Methods raise
    `Unreachable` if a retry may help, and `StoreDenied` if a permission is missing.
    """

    @property
    def traits(self) -> StoreTraits:
        """The abilities of this store."""
        ...

    def put_new(self, key: str, parts: Sequence[Data]) -> bool:
        """Put an object if the key has none. False: it has one, which stays.

        Without `traits.has_put_new` an object may be replaced.
        """
        ...

    def put(self, key: str, parts: Sequence[Data]) -> None:
        """Put an object; it replaces the previous one, if any."""
        ...

    def get(self, key: str, first: int = 0, size: int | None = None) -> memoryview:
        """Return up to `size` bytes from `first` on: fewer if the object ends before.

        Raises:
            NoSuchObject: there is none.
        """
        ...

    def items(self, prefix: str) -> list[Item]:
        """Return the objects whose keys begin with `prefix`, in the order of keys.

        A prefix ends with a slash, or is empty. The list may not show puts and removals
        of the last moments.
        """
        ...

    def remove(self, keys: Iterable[str]) -> None:
        """Remove objects; missing ones are ignored."""
        ...


def is_key(key: str) -> bool:
    """Return whether `key` is valid; a bucket may hold objects of other programs."""
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
        UsageError: they exceed the limit of one request.
    """
    size = sum(memoryview(part).nbytes for part in parts)
    if size > MAX_OBJECT_BYTES:
        raise UsageError(
            f"An object of {size} bytes is too large for one request: "
            f"{MAX_OBJECT_BYTES} at most. Choose more fragments."
        )
    return size


def window(total: int, first: int, size: int | None) -> tuple[int, int]:
    """Return the begin and the end of a range within `total` bytes."""
    if first < 0 or (size is not None and size < 0):
        raise UsageError(f"first={first}, size={size}: a range begins and ends from 0.")
    begin = min(first, total)
    return begin, total if size is None else min(total, first + size)
