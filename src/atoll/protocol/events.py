"""Events and actions of the coordinator's machine.

The host reports events, and performs the actions in order. `Persist` and
`CloseRound` must be durable before any response is sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from atoll.data import Ask, Claim, DataSpec, RowLedger, Spans
from atoll.protocol.coordinator_state import CoordinatorState, Move
from atoll.protocol.membership import Member
from atoll.protocol.messages import (
    CountedWork,
    Heartbeat,
    HeldRound,
    JoinRequest,
    Position,
)
from atoll.protocol.model import ModelSpec
from atoll.protocol.rounds import ListedUpdate, Reception
from atoll.wire import Header, OuterValues, Roster


@dataclass(frozen=True)
class JoinRequested:
    """A request of an island to join."""

    request: JoinRequest
    key: bytes
    nonce: bytes


@dataclass(frozen=True)
class Founded:
    """The founder's weights are durable: the digest of each fragment's state."""

    island: str
    incarnation: int
    digests: tuple[bytes, ...]
    outers: tuple[OuterValues, ...]


@dataclass(frozen=True)
class HeartbeatReceived:
    """A heartbeat came."""

    beat: Heartbeat
    is_asking: bool = True
    """Whether who sent it gets the position; not if it came with something else."""


@dataclass(frozen=True)
class UpdateOffered:
    """The header of an update came; its body has not been read."""

    header: Header


@dataclass(frozen=True)
class UpdateStored:
    """The body of a wanted update is received and verified, durable if it departs."""

    header: Header


@dataclass(frozen=True)
class UpdatesGathered:
    """Headers came of updates that their islands reduce among themselves."""

    headers: tuple[Header, ...]


@dataclass(frozen=True)
class Leave:
    """An island goes, by its own word or an operator's."""

    island: str
    incarnation: int
    reason: str = "left"


@dataclass(frozen=True)
class ConnectionLost:
    """An island's connection was closed: a hint, not a fact."""

    island: str
    incarnation: int


@dataclass(frozen=True)
class DataOpened:
    """An island has described its dataset, or has found the end of its stream."""

    island: str
    incarnation: int
    data: DataSpec


@dataclass(frozen=True)
class RowsClaimed:
    """An island asks for rows."""

    ask: Ask


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True)
class Committed:
    """A round's record is durable, and the outer step is taken."""

    fragment: int
    roster: Roster
    """The roster in the record: all refused if the mean overflowed."""

    digest: bytes
    outer: OuterValues
    """The outer values for the round that opens now."""


@dataclass(frozen=True)
class Recovered:
    """A lost state of the run is durable again, with the rosters before it."""

    fragment: int
    state: HeldRound
    rosters: tuple[tuple[int, Roster], ...]
    """The last ones that are known, with their rounds."""

    outer: OuterValues
    """The outer values for the round that opens now."""


@dataclass(frozen=True)
class SettingsChanged:
    """An operator changes settings that may change at run time."""

    values: Mapping[str, Any]


@dataclass(frozen=True)
class StopRequested:
    """An operator ends the run, with the open rounds."""


@dataclass(frozen=True)
class PauseRequested:
    """An operator stops rounds from closing, or lets them close again."""

    is_paused: bool


@dataclass(frozen=True)
class SaveRequested:
    """An operator asks every island to save itself, after its next inner step."""


@dataclass(frozen=True)
class MoveRequested:
    """An operator moves the run: it stops until the move is complete."""

    target: str
    nonce: str


@dataclass(frozen=True)
class MoveCompleted:
    """The run is at its target."""

    target: str


@dataclass(frozen=True)
class MoveCancelled:
    """The move is cancelled: the run continues here."""

    target: str


@dataclass(frozen=True)
class FoundingSeen:
    """The run has its first weights."""

    model: ModelSpec
    outers: tuple[OuterValues, ...]
    """The outer values for the first round of each fragment."""


@dataclass(frozen=True)
class StateSeen:
    """There is a state of a fragment; the rosters before it are not read."""

    fragment: int
    round: int
    counted: Mapping[str, CountedWork]
    """By island."""

    bases: tuple[bytes, ...]
    windows: Mapping[str, int] = field(default_factory=dict)
    """By island, the inner steps per window after the round; 0: `sync_every`."""

    listed: Mapping[str, ListedUpdate] = field(default_factory=dict)
    """By island, the last update that the rosters list; empty in a synchronous run."""


