"""The port between an island and its run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from atoll.protocol import Beat, JoinReply, JoinRequest, Position, Reception
from atoll.wire import Header

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

    def heartbeat(self, beat: Beat, *, at_once: bool = False) -> Position:
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
