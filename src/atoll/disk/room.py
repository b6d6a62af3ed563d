"""Disk space accounting: uploads stop before the journal's reserve is used.

Rule 1: a reserve is kept for the journal: its next records, outcomes and compaction.
        Only the journal's own commits write into it.
Rule 2: every other writer reserves its bytes first. Bytes that are reserved and not
        written yet count as written, so that many at once do not take the same ones.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from atoll.errors import DiskFull

RECORDS_BYTES = 2**24
"""For records of the log and lines of events, which are small and never stop."""


@dataclass
class Claim:
    """Bytes reserved and not yet written."""

    left_bytes: int

    def wrote(self, size_bytes: int) -> None:
        """Note that some of them are on the disk: its free space says so itself."""
        self.left_bytes = max(0, self.left_bytes - size_bytes)


class Room:
    """The free space of one disk. Any thread may call."""

    def __init__(self, free_bytes: Callable[[], int]) -> None:
        self._free_bytes = free_bytes
        self._claims: list[Claim] = []
        self._lock = threading.Lock()
        self.reserve_bytes = RECORDS_BYTES
        """Bytes kept for the journal; `Service` sets it from the model."""

        self.reclaimers: list[Callable[[], None]] = []
        """Called when there is no room, to give back what is kept without need."""

    @property
    def free_bytes(self) -> int:
        """What is free and not claimed, the reserve included."""
        with self._lock:
            return self._unclaimed()

    def require(self, size_bytes: int, *, what: str, beyond_bytes: int = 0) -> None:
        """Return if there is room for so many bytes, and the reserve stays whole.

        `beyond_bytes` are needed beside them later.

        Raises:
            DiskFull: there is not.
        """
        self._reserve(Claim(0), size_bytes, what, beyond_bytes)

    @contextmanager
    def claiming(self, size_bytes: int, *, what: str) -> Iterator[Claim]:
        """Hold room for so many bytes while they are written.

        Raises:
            DiskFull: there is none.
        """
        claim = Claim(size_bytes)
        self._reserve(claim, size_bytes, what, 0)
        try:
            yield claim
        finally:
            with self._lock:
                # By identity: equal claims are different ones.
                self._claims = [each for each in self._claims if each is not claim]

    def _unclaimed(self) -> int:
        claimed = sum(claim.left_bytes for claim in self._claims)
        return max(0, self._free_bytes() - claimed)

    def _reserve(
        self, claim: Claim, size_bytes: int, what: str, beyond_bytes: int
    ) -> None:
        """Note a claim if there is room, after some was made if that is needed."""
        try:
            self._note(claim, size_bytes, what, beyond_bytes)
        except DiskFull:
            for reclaim in self.reclaimers:
                reclaim()
            self._note(claim, size_bytes, what, beyond_bytes)

    def _note(
        self, claim: Claim, size_bytes: int, what: str, beyond_bytes: int
    ) -> None:
        with self._lock:
            self._require(size_bytes, what, beyond_bytes)
            if claim.left_bytes:
                self._claims.append(claim)

    def _require(self, size_bytes: int, what: str, beyond_bytes: int) -> None:
        free = self._unclaimed()
        kept = self.reserve_bytes + beyond_bytes
        if size_bytes and free < size_bytes + kept:
            raise DiskFull(
                f"The coordinator's disk has no room for {what}: {free} bytes are "
                f"free, {kept} of them are kept for the journal, and {size_bytes} more "
                "are needed. Free some space there; what was refused is sent again by "
                "itself."
            )
