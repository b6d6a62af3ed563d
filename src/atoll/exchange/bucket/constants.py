"""Constants in a bucket: objects of a founding, which its document names.

Rule 1: they are put before the document that makes the founding the run's, verified
        while they go: a run that says that it keeps a constant has all of its objects.
Rule 2: an object is bounded, so that a range of a constant is a range of few of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from atoll.errors import CorruptError, NoSuchObject
from atoll.exchange.bucket import keys
from atoll.exchange.bucket.documents import RESTORE, RunDocument
from atoll.exchange.constants import PART_BYTES, verified
from atoll.protocol import TensorSpec
from atoll.protocol.constants import bytes_of, keepable
from atoll.store import Data, Store
from atoll.wire.digests import Bytes, Digesting

OBJECT_BYTES = 4 * PART_BYTES
"""Of every object of a constant but the last."""


def put_constant(
    put: Callable[[str, Sequence[Data]], object],
    nonce: str,
    constant: TensorSpec,
    parts: Iterable[Bytes],
) -> None:
    """Put a constant for the founding of that nonce. Safe to repeat.

    Raises:
        CorruptError: the parts do not have its digest; no document may name it.
    """
    whole = verified(constant, parts)
    for number, views in enumerate(_objects(whole)):
        put(keys.constant_part(nonce, constant.digest, number), views)


def _objects(parts: Iterator[memoryview]) -> Iterator[list[Data]]:
    """Yield parts together, as many bytes as an object has."""
    views: list[Data] = []
    left = OBJECT_BYTES
    for part in parts:
        while part:
            views.append(part[:left])
            part, left = part[left:], left - len(views[-1])
            if not left:
                yield views
                views, left = [], OBJECT_BYTES
    if views:
        yield views


def constants_of(document: RunDocument) -> tuple[TensorSpec, ...]:
    """Return the constants that a run in a bucket keeps.

    Raises:
        CorruptError: the document names one that the model does not have.
    """
    known = keepable(document.model)
    if unknown := set(document.constants) - known.keys():
        raise CorruptError(
            f"{keys.RUN} names the constant {min(unknown)[:12]}, and the model has "
            "none like it. Whoever wrote it has to put it right."
        )
    return tuple(known[digest] for digest in document.constants)


class ConstantObjects:
    """Reads the constants of a run. Implements `Constants`."""

    def __init__(self, store: Store, document: RunDocument) -> None:
        self._store, self._nonce = store, document.founding

    def parts(self, constant: TensorSpec, first: int = 0) -> Iterator[Bytes]:
        size, digesting, is_whole = bytes_of(constant), Digesting(), first == 0
        while first < size:
            last = min(first + PART_BYTES, size)
            part = self.read(constant, first, last)
            digesting.add(part)
            yield part
            first = last
        if is_whole and digesting.digest.hex() != constant.digest:
            key = keys.constant_part(self._nonce, constant.digest, 0)
            raise CorruptError(
                f"{constant.name!r}, which is {key} and what follows it, does not have "
                f"the digest in its name. {RESTORE}"
            )

    def read(self, constant: TensorSpec, first: int, last: int) -> bytearray:
        """Return some bytes of a constant.

        Raises:
            CorruptError: they are not there any more.
        """
        data = bytearray()
        while first + len(data) < last:
            number, offset = divmod(first + len(data), OBJECT_BYTES)
            left = min(OBJECT_BYTES - offset, last - first - len(data))
            data += self._get(constant, number, offset, left)
        return data

    def _get(
        self, constant: TensorSpec, number: int, offset: int, size: int
    ) -> memoryview:
        key = keys.constant_part(self._nonce, constant.digest, number)
        try:
            found = self._store.get(key, offset, size)
        except NoSuchObject:
            found = memoryview(b"")
        if not found:
            raise CorruptError(
                f"{key} is gone, or shorter than it was: {constant.name!r} cannot be "
                "read. Give its values with source=."
            )
        return found
