"""What comes back for an update: an outcome, or a summons before it."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.protocol import How, Position
from atoll.wire import Verdict


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """An outcome that is in the anchor, and waits to be taken into local weights."""

    how: How
    verdict: Verdict
    reason: str
    """Why the run refused the update, if it did."""

    through: int
    position: Position | None
    """Where the run was then; None if the outcome is lost that would say so."""


@dataclass(frozen=True)
class Summons:
    """No outcome yet: the run wants other fragments first, as its position says."""

    position: Position
