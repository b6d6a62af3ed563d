"""An all-reduce through a store: the mean of the values of every rank.

Two or three ranks read each other's values. More ranks cut them into parts, which
different ranks reduce: each then moves three times its own bytes, for any number of
ranks.

Rule 1: the objects that a rank has put in a round stay. A rank that is started again in
        the middle of a round contributes the values of its earlier incarnation.
Rule 2: a part is a function of the values that the ranks have put, so a rank that puts
        it twice puts the same bytes.
"""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass
from functools import partial

import numpy as np

from atoll.clock import Clock, SystemClock
from atoll.errors import UsageError
from atoll.exchange.all_reduce.frames import (
    Bytes,
    ExpectedFrame,
    ReduceTerms,
    Sections,
    header_bytes_of,
    verified,
)
from atoll.exchange.all_reduce.rendezvous import (
    Deadline,
    ObjectWait,
    RankProgress,
    Rendezvous,
    TooLate,
)

OPS = ("mean", "sum")
MAX_WORLD_SIZE = 10_000

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


class AllReduce:
    """Reduces under one name as one rank of a fixed number. Calls wait for each other.

    Args:
        start_round: Which round the first call is, for who keeps count; None: the first
            that this rank has not done, as the store knows.
    """

    def __init__(
        self,
        place: Rendezvous,
        *,
        rank: int,
        world_size: int,
        name: str,
        timeout_s: float,
        start_round: int | None = None,
        clock: Clock | None = None,
    ) -> None:
        _check(rank, world_size, name)
        self._timeout_s, self._clock = timeout_s, clock or SystemClock()
        Deadline.begin(self._clock, timeout_s)  # refuses a time that is none
        self._standing = RankProgress(place, name, rank, world_size)
        self._round = self._standing.begin(start_round)
        self._lock = threading.Lock()
        self._has_done_one = False
        self._sent = -1
        """The round in which this process has put its values itself."""

    @property
    def round(self) -> int:
        """Which round the next call is."""
        return self._round

    def __call__(
        self, body: Bytes, sections: Sections, *, layout: str, op: str = "mean"
    ) -> Bytes:
        """Return the reduced values, the same bytes on every rank.

        Safe to repeat after an error: what was put stays, and counts.

        Raises:
            Unreachable: a rank has not come in time, which is named; or the store does
                not answer.
            UsageError: ranks do not reduce the same thing.
            CorruptError: an object does not verify.
        """
        if op not in OPS:
            raise UsageError(f"op={op!r} must be one of {', '.join(OPS)}.")
        standing = self._standing
        agreed = ReduceTerms(standing.name, standing.world_size, op, sections, layout)
        with self._lock:
            deadline = Deadline.begin(self._clock, self._timeout_s)
            ours = self._send(agreed, body)
            try:
                found = _Round(standing, agreed, self._round, ours, deadline).reduced()
            except TooLate:
                raise standing.absent(agreed, self._round, deadline) from None
            standing.finish(self._round)
            self._round, self._has_done_one = self._round + 1, True
            return found

    def _send(self, agreed: ReduceTerms, body: Bytes) -> Bytes | None:
        """Put our values, and return them; None: an earlier life's count instead."""
        standing = self._standing
        key = standing.up(self._round, standing.rank)
        frame = ExpectedFrame(agreed, self._round, standing.rank)
        if standing.put(self._round, key, frame.sealed(body)):
            self._sent = self._round
            return body
        if self._has_done_one and self._sent != self._round:
            raise UsageError(
                f"Another process has sent the values of rank {standing.rank} in round "
                f"{self._round} of {standing.name!r} ({standing.place.path(key)}). "
                "Give every process its own rank, or its own name."
            )
        return None


@dataclass
class _Round:
    """One round, from the ranks' values in the store to what is reduced."""

    standing: RankProgress
    agreed: ReduceTerms
    number: int
    ours: Bytes | None
    """Our values, if they are those in the store."""

    deadline: Deadline

    def __post_init__(self) -> None:
        self.waiting = ObjectWait(self.deadline)
        self.store = self.standing.place.store

    def reduced(self) -> Bytes:
        if self.agreed.is_direct:
            return self._reduced(0)
        mine = {
            part: self._make(part)
            for part in range(self.agreed.num_parts)
            if self._owner(part) == self.standing.rank
        }
        out = np.empty(self.agreed.sections.body_bytes, np.uint8)

        def read(part: int) -> None:
            first, last = self.agreed.window(self.agreed.pieces(part))
            out[first:last] = mine[part] if part in mine else self._part(part)

        self.waiting.together([partial(read, p) for p in range(self.agreed.num_parts)])
        return out

    def _make(self, part: int) -> Bytes:
        """Reduce a part for everybody."""
        made = self._reduced(part)
        frame = ExpectedFrame(self.agreed, self.number, self.standing.rank, part)
        key = self.standing.mean(self.number, part)
        self.standing.put(self.number, key, frame.sealed(made))
        return made

    def _reduced(self, part: int) -> Bytes:
        pieces = self.agreed.pieces(part)
        ranks = range(self.standing.world_size)
        bodies = self.waiting.together([partial(self._body, r, pieces) for r in ranks])
        first, _ = self.agreed.window(pieces)
        divisor = len(ranks) if self.agreed.op == "mean" else None
        return self.agreed.sections.reduced(bodies, first=first, divisor=divisor)

    def _body(self, rank: int, pieces: range) -> Bytes:
        """Return pieces of a rank's values: in one read, or after its header."""
        first, last = self.agreed.window(pieces)
        if rank == self.standing.rank and self.ours is not None:
            return self.ours[first:last]
        frame = ExpectedFrame(self.agreed, self.number, rank)
        key = self.standing.up(self.number, rank)
        where, start = self.standing.place.path(key), frame.header_bytes
        is_whole = last - first == self.agreed.sections.body_bytes
        head = self._head(key, frame.size if is_whole else start)
        header = frame.opened(head, where=where)
        if is_whole:
            body = head[start:]
        else:
            body = self.store.get(key, start + first, last - first)
        return verified(header, pieces, body, where=where)

    def _part(self, part: int) -> Bytes:
        """Return a part that another rank has reduced."""
        frame = ExpectedFrame(self.agreed, self.number, self._owner(part), part)
        key = self.standing.mean(self.number, part)
        where = self.standing.place.path(key)
        found = self._head(key, frame.size)
        header = frame.opened(found, where=where)
        body = found[frame.header_bytes :]
        return verified(header, range(len(header.pieces)), body, where=where)

    def _head(self, key: str, size: int) -> memoryview:
        """Return the first bytes of an object when it is there, its header at least."""
        found = self.waiting.until_there(partial(self.store.get, key, 0, size))
        needed = header_bytes_of(found, where=self.standing.place.path(key))
        return found if needed <= len(found) else self.store.get(key, 0, needed)

    def _owner(self, part: int) -> int:
        return self.agreed.owner(part, self.number)


def _check(rank: int, world_size: int, name: str) -> None:
    if not 1 <= world_size <= MAX_WORLD_SIZE:
        raise UsageError(f"world_size={world_size} must be from 1 to {MAX_WORLD_SIZE}.")
    if not 0 <= rank < world_size:
        raise UsageError(
            f"rank={rank} must be from 0 to {world_size - 1}: world_size={world_size}."
        )
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"name={name[:80]!r} must be of a-z, 0-9, dots, dashes and underscores, "
            "begin with one of the first two, and have 64 at most."
        )
