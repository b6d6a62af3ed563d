"""Published updates and committed rounds, as the world saw them happen.

Nothing here asks an island or the coordinator what it believes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from atoll.wire import Header, RosterEntry, Verdict, codec, update_digest

IncarnationKey = tuple[str, int]
"""An island's name and incarnation."""

F64 = NDArray[np.float64]


@dataclass(frozen=True)
class PublishedUpdate:
    """An update as an island published it first."""

    header: Header
    digest: bytes
    body: bytes

    @property
    def life(self) -> IncarnationKey:
        return self.header.island, self.header.incarnation

    @cached_property
    def values(self) -> F64:
        """What the update says, decoded; nobody writes to it."""
        out = np.empty(self.header.elements, np.float32)
        body = np.frombuffer(self.body, np.uint8)
        codec(self.header.codec).decode(body, out)
        return out.astype(np.float64)


@dataclass(frozen=True)
class CommittedRound:
    """An outcome as the journal took it."""

    header: Header
    body: bytes
    digest_after: bytes
    at_s: float

    def entry(self, island: str) -> RosterEntry | None:
        assert self.header.roster is not None
        return self.header.roster.entry(island)

    def counts(self, update: PublishedUpdate) -> bool:
        """Return whether the roster counts this very update."""
        entry = self.entry(update.header.island)
        return (
            entry is not None
            and entry.digest == update.digest
            and entry.verdict is Verdict.COUNTED
        )


@dataclass
class History:
    """Updates by their digests, and outcomes by fragment and round."""

    updates: dict[bytes, PublishedUpdate] = field(default_factory=dict)
    commits: dict[tuple[int, int], CommittedRound] = field(default_factory=dict)
    last: dict[int, int] = field(default_factory=dict)
    """The last committed round of each fragment."""

    excused: set[bytes] = field(default_factory=set)
    """Departing updates that came while somebody was closing their round."""

    origins: dict[bytes, bytes] = field(default_factory=dict)
    """What others have brought into a later round, and which update it was before."""

    has_gaps: bool = False
    """The journal was put back: it may have lost outcomes for good."""

    def publish(self, header: Header, body: NDArray[np.uint8]) -> PublishedUpdate:
        """Take note of an update that is on its way; the first bytes of it stand."""
        digest = update_digest(header)
        update = self.updates.get(digest)
        if update is None:
            update = PublishedUpdate(header, digest, body.tobytes())
            self.updates[digest] = update
        return update

    def bring(
        self, header: Header, body: NDArray[np.uint8], origin: PublishedUpdate
    ) -> None:
        """Take note that somebody puts an update of another into a later round."""
        self.origins[self.publish(header, body).digest] = origin.digest

    def counting(self, update: PublishedUpdate) -> PublishedUpdate | None:
        """Return the update if it counted, or what was brought of it and counted."""
        brought = [
            key for key, origin in self.origins.items() if origin == update.digest
        ]
        for each in (update, *(self.updates[digest] for digest in brought)):
            commit = self.commits.get((each.header.fragment, each.header.round))
            if commit is not None and commit.counts(each):
                return each
        return None

    def commit(self, commit: CommittedRound) -> None:
        key = (commit.header.fragment, commit.header.round)
        self.commits[key] = commit
        self.last[key[0]] = key[1]