@dataclass(frozen=True)
class BaseSeen:
    """An island has made the state from which the open round of a fragment starts."""

    fragment: int
    state: HeldRound


@dataclass(frozen=True)
class MemberSeen:
    """The document of an island has changed."""

    member: Member


@dataclass(frozen=True)
class UpdateSeen:
    """There is an update for the open round of a fragment."""

    header: Header
    lease_until_s: float
    """The end of its island's lease, which the update renews."""


@dataclass(frozen=True)
class UpdateRevoked:
    """An island's later incarnation does not name its staged update."""

    fragment: int
    island: str


@dataclass(frozen=True)
class RosterSeen:
    """The open round of a fragment has a roster."""

    fragment: int
    roster: Roster
    base: bytes
    outer: OuterValues
    """The outer values for the round that opens now."""


@dataclass(frozen=True)
class SettingsSeen:
    """An operator has put settings in force."""

    values: Mapping[str, Any]
    outers: tuple[OuterValues, ...]
    """The outer values of each fragment by these settings."""


@dataclass(frozen=True)
class StopSeen:
    """An operator, or the counted tokens, have ended the run with a round."""

    last_round: int | None
    last_rounds: tuple[int, ...] | None = None
    """Of each fragment, in an asynchronous run."""


@dataclass(frozen=True)
class EndPassed:
    """The last round of a fragment was closed by an island that did not know the end.

    It has not waited for every live island: the next round is the last one instead.
    """

    fragment: int
    round: int


@dataclass(frozen=True)
class RowsSeen:
    """The ledger of rows, by the claims and rosters that were read."""

    ledger: RowLedger


@dataclass(frozen=True)
class MoveSeen:
    """An operator has begun, completed or cancelled a move; None: cancelled."""

    move: Move | None


Event = (
    JoinRequested
    | Founded
    | HeartbeatReceived
    | UpdateOffered
    | UpdateStored
    | UpdatesGathered
    | Leave
    | ConnectionLost
    | DataOpened
    | RowsClaimed
    | Tick
    | Committed
    | Recovered
    | SettingsChanged
    | StopRequested
    | PauseRequested
    | SaveRequested
    | MoveRequested
    | MoveCompleted
    | MoveCancelled
    | FoundingSeen
    | StateSeen
    | BaseSeen
    | MemberSeen
    | UpdateSeen
    | UpdateRevoked
    | RosterSeen
    | SettingsSeen
    | StopSeen
    | EndPassed
    | RowsSeen
    | MoveSeen
)


@dataclass(frozen=True)
class Welcome:
    """Tell an island that it is a member."""

    member: Member
    position: Position
    is_founder: bool
    spoken_for: tuple[int, ...] = ()
    """Fragments whose open round has a valid update of an earlier incarnation."""


@dataclass(frozen=True)
class Epoch:
    """Settings that are in force from now on."""

    number: int
    values: Mapping[str, Any]


@dataclass(frozen=True)
class LastRounds:
    """The end of an asynchronous run is decided; without rounds it is not."""

    rounds: tuple[int, ...]
    """The last round of each fragment."""


@dataclass(frozen=True)
class RowsDealt:
    """A claim of an island has got these turns, wherever they were."""

    island: str
    number: int
    spans: Spans


@dataclass(frozen=True)
class RowsReleased:
    """The turns of an island that has gone are free."""

    island: str


Change = (
    Member
    | Leave
    | Epoch
    | LastRounds
    | PauseRequested
    | Move
    | MoveCancelled
    | DataSpec
    | RowsDealt
    | RowsReleased
)


@dataclass(frozen=True)
class Persist:
    """Make a change durable before any response is sent."""

    change: Change


Answer = Position | Reception | DataSpec | Claim


@dataclass(frozen=True)
class Respond:
    """Respond to the caller."""

    answer: Answer


@dataclass(frozen=True)
class CloseRound:
    """Reduce the frozen staged set, journal the outcome, take the outer step."""

    fragment: int
    round: int
    roster: Roster
    staged: tuple[Header, ...]
    outer: OuterValues
    epoch: int
    buffer: int = 0
    """Updates between two moves of the velocity; 0 in a synchronous run."""


Action = Welcome | Persist | Respond | CloseRound

Result = tuple[CoordinatorState, list[Action]]
"""The next state, and the actions of the host."""
