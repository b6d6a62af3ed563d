"""What happens to an island, and what its machine wants done about it."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.protocol.messages import Position
from atoll.wire import Verdict


@dataclass(frozen=True)
class Stepped:
    """The island's step counter has reached `step`."""

    step: int


@dataclass(frozen=True, kw_only=True)
class Taken:
    """The outcome of the update in flight, and of later rounds, is in the weights."""

    fragment: int
    verdict: Verdict
    through: int
    """The last round taken: more than the sealed one when rounds passed meanwhile."""

    position: Position


@dataclass(frozen=True)
class Wanted:
    """All islands wait: this one for `fragment`, others for it at `position.wanted`."""

    fragment: int
    position: Position


@dataclass(frozen=True)
class NeverOpens:
    """The round in flight of a fragment will not open: the one before was the last."""

    fragment: int


@dataclass(frozen=True)
class SyncNow:
    """The user wants every fragment's work in its open round, at this step."""

    step: int


@dataclass(frozen=True)
class Leaving:
    """The island goes: whatever it holds must be given away."""


Event = Stepped | Taken | Wanted | NeverOpens | SyncNow | Leaving


@dataclass(frozen=True)
class Seal:
    """Seal the fragment's work for `round` and publish it."""

    fragment: int
    round: int


@dataclass(frozen=True)
class Await:
    """Seal nothing for `round`: an earlier life has, or it is over. Only take it."""

    fragment: int
    round: int


@dataclass(frozen=True)
class Take:
    """Wait for the outcome of the update in flight, take it, answer with `Taken`.

    Nothing, if a summons in between has had it taken already.
    """

    fragment: int
    round: int


@dataclass(frozen=True)
class Resend:
    """Publish the update in flight again, same bytes, marked departing."""

    fragment: int
    round: int


@dataclass(frozen=True)
class Rest:
    """Publish the work since the last seal as a departing update for `round`."""

    fragment: int
    round: int


@dataclass(frozen=True)
class End:
    """Every fragment has taken the run's last round."""


Action = Seal | Await | Take | Resend | Rest | End
