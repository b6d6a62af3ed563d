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
from atoll.runtime import Clock, SystemClock

OPS = ("mean", "sum")
MAX_WORLD_SIZE = 10_000

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


class AllReduce:
    """Reduces under one name as one rank of a fixed number. Calls wait for each other.

    Args:
        start_round: The round of the first call, for callers that count rounds; None:
            the first that this rank has not done, according to the store.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
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
        Deadline.begin(self._clock, timeout_s)  # checks timeout_s
        self._progress = RankProgress(rendezvous, name, rank, world_size)
        self._round = self._progress.begin(start_round)
        self._lock = threading.Lock()
        self._has_finished_round = False
        self._sent = -1
        """The last round in which this process itself has put its values."""

    @property
    def round(self) -> int:
        """The round of the next call."""
        return self._round

    def __call__(
        self, body: Bytes, sections: Sections, *, layout: str, op: str = "mean"
    ) -> Bytes:
        """Return the reduced values, the same bytes on every rank.

        Safe to repeat after an error: values that were put stay, and count.

        Raises:
            Unreachable: a rank, which is named, is too late; or the store does not
                answer.
            UsageError: ranks do not reduce the same tensors.
            CorruptError: an object does not verify.
        """
        if op not in OPS:
            raise UsageError(f"op={op!r} must be one of {', '.join(OPS)}.")
        progress = self._progress
        terms = ReduceTerms(progress.name, progress.world_size, op, sections, layout)
        with self._lock:
            deadline = Deadline.begin(self._clock, self._timeout_s)
            own_body = self._send(terms, body)
            try:
                reduced = _Round(
                    progress, terms, self._round, own_body, deadline
                ).reduced()
            except TooLate:
                raise progress.absent(terms, self._round, deadline) from None
            progress.finish(self._round)
            self._round, self._has_finished_round = self._round + 1, True
            return reduced

    def _send(self, terms: ReduceTerms, body: Bytes) -> Bytes | None:
        """Put this rank's values; None: those of an earlier incarnation count."""
        progress = self._progress
        key = progress.up(self._round, progress.rank)
        frame = ExpectedFrame(terms, self._round, progress.rank)
        if progress.put(self._round, key, frame.sealed(body)):
            self._sent = self._round
            return body
        if self._has_finished_round and self._sent != self._round:
            raise UsageError(
                f"Another process has sent the values of rank {progress.rank} in round "
                f"{self._round} of {progress.name!r} "
                f"({progress.rendezvous.path(key)}). "
                "Give every process its own rank, or its own name."
            )
        return None


@dataclass
class _Round:
    """One round, from the ranks' values in the store to the reduced values."""

    progress: RankProgress
    terms: ReduceTerms
    number: int
    own_body: Bytes | None
    """This rank's values, if they are those in the store."""

    deadline: Deadline

    def __post_init__(self) -> None:
        self.waiting = ObjectWait(self.deadline)
        self.store = self.progress.rendezvous.store

    def reduced(self) -> Bytes:
        if self.terms.is_direct:
            return self._reduced(0)
        own_parts = {
            part: self._make(part)
            for part in range(self.terms.num_parts)
            if self._owner(part) == self.progress.rank
        }
        out = np.empty(self.terms.sections.body_bytes, np.uint8)

        def read(part: int) -> None:
            first, last = self.terms.window(self.terms.pieces(part))
            out[first:last] = own_parts[part] if part in own_parts else self._part(part)

        self.waiting.run_all([partial(read, p) for p in range(self.terms.num_parts)])
        return out

    def _make(self, part: int) -> Bytes:
        """Reduce a part, and put it for all ranks."""
        reduced = self._reduced(part)
        frame = ExpectedFrame(self.terms, self.number, self.progress.rank, part)
        key = self.progress.mean(self.number, part)
        self.progress.put(self.number, key, frame.sealed(reduced))
        return reduced

    def _reduced(self, part: int) -> Bytes:
        pieces = self.terms.pieces(part)
        ranks = range(self.progress.world_size)
        bodies = self.waiting.run_all([partial(self._body, r, pieces) for r in ranks])
        first, _ = self.terms.window(pieces)
        divisor = len(ranks) if self.terms.op == "mean" else None
        return self.terms.sections.reduced(bodies, first=first, divisor=divisor)

    def _body(self, rank: int, pieces: range) -> Bytes:
        """Return pieces of a rank's values: in one read, or after its header."""
        first, last = self.terms.window(pieces)
        if rank == self.progress.rank and self.own_body is not None:
            return self.own_body[first:last]
        frame = ExpectedFrame(self.terms, self.number, rank)
        key = self.progress.up(self.number, rank)
        path, start = self.progress.rendezvous.path(key), frame.header_bytes
        is_complete = last - first == self.terms.sections.body_bytes
        head = self._head(key, frame.size if is_complete else start)
        header = frame.opened(head, path=path)
        if is_complete:
            body = head[start:]
        else:
            body = self.store.get(key, start + first, last - first)
        return verified(header, pieces, body, path=path)

    def _part(self, part: int) -> Bytes:
        """Return a part that another rank has reduced."""
        frame = ExpectedFrame(self.terms, self.number, self._owner(part), part)
        key = self.progress.mean(self.number, part)
        path = self.progress.rendezvous.path(key)
        data = self._head(key, frame.size)
        header = frame.opened(data, path=path)
        body = data[frame.header_bytes :]
        return verified(header, range(len(header.pieces)), body, path=path)

    def _head(self, key: str, size: int) -> memoryview:
        """Wait for an object; return its first bytes, at least its header."""
        data = self.waiting.until_exists(partial(self.store.get, key, 0, size))
        needed = header_bytes_of(data, path=self.progress.rendezvous.path(key))
        return data if needed <= len(data) else self.store.get(key, 0, needed)

    def _owner(self, part: int) -> int:
        return self.terms.owner(part, self.number)


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
