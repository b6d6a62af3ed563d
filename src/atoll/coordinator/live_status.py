"""The status of a run that is served: its state, its past, its findings, its traffic.

A thread looks for findings every few seconds, and reports as events those that begin
and those that end. It takes the lock of the service only to look at its state.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

from atoll import __version__
from atoll.coordinator.service import Service
from atoll.coordinator.status import Watcher, status_of
from atoll.coordinator.status_fields import cure
from atoll.coordinator.threads import ThreadedService
from atoll.protocol import HeldRound, Stats
from atoll.protocol.coordinator_state import CoordinatorState
from atoll.protocol.rounds import Phase
from atoll.telemetry import (
    EventBus,
    Finding,
    Past,
    PastRecorder,
    findings,
    with_past,
)

LOOK_EVERY_S = 5.0
MAX_NAMES = 100

FindingKey = tuple[str, str | None]
"""Kind and island."""


class LiveStatus:
    """Makes status documents, and reports findings as events.

    Args:
        trouble: Returns a failure that stops the run, or an empty text.
        traffic: Returns the part of the document that is the listener's.
    """

    def __init__(
        self,
        service: Service,
        threaded_service: ThreadedService,
        watcher: Watcher,
        past: PastRecorder,
        events: EventBus,
        *,
        trouble: Callable[[], str],
        traffic: Callable[[], dict[str, Any]],
        started_unix_s: float,
    ) -> None:
        self._service, self._threaded_service = service, threaded_service
        self._watcher, self._past, self._events = watcher, past, events
        self._trouble, self._traffic = trouble, traffic
        self._started_unix_s = started_unix_s
        self._reported: dict[FindingKey, Finding] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(
            target=self._look, name="atoll-findings", daemon=True
        )

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Stop the thread. Safe to repeat."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(LOOK_EVERY_S)

    def document(self) -> dict[str, Any]:
        """Return the status document."""
        document, past_findings = self._with_findings()
        return document | {"findings": [row.as_dict() for row in past_findings]}

    def _with_findings(self) -> tuple[dict[str, Any], list[Finding]]:
        now_unix_s, before = time.time(), self._past.before()
        base = self._base(now_unix_s)

        def of_past(past: Past | None) -> tuple[dict[str, Any], list[Finding]]:
            document = with_past(base, past, before, now_unix_s=now_unix_s)
            document["cure"] = self._cure(document)
            return document, findings(document, past, now_unix_s=now_unix_s)

        return self._past.read(of_past) or of_past(None)

    def _base(self, now_unix_s: float) -> dict[str, Any]:
        """Return the document by this process alone."""
        state, now_s = self._threaded_service.look()
        document = status_of(
            state,
            now_s,
            stats=dict(self._watcher.stats),
            verdicts=self._watcher.verdicts,
            since_unix_s=self._watcher.since_unix_s,
            recent=list(self._watcher.recent),
            rows_per_s=self._watcher.rows.rows_per_s,
        )
        trouble = self._trouble()
        room = self._service.journal.room
        return document | {
            "why": f"{trouble} {document['why']}".strip(),
            "version": __version__,
            "started_unix_s": self._started_unix_s,
            "now_unix_s": now_unix_s,
            "recent": list(self._watcher.recent),
            "open": open_rounds(state, now_s, now_unix_s=now_unix_s),
            "agreement": agreement_of(state, now_s),
            "disk": {
                "free_bytes": room.free_bytes,
                "reserve_bytes": room.reserve_bytes,
            },
            "damage": [*self._service.journal.reports, *self._service.damage],
            **self._traffic(),
        }

    def _cure(self, document: dict[str, Any]) -> str | None:
        state, now_s = self._threaded_service.look()
        rows = [row["wait_share"] for row in document["islands"]]
        return cure(state, now_s, [share for share in rows if share is not None])

    def _look(self) -> None:
        while not self._ended.wait(LOOK_EVERY_S):
            _, present = self._with_findings()
            self.report(present)

    def report(self, present: list[Finding]) -> None:
        """Emit events for the findings that have begun or ended since the last call."""
        by_key = {(row.kind, row.island): row for row in present}
        for key in self._reported.keys() - by_key.keys():
            kind, island = key
            self._events.emit("finding_ended", kind=kind, island=island)
        for key, finding in by_key.items():
            if key not in self._reported:
                self._events.emit(
                    "finding_began",
                    severity=finding.severity.value,
                    kind=finding.kind,
                    message=finding.message,
                    remedy=finding.remedy,
                    command=finding.command,
                    island=finding.island,
                )
        self._reported = by_key


class ProgressReporter:
    """Records the statistics of heartbeats, and reports their news as events.

    Args:
        stats: The last statistics of each island.
    """

    def __init__(self, events: EventBus, stats: MutableMapping[str, Stats]) -> None:
        self._events, self._stats = events, stats

    def report(self, island: str, holds: Sequence[HeldRound], stats: Stats) -> None:
        """Record the statistics, and emit events for its news."""
        before = self._stats.get(island)
        self._stats[island] = stats
        self._report_dropped(island, before, stats)
        self._report_anchor(island, before, stats)
        if before is not None and _progress(before) == _progress(stats):
            return  # without progress it would only crowd out other events
        self._events.emit(
            "loss_reported",
            island=island,
            round=min((holding.round for holding in holds), default=0),
            inner_steps=stats.inner_steps,
            tokens=stats.tokens,
            loss=stats.loss,
            loss_is_finite=stats.loss_is_finite,
            metrics=stats.metrics,
            **({} if before else {"version": stats.version}),
            seconds=stats.seconds,
            wait_s=stats.wait_s,
            bytes_up=stats.bytes_up,
            bytes_down=stats.bytes_down,
            carried=stats.carried,
            dropped=stats.dropped,
            **_changed(before, stats, ("machine", "up_bytes_per_s")),
            **_changed(before, stats, ("down_bytes_per_s", "rtt_s")),
            exchange_s=stats.exchange_s,
            hidden_s=stats.hidden_s,
        )

    def _report_anchor(self, island: str, before: Stats | None, now: Stats) -> None:
        """Emit an event when an island has evaluated the anchor."""
        measured = now.anchor_round, now.anchor_metrics
        is_new = (
            before is None or (before.anchor_round, before.anchor_metrics) != measured
        )
        if is_new and now.anchor_round is not None:
            self._events.emit(
                "anchor_measured",
                island=island,
                round=now.anchor_round,
                metrics=now.anchor_metrics or {},
            )

    def _report_dropped(self, island: str, before: Stats | None, now: Stats) -> None:
        """Emit an event when an island reports more dropped work."""
        reported = (before.dropped_steps if before else None) or 0
        total = now.dropped_steps or 0
        if total > reported:
            self._events.emit(
                "work_dropped", island=island, steps=total - reported, total_steps=total
            )


def _changed(
    before: Stats | None, now: Stats, keys: tuple[str, ...]
) -> dict[str, object]:
    """Return the values that differ from those before, so that events are short."""
    return {
        key: getattr(now, key)
        for key in keys
        if before is None or getattr(before, key) != getattr(now, key)
    }


def _progress(stats: Stats) -> tuple[object, ...]:
    return stats.inner_steps, stats.tokens, stats.loss, stats.loss_is_finite


def agreement_of(state: CoordinatorState, now_s: float) -> dict[str, Any] | None:
    """Return how many live islands hold the newest round, and those that differ.

    Digests are compared for each fragment and round that several islands hold; in each
    the most frequent digest is right. None before any island holds a round.
    """
    digests: dict[tuple[int, int], dict[str, bytes]] = defaultdict(dict)
    live = state.members.live(now_s)
    for name in live:
        for fragment, holding in enumerate(state.members.known[name].holds):
            digests[fragment, holding.round][name] = holding.digest
    if not digests:
        return None
    apart = set()
    for by_island in digests.values():
        (majority, _), *_ = Counter(by_island.values()).most_common(1)
        apart |= {name for name, digest in by_island.items() if digest != majority}
    newest = max(round for fragment, round in digests if fragment == 0)
    holders = digests[0, newest]
    digest = Counter(holders.values()).most_common(1)[0][0]
    return {
        "round": newest,
        "digest": digest.hex()[:16],
        "holding": len(holders.keys() - apart),
        "of": len(live),
        "apart": sorted(apart)[:MAX_NAMES],
    }


def open_rounds(
    state: CoordinatorState, now_s: float, *, now_unix_s: float
) -> list[dict[str, Any]]:
    """Return the open rounds: islands that have published, awaited ones, the close."""
    rows = []
    for round in state.rounds:
        if round.phase is not Phase.OPEN:
            continue
        awaited = sorted(round.missing(state.members, now_s))
        lates = [
            round.late_at_s(name, state.members, state.settings) for name in awaited
        ]
        closes = now_unix_s + max(lates) - now_s if lates and round.staged else None
        rows.append(
            {
                "fragment": round.fragment,
                "round": round.number,
                "opened_unix_s": now_unix_s + round.opened_s - now_s,
                "staged": sorted(round.staged)[:MAX_NAMES],
                "awaited": awaited[:MAX_NAMES],
                "closes_unix_s": closes,
            }
        )
    return rows
