"""The ports of an exchange: taking part in a run, its constants and its rows.

Rules of constants, the frozen tensors that a founder uploads to its run:

Rule 1: they are uploaded before the first weights, so that a founded run has them, or
        was founded without them and reports that.
Rule 2: one part at a time is in memory, and every byte is hashed: a constant with
        another digest than its name is not kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from atoll.data import Ask, Claim, DataSpec
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
    """The run's receipt for this state or outcome; empty if there is none."""


@dataclass(frozen=True)
class Outcome:
    """The agreed frame of a round, and the present position of the run."""

    agreed: Frame
    """Its body is empty once the run has dropped it; the roster is always present."""

    position: Position
    receipt: bytes = b""
    """The run's receipt for the state after this round; empty if there is none."""

    is_made_of_updates: bool = False
    """The exchange has computed the body from updates. It would have to read more of
    them for the run's state, so that an island that is behind takes the outcomes."""

    @property
    def has_body(self) -> bool:
        header = self.agreed.header
        return header.is_sealed and len(self.agreed.body) == header.body_bytes


class Exchange(Protocol):
    """Moves sealed updates to a run, and its outcomes back. Islands' hosts call it.

    Every method may be called from any thread.
    """

    def join(self, request: JoinRequest) -> JoinReply:
        """Make the island a member, and return the settings that islands share.

        The first island of an empty run founds it: it publishes the state of every
        fragment before anything else, and the others wait for that here.

        Raises:
            ModelError: the island's model is not the run's.
            UsageError: the name is taken by a live island, or the run is full.
        """
        ...

    def heartbeat(self, beat: Heartbeat, *, at_once: bool = False) -> Position:
        """Renew the island's lease, and return the position of the run.

        Waits for the run only with `at_once`; otherwise a later call may send it.

        Raises:
            LeaseLost: another incarnation holds the island's name.
        """
        ...

    def publish(self, frame: Frame) -> Reception:
        """Make an update, a departing update or a founding state known to the run.

        For a run that has lost rounds: its last outcomes, then the state after them.

        Publishing the same frame twice is one publication. The frame's body belongs
        to the run until the round's outcome is known, and permanently if it departs.
        The reception tells whether the frame is accepted; only the outcome tells
        whether it counted.

        Raises:
            Refused: the run has another update of this island for the round, or the
                fragment does not accept the round yet.
            CorruptError: the body does not verify.
            LeaseLost: another incarnation holds the island's name.
        """
        ...

    def outcome(
        self, fragment: int, round: int, *, wait_s: float, has_body: bool = True
    ) -> Outcome | None:
        """Return the outcome of a round, or None if there is none after `wait_s`.

        An exchange whose requests are expensive may wait a few seconds instead. With
        `has_body` False only the header is needed, and the body may be omitted.

        Raises:
            RunEnded: the round will never open.
            OutcomeLost: the round is over, and the run has lost its outcome.
        """
        ...

    def state(self, fragment: int) -> Frame:
        """Return anchor and velocity of a fragment at its last committed round."""
        ...

    def leave(self, island: str, incarnation: int) -> None:
        """End the membership: no round waits for this island. Safe to repeat."""
        ...


PART_BYTES = 2**24
"""The largest part of a constant in one call."""


class Constants(Protocol):
    """Reads the constants of a model. Only `ConstantsUploader.keep` calls it."""

    def parts(self, constant: TensorSpec, first: int = 0) -> Iterator[Bytes]:
        """Yield all bytes from `first` on, in parts of at most `PART_BYTES`."""
        ...


class ConstantsUploader(Protocol):
    """Uploads constants to a run. Every exchange is one; a founder's host calls it."""

    def keep(self, joined: JoinReply, model: ModelSpec, constants: Constants) -> None:
        """Return when the run has the founder's constants, unless it wants none.

        Called before the first state. Safe to repeat after an interruption: bytes that
        the run has already are not sent again.

        Raises:
            UsageError: they are larger than the run accepts.
            CorruptError: one does not have its digest.
            FoundingLost: another island founds the run.
        """
        ...


class FoundingExchange(Exchange, ConstantsUploader, Protocol):
    """An exchange for founders and all other islands."""


class Dealer(Protocol):
    """Deals out the rows of a run with `data.order = "run"`. Islands' hosts call it."""

    def open_data(self, island: str, incarnation: int, data: DataSpec) -> DataSpec:
        """Describe the data of an island, and return the description that the run has.

        Called before the first claim, and again when a stream has come to its end.
        Safe to repeat.

        Raises:
            UsageError: it is empty, or another dataset than that of the run.
        """
        ...

    def claim(self, ask: Ask) -> Claim:
        """Return turns of the run's order, which now belong to the island.

        They are durable before this returns. The same number again gets the same
        turns, so it is safe to repeat. Without turns the island asks again later,
        under the same number, unless the data is over.

        Raises:
            UsageError: no island has opened the data.
            LeaseLost: another incarnation holds the island's name.
        """
        ...


def verified(constant: TensorSpec, parts: Iterable[Bytes]) -> Iterator[memoryview]:
    """Yield parts, and raise after the last one if they are not the constant.

    Raises:
        CorruptError: they have another digest or another size.
    """
    hasher, remaining_bytes = Blake3Hasher(), bytes_of(constant)
    for part in parts:
        view = view_of(part)
        remaining_bytes -= len(view)
        if remaining_bytes < 0:
            break
        hasher.add(view)
        yield view
    if remaining_bytes or hasher.digest.hex() != constant.digest:
        raise digest_error(constant)


def digest_error(constant: TensorSpec) -> CorruptError:
    """Return the error for bytes that do not have a constant's digest."""
    return CorruptError(
        f"The bytes of constant {constant.name!r} do not have its digest "
        f"{constant.digest[:12]}. Do not change frozen parameters and integer buffers "
        "while a run is founded."
    )


def in_parts(data: Bytes, first: int = 0) -> Iterator[memoryview]:
    """Yield bytes from memory, from `first` on, in parts."""
    view = view_of(data)
    for start in range(first, len(view), PART_BYTES):
        yield view[start : start + PART_BYTES]
