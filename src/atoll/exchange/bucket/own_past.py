"""An incarnation's own past: how its training went, for people who look at the run.

A bucket has no process that keeps the past of a run, so each incarnation puts its own
at `past/<slug>.<incarnation>`: after the first round, every ten rounds, and when it
leaves. No island reads it.

Rule 1: it is bounded. When the rows are full, neighbours merge: totals keep the later
value, so that rates stay exact, and losses their mean.
Rule 2: a failure to put it costs the run nothing.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from atoll.errors import AtollError
from atoll.exchange.api import bodies as fields
from atoll.exchange.api.messages import METRICS
from atoll.exchange.bucket import documents, keys
from atoll.fields import JsonField
from atoll.protocol import Stats
from atoll.store import Store

MAX_ROWS, MAX_COMMITS = 256, 512
EVERY_ROUNDS = 10
_SIZE_MAX = 2**63 - 1

log = logging.getLogger("atoll")


@dataclass(frozen=True, kw_only=True)
class PastRow:
    """The progress of an island at one moment; totals since it joined."""

    at_unix_s: float
    round: int
    inner_steps: int
    tokens: int
    loss: float | None
    """The mean of the finite losses since the row before."""

    losses: int
    """Losses since then; with `loss` None they were not finite."""

    seconds: float
    wait_s: float
    bytes_up: int
    bytes_down: int


@dataclass(frozen=True, kw_only=True)
class SeenCommit:
    """A committed round, and when this island learned of it."""

    fragment: int
    round: int
    at_unix_s: float


@dataclass(frozen=True, kw_only=True)
class OwnPast:
    """The past of one incarnation, as it is put into the bucket."""

    run: str
    island: str
    incarnation: int
    slot: int
    version: str
    joined_unix_s: float
    has_left: bool
    rows: tuple[PastRow, ...] = ()
    commits: tuple[SeenCommit, ...] = ()
    anchor_metrics: dict[str, float] | None = None
    anchor_round: int | None = None


_COUNT = fields.integer(0, _SIZE_MAX)
_UNIX_S = fields.number(0.0, 2.0**40)
_ROW = fields.row(
    PastRow,
    {
        "at_unix_s": _UNIX_S,
        "round": _COUNT,
        "inner_steps": _COUNT,
        "tokens": _COUNT,
        "loss": fields.maybe(fields.number(-1e300, 1e300)),
        "losses": _COUNT,
        "seconds": _UNIX_S,
        "wait_s": _UNIX_S,
        "bytes_up": _COUNT,
        "bytes_down": _COUNT,
    },
)
_COMMIT = fields.row(
    SeenCommit, {"fragment": _COUNT, "round": _COUNT, "at_unix_s": _UNIX_S}
)
OWN_PAST: JsonField[OwnPast] = fields.table(
    OwnPast,
    {
        "run": fields.NAME,
        "island": fields.NAME,
        "incarnation": fields.integer(),
        "slot": _COUNT,
        "version": fields.text(64),
        "joined_unix_s": _UNIX_S,
        "has_left": fields.FLAG,
        "rows": fields.listed(_ROW, max_items=MAX_ROWS),
        "commits": fields.listed(_COMMIT, max_items=MAX_COMMITS),
    },
    optional={"anchor_metrics": METRICS, "anchor_round": _COUNT},
)


class OwnPastWriter:
    """Folds the statistics of heartbeats, and puts the past now and then.

    Args:
        store: The bucket.
        unix_s: Returns the Unix time.
    """

    def __init__(self, store: Store, unix_s: Callable[[], float]) -> None:
        self._store, self._unix_s = store, unix_s
        self._past: OwnPast | None = None
        self._rounds: tuple[int, ...] = ()
        self._commits: deque[SeenCommit] = deque(maxlen=MAX_COMMITS)
        self._put_round = 0
        self._lock = threading.Lock()

    def note(
        self, member: documents.MemberDocument, stats: Stats, rounds: Sequence[int]
    ) -> None:
        """Take in a heartbeat; `rounds` are the open rounds that it knows."""
        now_unix_s, beat = round(self._unix_s(), 3), member.beat
        past = self._past or OwnPast(
            run=member.run,
            island=beat.island,
            incarnation=beat.incarnation,
            slot=member.slot,
            version=stats.version,
            joined_unix_s=max(0.0, round(now_unix_s - stats.seconds, 3)),
            has_left=False,
        )
        self.saw(rounds)
        lowest_round = max(0, min(rounds, default=1) - 1)
        rows = past.rows
        if not rows or rows[-1].inner_steps != stats.inner_steps:
            rows = _bounded((*rows, _row_of(stats, lowest_round, now_unix_s)))
        self._past = replace(
            past,
            rows=rows,
            commits=tuple(self._commits),
            has_left=member.has_left,
            anchor_metrics=dict(stats.anchor_metrics or {}) or past.anchor_metrics,
            anchor_round=stats.anchor_round or past.anchor_round,
        )
        is_first = self._put_round == 0 and lowest_round > 0
        if (
            is_first
            or member.has_left
            or lowest_round >= self._put_round + EVERY_ROUNDS
        ):
            self._put_round = lowest_round
            self._put()

    def saw(self, rounds: Sequence[int]) -> None:
        """Note the open rounds: those before them that are new were just committed."""
        with self._lock:
            before, self._rounds = self._rounds, tuple(rounds)
            at_unix_s = round(self._unix_s(), 3)
            for fragment, (first, opened) in enumerate(
                zip(before, rounds, strict=False)
            ):
                for number in range(max(first, opened - MAX_COMMITS), opened):
                    self._commits.append(
                        SeenCommit(fragment=fragment, round=number, at_unix_s=at_unix_s)
                    )

    def _put(self) -> None:
        assert self._past is not None
        key = keys.past(self._past.island, self._past.incarnation)
        try:
            self._store.put(key, documents.packed(OWN_PAST, self._past, key))
        except AtollError as exc:
            log.warning("the island's past was not put into the bucket: %s", exc)


def _row_of(stats: Stats, lowest_round: int, at_unix_s: float) -> PastRow:
    return PastRow(
        at_unix_s=at_unix_s,
        round=lowest_round,
        inner_steps=stats.inner_steps,
        tokens=stats.tokens,
        loss=None if stats.loss is None else float(f"{stats.loss:.6g}"),
        losses=int(stats.loss_is_finite is not None),
        seconds=round(stats.seconds, 3),
        wait_s=round(stats.wait_s, 3),
        bytes_up=stats.bytes_up,
        bytes_down=stats.bytes_down,
    )


def _bounded(rows: tuple[PastRow, ...]) -> tuple[PastRow, ...]:
    """Return the rows; merged in pairs if there are too many."""
    if len(rows) <= MAX_ROWS:
        return rows
    pairs = [rows[first : first + 2] for first in range(0, len(rows), 2)]
    return tuple(_merged(pair) for pair in pairs)


def _merged(rows: Sequence[PastRow]) -> PastRow:
    losses = sum(row.losses for row in rows)
    finite = [row for row in rows if row.loss is not None]
    has_diverged = any(row.losses and row.loss is None for row in rows)
    loss = None
    if finite and not has_diverged:
        sums = math.fsum((row.loss or 0.0) * row.losses for row in finite)
        loss = float(f"{sums / max(1, losses):.6g}")
    return replace(rows[-1], loss=loss, losses=losses)
