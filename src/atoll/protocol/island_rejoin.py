"""What a restarted island still has of the work that its checkpoint holds."""

from __future__ import annotations

from enum import StrEnum

from atoll.protocol.tables import REJOINING
from atoll.wire import Roster, Verdict


class Left(StrEnum):
    """How much of the saved work no round has."""

    ALL = "all of it"
    SINCE = "what came since its seal"
    NONE = "nothing"
    LOST = "lost"


class Since(StrEnum):
    """Which update of the island has counted after the saved base."""

    NOTHING = "nothing"
    SAVED = "the saved update"
    ANOTHER = "another"


def what_is_left(since: Since, *, is_refused: bool, is_base_known: bool) -> Left:
    """Return what a restarted island has left, as `tables.REJOINING` says."""
    return Left(
        REJOINING[
            since.value,
            "refused" if is_refused else "not refused",
            "known" if is_base_known else "unknown",
        ]
    )


def counted_in(roster: Roster, island: str, digest: bytes) -> Since | None:
    """Return which update of an island a roster counts; None: it was refused.

    `digest` is that of the saved update, or empty.
    """
    entry = roster.entry(island)
    if entry is None or entry.verdict is Verdict.LATE:
        return Since.NOTHING
    if entry.verdict is Verdict.REFUSED:
        return None
    return Since.SAVED if entry.digest == digest else Since.ANOTHER
