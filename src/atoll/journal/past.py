"""Anchors of rounds that are over, as far as what is kept leads to them.

A journal keeps its newest states and every mean after the older one, for a restart.
Each state and the means after it lead to any round between as well. Nothing here
writes: a few pieces of a fragment are in memory, and its files stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

import numpy as np

from atoll.disk import Disk
from atoll.errors import CorruptError, UsageError
from atoll.journal.bodies import Bodies
from atoll.journal.compaction import Compaction
from atoll.journal.recorded import Recorded, RecordedFragment
from atoll.journal.records import Agreed
from atoll.journal.states import state_rounds, stored_state
from atoll.journal.stored import StoredBody
from atoll.weights.layout import F32
from atoll.wire import MOMENTS, PIECE_ELEMENTS, piece_count


class Past:
    """What a journal can still say of earlier rounds. May be asked by any thread.

    Compaction may collect what is being read: that is a `CorruptError`, after which
    `rounds` does not have the round any more.
    """

    def __init__(
        self,
        disk: Disk,
        recorded: Recorded,
        bodies: Bodies,
        read_agreed: Callable[[int, int], Agreed],
    ) -> None:
        self._disk, self._recorded, self._bodies = disk, recorded, bodies
        self._read_agreed = read_agreed

    def rounds(self) -> list[int]:
        """Return the rounds at which every fragment can be had, in order."""
        fragments = range(len(self._recorded.fragments))
        had = [set(self.rounds_of(fragment)) for fragment in fragments]
        return sorted(set.intersection(*had)) if had else []

    def rounds_of(self, fragment: int) -> list[int]:
        """Return the rounds of one fragment whose states can be had, in order."""
        known = self._recorded.fragment(fragment)
        had: set[int] = set()
        for first in state_rounds(self._disk, fragment):
            had.update(_leading(known, first))
        return sorted(had)

    def digest(self, fragment: int, round: int) -> bytes:
        """Return the digest of a fragment's state after a round that can be had."""
        return self._recorded.fragment(fragment).digests[round]

    def anchor(self, fragment: int, round: int) -> Iterator[F32]:
        """Yield the anchor of a fragment after a round, a piece at a time.

        It is compared with the recorded digest before the first piece is given; a
        damaged state is done without, while an older one leads to the round, too.

        Raises:
            UsageError: nothing that is kept leads there.
            CorruptError: what is kept is damaged, or was collected meanwhile.
        """
        known = self._recorded.fragment(fragment)
        why: Exception = UsageError(
            f"Round {round} of fragment {fragment} cannot be had any more. Kept are "
            f"{self.rounds_of(fragment)}."
        )
        for first in state_rounds(self._disk, fragment):
            if round not in _leading(known, first):
                continue
            try:
                pieces = self._pieces(fragment, first, round)
                head = next(pieces)
            except CorruptError as exc:
                why = exc
                continue
            yield head
            yield from pieces
            return
        raise why

    def _pieces(self, fragment: int, first: int, round: int) -> Iterator[F32]:
        """Yield an anchor's pieces, from the state of `first` and the means after."""
        digests = self._recorded.fragment(fragment).digests
        stored = stored_state(self._disk, fragment, first, digests[first])
        if first == round:
            return _stored_anchor(stored)
        means = [self._mean(fragment, number) for number in range(first + 1, round + 1)]
        parts = Compaction(stored, means, digests[round]).parts()
        next(parts)  # the header, which is made when all has led to the digest
        anchor = islice(parts, piece_count(_elements(stored)))
        return (np.frombuffer(part, np.float32) for part in anchor)

    def _mean(self, fragment: int, round: int) -> StoredBody:
        place = self._recorded.fragment(fragment).places.get(round)
        return self._bodies.stored(self._read_agreed(fragment, round), place)


def _leading(known: RecordedFragment, first: int) -> range:
    """Return the rounds that the state of `first` and the means after it lead to."""
    if first not in known.digests or first > known.round:
        return range(0)
    last = first
    while last < known.round and (last + 1 in known.places or last + 1 in known.void):
        last += 1
    return range(first, last + 1)


def _stored_anchor(stored: StoredBody) -> Iterator[F32]:
    """Yield the anchor of a state, every byte of which is verified before."""
    stored.verify()
    left = _elements(stored)
    for index in range(piece_count(left)):
        piece = np.frombuffer(stored.piece(index), np.float32)
        yield piece[: min(left, PIECE_ELEMENTS)]
        left -= PIECE_ELEMENTS


def _elements(stored: StoredBody) -> int:
    """Return the elements of one vector of a state."""
    assert stored.header.outer is not None
    return stored.header.elements // (1 + MOMENTS[stored.header.outer.optimizer])
