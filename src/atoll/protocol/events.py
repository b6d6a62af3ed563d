"""What happens to a coordinator, and what its machine wants done about it.

Events are what the host saw; actions are what it must do, in order. `Remember` and
`Close` must be durable before anybody is answered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from atoll.protocol.membership import Member
from atoll.protocol.messages import Beat, Holding, JoinRequest, Position
from atoll.protocol.rounds import Reception
from atoll.protocol.run_state import CoordinatorState, Move
from atoll.wire import Header, OuterValues, Roster


@dataclass(frozen=True)
class Joining:
    """An island asks to take part."""

    request: JoinRequest
    key: bytes
    nonce: bytes


@dataclass(frozen=True)
class Founded:
    """The founder's weights are here, durable: the digest of each fragment's state."""

    island: str
    incarnation: int
    digests: tuple[bytes, ...]
    outers: tuple[OuterValues, ...]


@dataclass(frozen=True)
class Beaten:
    """A heartbeat came."""

    beat: Beat
    is_asking: bool = True
    """Whether who sent it gets the position; not if it came with something else."""


@dataclass(frozen=True)
class Offered:
    """The header of an update came; its body has not been read."""

    header: Header


@dataclass(frozen=True)
class Stored:
    """The body of a wanted update is here and verified, durable if it departs."""

    header: Header


@dataclass(frozen=True)
class Gathered:
    """Headers came of updates that their islands reduce among themselves."""

    headers: tuple[Header, ...]


@dataclass(frozen=True)
class Leave:
    """An island goes, by its own word or an operator's."""

    island: str
    incarnation: int
    reason: str = "left"


@dataclass(frozen=True)
class Closed:
    """An island's connection was closed: a hint, not a fact."""

    island: str
    incarnation: int


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
    """A state that the run had lost is here, durable, with the rosters before it."""

    fragment: int
    state: Holding
    rosters: tuple[tuple[int, Roster], ...]
    """The last ones that are known, with their rounds."""

    outer: OuterValues
    """The outer values for the round that opens now."""


@dataclass(frozen=True)
class NewValues:
    """An operator changes settings that may change at run time."""

    values: Mapping[str, Any]


@dataclass(frozen=True)
class Stopping:
    """An operator ends the run, with the rounds that are under way."""


@dataclass(frozen=True)
class Pausing:
    """An operator stops rounds from closing, or lets them close again."""

    is_paused: bool


@dataclass(frozen=True)
class Saving:
    """An operator asks every island to save itself, after its next inner step."""


@dataclass(frozen=True)
class Moving:
    """An operator takes the run elsewhere: everything is held until it is there."""

    target: str
    nonce: str


@dataclass(frozen=True)
class Moved:
    """The run is there."""

    target: str


@dataclass(frozen=True)
class Staying:
    """The run is not there, and will not be: it goes on here."""

    target: str


Event = (
    Joining
    | Founded
    | Beaten
    | Offered
    | Stored
    | Gathered
    | Leave
    | Closed
    | Tick
    | Committed
    | Recovered
    | NewValues
    | Stopping
    | Pausing
    | Saving
    | Moving
    | Moved
    | Staying
)


@dataclass(frozen=True)
class Welcome:
    """Tell an island that it is a member."""

    member: Member
    position: Position
    is_founder: bool
    spoken_for: tuple[int, ...] = ()
    """Fragments whose open round holds an update of an earlier life, which stands."""


@dataclass(frozen=True)
class Epoch:
    """Settings that are in force from now on."""

    number: int
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Remember:
    """Make a change durable before anybody is answered."""

    what: Member | Leave | Epoch | Pausing | Move | Staying


@dataclass(frozen=True)
class Say:
    """Answer the one who asked."""

    answer: Position | Reception


@dataclass(frozen=True)
class Close:
    """Reduce the frozen staged set, journal the outcome, take the outer step."""

    fragment: int
    round: int
    roster: Roster
    staged: tuple[Header, ...]
    outer: OuterValues
    epoch: int


Action = Welcome | Remember | Say | Close

Result = tuple[CoordinatorState, list[Action]]
"""What an event leads to."""
