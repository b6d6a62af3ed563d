"""What an island may ask of a coordinator, each safe to repeat."""

from __future__ import annotations

from dataclasses import dataclass, field

from atoll.exchange.base import Frame, Outcome
from atoll.protocol import Beat, JoinReply, JoinRequest, Position, Reception
from atoll.wire import Header, frame_bytes
from atoll.wire.digests import Bytes, view_of

SMALL_BYTES = 256
"""About what a call without a frame takes on the wire."""

LONG_POLL_S = 2.0
"""How long a question for an outcome may wait. An island that leaves waits as long."""


@dataclass(frozen=True)
class JoinCall:
    """Take part, as who holds this key."""

    request: JoinRequest
    key: bytes
    nonce: bytes
    """Made once per life: a repeat of the call is the same life, not the next."""


@dataclass(frozen=True)
class FoundCall:
    """Bring the run's first weights, one state frame per fragment."""

    island: str
    incarnation: int
    states: tuple[Frame, ...]
    is_given: bool = field(default=False, compare=False)
    """Nobody else has these bodies: whoever is called may keep them."""


@dataclass(frozen=True)
class KeepCall:
    """Bring a part of a constant, before the first weights; an empty one only asks."""

    island: str
    incarnation: int
    digest: str
    """Of the whole constant, in hex: it names which one."""

    first: int
    """Where the part begins, in bytes."""

    part: Bytes = b""


@dataclass(frozen=True)
class Kept:
    """How much of a constant the run has, from its beginning on."""

    bytes: int


@dataclass(frozen=True)
class RecoverCall:
    """Bring a state that the run has lost, with the headers of its last outcomes."""

    island: str
    incarnation: int
    state: Frame
    """With its receipt: nothing is taken without."""

    outcomes: tuple[Header, ...]
    receipts: tuple[bytes, ...] = ()
    """Of the outcomes, in their order."""


@dataclass(frozen=True)
class HeartbeatCall:
    """Say that the island lives."""

    beat: Beat


@dataclass(frozen=True)
class OfferCall:
    """Ask whether an update is wanted, by its header alone."""

    header: Header


@dataclass(frozen=True)
class PublishCall:
    """Bring an update, departing or not."""

    frame: Frame
    beat: Beat | None = None
    """Where the island is: its seals tell that better than the last heartbeat."""


@dataclass(frozen=True)
class AgreedCall:
    """Bring what islands have reduced among themselves; before, ask by which roster."""

    island: str
    incarnation: int
    updates: tuple[Header, ...]
    """Of all that take part, for one round of one fragment."""

    agreed: Frame | None = None
    """None: nothing is changed; the answer is what the outcome's header would be."""

    vouchers: tuple[bytes, ...] = ()
    """Each island's own word for the agreed frame, in the order of `updates`."""

    @property
    def fragment(self) -> int:
        return self.updates[0].fragment

    @property
    def round(self) -> int:
        return self.updates[0].round


@dataclass(frozen=True)
class OutcomeCall:
    """Ask what a round came to."""

    fragment: int
    round: int
    wait_s: float = 0.0
    """How long the answer may wait for the outcome."""

    beat: Beat | None = None
    """Who asks: a question is as good as a heartbeat."""

    has_body: bool = field(default=True, compare=False)
    """False: the header is enough, for who sends the body from where it lies."""


@dataclass(frozen=True)
class StateCall:
    """Ask for a fragment's anchor and velocity."""

    fragment: int


@dataclass(frozen=True)
class LeaveCall:
    """Go."""

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
    | LeaveCall
)
Reply = JoinReply | Position | Reception | Outcome | Frame | Kept | None


def size_of(message: Call | Reply | Exception) -> int:
    """Return about how many bytes a call or a reply takes on the wire."""
    match message:
        case PublishCall(frame, _):
            return SMALL_BYTES + frame_bytes(frame.header)
        case AgreedCall(_, _, updates, agreed):
            heads = sum(frame_bytes(each) - each.body_bytes for each in updates)
            return SMALL_BYTES + heads + (frame_bytes(agreed.header) if agreed else 0)
        case RecoverCall(_, _, state):
            return SMALL_BYTES + frame_bytes(state.header)
        case Frame(header, _):
            return SMALL_BYTES + frame_bytes(header)
        case FoundCall(_, _, states):
            return SMALL_BYTES + sum(frame_bytes(each.header) for each in states)
        case KeepCall(part=part):
            return SMALL_BYTES + len(view_of(part))
        case Outcome(agreed, _):
            return SMALL_BYTES + len(agreed.body)
        case _:
            return SMALL_BYTES
