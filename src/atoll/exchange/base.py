"""The ports of an exchange: taking part in a run, and keeping its constants.

Rules of constants, which are frozen tensors that a founder brings to its run:

Rule 1: they come before the first weights, so that a founded run has them, or was
        founded without them and reports that.
Rule 2: one part at a time is in memory, and every byte is hashed: a constant with
        another digest than its name is not kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from atoll.errors import CorruptError
from atoll.protocol import (
    Heartbeat,
    JoinReply,
    JoinRequest,
    ModelSpec,
    Position,
    Reception,
    TensorSpec,
)
from atoll.protocol.model import bytes_of
from atoll.wire import Header
from atoll.wire.digests import Blake3Hasher, Bytes, view_of

U8 = NDArray[np.uint8]


@dataclass(frozen=True)
class Frame:
    """A header and the body it describes."""

    header: Header
    body: U8
    receipt: bytes = b""
    """The run's receipt for this state or outcome; empty: none came with it."""


@dataclass(frozen=True)
class Outcome:
    """What a round came to, and where the run is now."""

    agreed: Frame
    """Its body is empty once the run keeps it no more; its roster stays for good."""

    position: Position
    receipt: bytes = b""
    """The run's receipt for the state after this round; empty: none came."""

    @property
    def has_body(self) -> bool:
        header = self.agreed.header
        return header.is_sealed and len(self.agreed.body) == header.body_bytes


class Exchange(Protocol):
    """Moves sealed updates to a run, and its outcomes back. Islands' hosts call it.

    Every method may be called from any thread.
    """

    def join(self, request: JoinRequest) -> JoinReply:
        """Make the island a member, and say what it must share with the others.

        The first island of an empty run founds it: it publishes the state of every
        fragment before anything else, and the others wait for that here.

        Raises:
            ModelError: the island's model is not the run's.
            UsageError: the name is taken by a live island, or the run is full.
        """
        ...

    def heartbeat(self, beat: Heartbeat, *, at_once: bool = False) -> Position:
        """Say that the island lives, and learn where the run is.

        Never waits, unless it is to be said at once.

        Raises:
            LeaseLost: another incarnation holds the island's name.
        """
        ...

    def publish(self, frame: Frame) -> Reception:
        """Make an update, a departing update or a founding state known to the run.

        For a run that has lost rounds: its last outcomes, then the state after them.

        Publishing the same frame twice is one publication. The frame's body belongs
        to the run until the round's outcome is known, and for good if it departs.
        The answer says whether the frame stands; only the outcome says what counted.

        Raises:
            Refused: another update stands for this island and round already, or the
                round is not one this fragment can take yet.
            CorruptError: the body does not verify.
            LeaseLost: another incarnation holds the island's name.
        """
        ...

    def outcome(self, fragment: int, round: int, *, wait_s: float) -> Outcome | None:
        """Return what a round came to, or None when `wait_s` have passed without.

        An exchange for which asking is dear may wait a few seconds instead.

        Raises:
            RunEnded: the round will never open.
            OutcomeLost: the round is over, and the run has lost how it went.
        """
        ...

    def state(self, fragment: int) -> Frame:
        """Return anchor and velocity of a fragment at its last committed round."""
        ...

    def leave(self, island: str, incarnation: int) -> None:
        """End the membership. Nobody waits for this island any more; safe to repeat."""
        ...


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
    digesting, left = Blake3Hasher(), bytes_of(constant)
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
