"""The calls of an island to its coordinator; each is safe to repeat."""

from __future__ import annotations

from dataclasses import dataclass, field

from atoll.data import Ask, Claim, DataSpec
from atoll.exchange.base import Frame, Outcome
from atoll.protocol import Heartbeat, JoinReply, JoinRequest, Position, Reception
from atoll.wire import Header, frame_bytes
from atoll.wire.digests import Bytes, view_of

SMALL_BYTES = 256
"""The approximate size of a call without a frame on the wire."""

LONG_POLL_S = 2.0
"""How long a poll for an outcome waits. An island that leaves waits as long."""


@dataclass(frozen=True)
class JoinCall:
    """Join as the holder of this key."""

    request: JoinRequest
    key: bytes
    nonce: bytes
    """Created once per incarnation: a repeated call does not make a new one."""


@dataclass(frozen=True)
class FoundCall:
    """Upload the run's first weights, one state frame per fragment."""

    island: str
    incarnation: int
    states: tuple[Frame, ...]
    is_given: bool = field(default=False, compare=False)
    """True: no other object uses these bodies, so the callee may keep them."""


@dataclass(frozen=True)
class KeepCall:
    """Upload a part of a constant before the first weights; an empty one is a query."""

    island: str
    incarnation: int
    digest: str
    """Digest of the whole constant, in hex; it identifies the constant."""

    first: int
    """Offset of the part, in bytes."""

    part: Bytes = b""


@dataclass(frozen=True)
class KeepReply:
    """The number of bytes of a constant that the run has, from its beginning on."""

    bytes: int


@dataclass(frozen=True)
class RecoverCall:
    """Upload a state that the run has lost, with the headers of its last outcomes."""

    island: str
    incarnation: int
    state: Frame
    """With its receipt, which is required."""

    outcomes: tuple[Header, ...]
    receipts: tuple[bytes, ...] = ()
    """Of the outcomes, in their order."""


@dataclass(frozen=True)
class HeartbeatCall:
    """Renew the island's lease."""

    beat: Heartbeat


@dataclass(frozen=True)
class OfferCall:
    """Ask whether an update is wanted, by its header."""

    header: Header


@dataclass(frozen=True)
class PublishCall:
    """Upload an update, departing or not."""

    frame: Frame
    beat: Heartbeat | None = None
    """The island's position at the seal, newer than its last heartbeat."""


@dataclass(frozen=True)
class AgreedCall:
    """Upload a mean that islands have reduced, or ask for its roster first."""

    island: str
    incarnation: int
    updates: tuple[Header, ...]
    """Of all participating islands, for one round of one fragment."""

    agreed: Frame | None = None
    """None: a preview; the reply is the header that the outcome would have."""

    vouchers: tuple[bytes, ...] = ()
    """A voucher of each island for the agreed frame, in the order of `updates`."""

    @property
    def fragment(self) -> int:
        return self.updates[0].fragment

    @property
    def round(self) -> int:
        return self.updates[0].round


@dataclass(frozen=True)
class OutcomeCall:
    """Ask for the outcome of a round."""

    fragment: int
    round: int
    wait_s: float = 0.0
    """How long the response may wait for the outcome."""

    beat: Heartbeat | None = None
    """The asking island's heartbeat; the poll renews its lease."""

    has_body: bool = True
    """False: the header with the roster is enough."""


@dataclass(frozen=True)
class StateCall:
    """Ask for a fragment's anchor and velocity."""

    fragment: int


@dataclass(frozen=True)
class DataCall:
    """Describe the data of an island to a run that deals out rows."""

    island: str
    incarnation: int
    data: DataSpec


@dataclass(frozen=True)
class ClaimCall:
    """Ask for rows."""

    ask: Ask

    @property
    def island(self) -> str:
        return self.ask.island

    @property
    def incarnation(self) -> int:
        return self.ask.incarnation


@dataclass(frozen=True)
class LeaveCall:
    """Leave the run."""

    island: str
    incarnation: int


Call = (
    JoinCall
    | FoundCall
    | KeepCall
    | RecoverCall
    | HeartbeatCall
    | OfferCall
    | PublishCall
    | AgreedCall
    | OutcomeCall
    | StateCall
    | DataCall
    | ClaimCall
    | LeaveCall
)
Reply = (
    JoinReply
    | Position
    | Reception
    | Outcome
    | Frame
    | KeepReply
    | DataSpec
    | Claim
    | None
)


def size_of(message: Call | Reply | Exception) -> int:
    """Return the approximate size of a call or a reply on the wire."""
    match message:
        case PublishCall(frame, _):
            return SMALL_BYTES + frame_bytes(frame.header)
        case AgreedCall(_, _, updates, agreed):
            heads = sum(frame_bytes(header) - header.body_bytes for header in updates)
            return SMALL_BYTES + heads + (frame_bytes(agreed.header) if agreed else 0)
        case RecoverCall(_, _, state):
            return SMALL_BYTES + frame_bytes(state.header)
        case Frame(header, _):
            return SMALL_BYTES + frame_bytes(header)
        case FoundCall(_, _, states):
            return SMALL_BYTES + sum(frame_bytes(state.header) for state in states)
        case KeepCall(part=part):
            return SMALL_BYTES + len(view_of(part))
        case Outcome(agreed, _):
            return SMALL_BYTES + len(agreed.body)
        case _:
            return SMALL_BYTES
