"""Disk space accounting: uploads stop before the journal's reserve is used.

Rule 1: a reserve is kept for the journal: its next records, outcomes and compaction.
        Only the journal's own commits write into it.
Rule 2: every other writer reserves its bytes first. Bytes that are reserved and not
        written yet count as written, so that concurrent writers do not share them.
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
class SpaceReservation:
    """Bytes reserved and not yet written."""

    left_bytes: int

    def wrote(self, size_bytes: int) -> None:
        """Subtract bytes that were written: the free space no longer has them."""
        self.left_bytes = max(0, self.left_bytes - size_bytes)


class DiskSpace:
    """The free space of one disk. Any thread may call."""

    def __init__(self, free_bytes: Callable[[], int]) -> None:
        self._free_bytes = free_bytes
        self._claims: list[SpaceReservation] = []
        self._lock = threading.Lock()
        self.reserve_bytes = RECORDS_BYTES
        """Bytes kept for the journal; `Service` sets it from the model."""

        self.reclaimers: list[Callable[[], None]] = []
        """Called when there is no room, to free space that is not needed."""

    @property
    def free_bytes(self) -> int:
        """Free bytes that are not claimed, including the reserve."""
        with self._lock:
            return self._unclaimed()

    def require(self, size_bytes: int, *, purpose: str, beyond_bytes: int = 0) -> None:
        """Return if there is room for `size_bytes` without using the reserve.

        `beyond_bytes` more are needed later.

        Raises:
            DiskFull: there is no room.
        """
        self._reserve(SpaceReservation(0), size_bytes, purpose, beyond_bytes)

    @contextmanager
    def claiming(self, size_bytes: int, *, purpose: str) -> Iterator[SpaceReservation]:
        """Reserve `size_bytes` while they are written.

        Raises:
            DiskFull: there is no room.
        """
        claim = SpaceReservation(size_bytes)
        self._reserve(claim, size_bytes, purpose, 0)
        try:
            yield claim
        finally:
            with self._lock:
                # Compare identities: two claims may be equal.
                self._claims = [other for other in self._claims if other is not claim]

    def _unclaimed(self) -> int:
        claimed = sum(claim.left_bytes for claim in self._claims)
        return max(0, self._free_bytes() - claimed)

    def _reserve(
        self, claim: SpaceReservation, size_bytes: int, purpose: str, beyond_bytes: int
    ) -> None:
        """Add a claim if there is room; if not, call the reclaimers and try again."""
        try:
            self._note(claim, size_bytes, purpose, beyond_bytes)
        except DiskFull:
            for reclaim in self.reclaimers:
                reclaim()
            self._note(claim, size_bytes, purpose, beyond_bytes)

    def _note(
        self, claim: SpaceReservation, size_bytes: int, purpose: str, beyond_bytes: int
    ) -> None:
        with self._lock:
            self._require(size_bytes, purpose, beyond_bytes)
            if claim.left_bytes:
                self._claims.append(claim)

    def _require(self, size_bytes: int, purpose: str, beyond_bytes: int) -> None:
        free = self._unclaimed()
        reserved = self.reserve_bytes + beyond_bytes
        if size_bytes and free < size_bytes + reserved:
            raise DiskFull(
                f"The coordinator's disk has no room for {purpose}: {free} bytes are "
                f"free, {reserved} of them are kept for the journal, and {size_bytes} "
                "more are needed. Free some space there; refused updates are sent "
                "again automatically."
            )
