"""Constants on their way: from who founds a run to where the run keeps them.

Rule 1: they come before the first weights, so that a run that is founded has them, or
        has been founded without and says so.
Rule 2: a part at a time is in memory, and every byte goes into the digest that names
        the whole: what does not have it is not kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from atoll.errors import CorruptError
from atoll.exchange.base import Exchange
from atoll.protocol import JoinReply, ModelSpec, TensorSpec
from atoll.protocol.constants import bytes_of
from atoll.wire.digests import Bytes, Digesting, view_of

PART_BYTES = 2**24
"""The largest part of a constant that travels at once."""


class Constants(Protocol):
    """The constants of a model, where it lies. Only who keeps them calls it."""

    def parts(self, constant: TensorSpec, first: int = 0) -> Iterator[Bytes]:
        """Yield all bytes from `first` on, in parts of at most `PART_BYTES`."""
        ...


class Keeper(Protocol):
    """Has a run keep constants. Every exchange is one; a founder's host calls it."""

    def keep(self, joined: JoinReply, model: ModelSpec, constants: Constants) -> None:
        """Return when the run has the founder's constants, unless it wants none.

        Called before the first state. What the run has already is not brought again,
        so that who was interrupted may repeat it.

        Raises:
            UsageError: they are more than the run keeps.
            CorruptError: one does not have its digest.
            FoundingLost: another island founds the run.
        """
        ...


class KeepingExchange(Exchange, Keeper, Protocol):
    """All that an island needs of a run, founder or not."""


def verified(constant: TensorSpec, parts: Iterable[Bytes]) -> Iterator[memoryview]:
    """Yield parts, and raise behind the last one if they are not the constant.

    Raises:
        CorruptError: they have another digest, or are too many.
    """
    digesting, left = Digesting(), bytes_of(constant)
    for part in parts:
        view = view_of(part)
        left -= len(view)
        if left < 0:
            break
        digesting.add(view)
        yield view
    if left or digesting.digest.hex() != constant.digest:
        raise another(constant)


def another(constant: TensorSpec) -> CorruptError:
    """Return the error for bytes that do not have a constant's digest."""
    return CorruptError(
        f"What came as {constant.name!r} does not have the digest "
        f"{constant.digest[:12]} of that constant. Leave frozen parameters and integer "
        "buffers alone while a run is founded."
    )


def in_parts(data: Bytes, first: int = 0) -> Iterator[memoryview]:
    """Yield bytes that lie in memory, from `first` on, in parts."""
    view = view_of(data)
    for start in range(first, len(view), PART_BYTES):
        yield view[start : start + PART_BYTES]
