"""Findings: the troubles of a run, each as a sentence with a remedy and a command.

A finding is a function of the status and the past, without a clock. Everything that
shows a run uses these: the status page, its JSON, events and metrics.
"""

from __future__ import annotations

import enum
import math
import shlex
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from atoll.telemetry.past import DENIED_S, Past
from atoll.telemetry.text import (
    format_brief,
    format_loss,
    format_share,
    format_size,
    format_span,
)

MAX_FINDINGS = 20
MAX_PER_KIND = 3
"""Findings of one kind; the last one counts the others."""

MIN_STILL_S = 60.0
REFUSED_S = 600.0
"""A refusal is a finding for ten rounds, and for ten minutes at least."""

FLAPPING_JOINS, FLAPPING_S = 3, 1800.0
LATE_OF, LATE_ROUNDS = 3, 5
HIGH_WAITING_SHARE = 1 / 3
UNEQUAL = 1.5
RISE_SPREADS, RISE_SHARE = 3.0, 0.05
APART_DEVIATIONS, APART_ROUNDS, MIN_PEERS = 5.0, 5, 3
SPARE_BYTES = 1_000_000_000
MAX_DENIED = 20
RESTARTED_S = 900.0
SOON_S = 3600.0


class Severity(enum.StrEnum):
    """How urgent a finding is; the first is the worst."""

    BAD = "bad"
    WARN = "warn"
    NOTE = "note"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One trouble of a run."""

    severity: Severity
    kind: str
    message: str
    """One sentence with the values."""

    remedy: str
    """A sentence; empty: nothing needs to be done."""

    command: str | None = None
    """The command of the remedy, if there is one."""

    island: str | None = None
    since_unix_s: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return asdict(self) | {"severity": self.severity.value}


@dataclass(frozen=True)
class FindingInput:
    """The inputs of all rules."""

    status: Mapping[str, Any]
    past: Past | None
    now_unix_s: float

    @property
    def islands(self) -> list[Mapping[str, Any]]:
        return list(self.status["islands"])

    @property
    def members(self) -> list[Mapping[str, Any]]:
        """The islands that have not left."""
        return [row for row in self.islands if row["state"] != "left"]

    @property
    def is_training(self) -> bool:
        return bool(self.status["state"] == "training")

    def control(self, action: str) -> str:
        """Return the command of an operator's action."""
        return f"atoll control {shlex.quote(self.status['name'])} {action}"

    def evict(self, island: str) -> str:
        return self.control(f"evict {shlex.quote(island)}")


def findings(
    status: Mapping[str, Any], past: Past | None, *, now_unix_s: float
) -> list[Finding]:
    """Return the findings of a run, the worst first, at most `MAX_FINDINGS`.

    Args:
        status: The status document, with its past.
        past: None: it is not known, and rules that need it find nothing.
        now_unix_s: The time.
    """
    view = FindingInput(status, past, now_unix_s)
    present = [finding for rule in RULES for finding in _few(list(rule(view)))]
    order = list(Severity)
    return sorted(present, key=lambda x: order.index(x.severity))[:MAX_FINDINGS]


def _few(same_kind: list[Finding]) -> list[Finding]:
    """Return the first findings of a kind; the last of them counts the others."""
    first, others = same_kind[:MAX_PER_KIND], same_kind[MAX_PER_KIND:]
    if others:
        last = asdict(first[-1])
        last["message"] += f" And {len(others)} more islands."
        first[-1] = Finding(**last)
    return first


def _no_progress(view: FindingInput) -> Iterator[Finding]:
    status = view.status
    committed_unix_s, usual_s = (
        status.get("last_commit_unix_s"),
        status.get("usual_round_s"),
    )
    if not view.is_training or committed_unix_s is None:
        return
    still_s = view.now_unix_s - committed_unix_s
    if still_s <= max(3 * (usual_s or 0.0), MIN_STILL_S):
        return
    awaited = sorted({row["island"] for row in status["waits_for"]})
    names = ", ".join(awaited[:MAX_PER_KIND])
    waits = f", and the run waits for {names}" if awaited else ""
    lates = [row["late_in_s"] for row in status["waits_for"]]
    is_closing = bool(lates) and None not in lates
    closes = f" closes by itself in {format_span(max(lates))}" if is_closing else ""
    yield Finding(
        severity=Severity.BAD,
        kind="no_progress",
        message=f"No round was committed for {format_span(still_s)}{waits}.",
        remedy=(
            f"The round{closes}; or evict the island."
            if closes
            else "Look at the island's log, or evict it."
        ),
        command=view.evict(awaited[0]) if awaited else None,
        island=awaited[0] if awaited else None,
        since_unix_s=committed_unix_s,
    )


def _quorum_lost(view: FindingInput) -> Iterator[Finding]:
    status = view.status
    live = sum(row["state"] == "live" for row in view.islands)
    if status["state"] != "waiting" or status["round"] < 1 or live >= status["quorum"]:
        return
    silent = [row for row in view.members if row["state"] == "silent"]
    last = min(silent, key=lambda row: row["seen_s"] or 0.0, default=None)
    seen = f" {last['island']} was the last to fall silent." if last else ""
    yield Finding(
        severity=Severity.BAD,
        kind="quorum_lost",
        message=f"{live} islands are live, below quorum={status['quorum']}.{seen}",
        remedy="Start islands again, add others, or lower the quorum.",
        command=view.control(f"set run.quorum={max(1, live)}"),
        since_unix_s=status.get("since_unix_s"),
    )


def _loss_not_finite(view: FindingInput) -> Iterator[Finding]:
    for row in view.members:
        if row.get("loss_is_finite") is False:
            yield Finding(
                severity=Severity.BAD,
                kind="loss_not_finite",
                message=f"The loss of {row['island']} is not a number.",
                remedy="Evict it: its updates are refused anyway.",
                command=view.evict(row["island"]),
                island=row["island"],
                since_unix_s=row.get("as_of_unix_s"),
            )


def _dropped(view: FindingInput) -> Iterator[Finding]:
    for row in view.members:
        record = view.past.islands.get(row["island"]) if view.past else None
        since = record.dropped_unix_s if record else None
        if record and since is not None and view.now_unix_s - since < _recent_s(view):
            yield Finding(
                severity=Severity.BAD,
                kind="dropped",
                message=(
                    f"{row['island']} missed rounds and dropped "
                    f"{record.dropped_steps} inner steps so far."
                ),
                remedy="Raise run.patience, or give it a faster link.",
                command=view.control("set run.patience=..."),
                island=row["island"],
                since_unix_s=since,
            )


def _recent_s(view: FindingInput) -> float:
    return max(REFUSED_S, 10 * (view.status.get("usual_round_s") or 0.0))


def _apart(view: FindingInput) -> Iterator[Finding]:
    agreement = view.status.get("agreement")
    if agreement and agreement["apart"]:
        names = ", ".join(agreement["apart"][:MAX_PER_KIND])
        yield Finding(
            severity=Severity.BAD,
            kind="apart",
            message=f"The anchors of {names} differ from those of the others.",
            remedy="This is a bug: report it, with an update of the island.",
            command="atoll inspect UPDATE",
            island=agreement["apart"][0],
        )


def _damage(view: FindingInput) -> Iterator[Finding]:
    for text in view.status["damage"][:MAX_PER_KIND]:
        yield Finding(
            severity=Severity.BAD,
            kind="damage",
            message=f"The journal is damaged: {text}",
            remedy="Check the disk of the coordinator, and keep a copy of its journal.",
            command="atoll doctor --dir DIR",
        )


_NOTED = {
    "disk_failed": (Severity.BAD, "Free space there, or check its permissions."),
    "fault": (Severity.BAD, "This is a bug: report it with the coordinator's log."),
    "events_dropped": (Severity.WARN, "The machine of the coordinator is too slow."),
}


def _noted(view: FindingInput) -> Iterator[Finding]:
    """Find the last note of each kind of trouble, for ten minutes."""
    newest = {note["event"]: note for note in view.past.notes} if view.past else {}
    for kind, (severity, remedy) in _NOTED.items():
        note = newest.get(kind)
        if note is None or view.now_unix_s - note["at"] > REFUSED_S:
            continue
        text = note.get("message") or (
            f"The sink {note.get('sink')} missed {note.get('dropped')} events."
        )
        yield Finding(
            severity=severity,
            kind=kind,
            message=str(text),
            remedy=remedy,
            since_unix_s=note["at"],
        )


def _disk_low(view: FindingInput) -> Iterator[Finding]:
    disk = view.status.get("disk")
    if not disk:
        return
    needed_bytes = 3 * disk["reserve_bytes"] + SPARE_BYTES
    if disk["free_bytes"] < needed_bytes:
        yield Finding(
            severity=Severity.WARN,
            kind="disk_low",
            message=(
                f"The coordinator's disk has {format_size(disk['free_bytes'])} free, "
                f"below {format_size(needed_bytes)}."
            ),
            remedy="Free space there: a full disk stops the run.",
        )


def _same_data(view: FindingInput) -> Iterator[Finding]:
    for names in view.status["same_data"]:
        yield Finding(
            severity=Severity.BAD,
            kind="same_data",
            message=f"{', '.join(names[:8])} have begun with the same batch.",
            remedy="Give each island its own rows, as atoll.torch.shard does.",
            island=names[0],
        )


def _loss_rises(view: FindingInput) -> Iterator[Finding]:
    if view.past is None:
        return
    finite = [list(filter(math.isfinite, x.values())) for x in view.past.round_losses]
    means = [statistics.mean(losses) for losses in finite if losses]
    before, after = means[-20:-10], means[-10:]
    if len(before) < 10:
        return
    rise = statistics.mean(after) - statistics.mean(before)
    spread = statistics.stdev(before)
    if rise > RISE_SPREADS * spread and rise > RISE_SHARE * statistics.mean(before):
        yield Finding(
            severity=Severity.WARN,
            kind="loss_rises",
            message=(
                f"The mean loss rose from {format_loss(statistics.mean(before))} to "
                f"{format_loss(statistics.mean(after))} in the last 10 rounds."
            ),
            remedy="Look at the last change of the settings, or lower outer.lr.",
            command=view.control("set outer.lr=..."),
        )


def _island_apart(view: FindingInput) -> Iterator[Finding]:
    rounds = list(view.past.round_losses)[-APART_ROUNDS:] if view.past else []
    if len(rounds) < APART_ROUNDS:
        return
    for row in view.members:
        name = row["island"]
        if all(_is_above(name, losses) for losses in rounds):
            yield Finding(
                severity=Severity.WARN,
                kind="island_apart",
                message=(
                    f"The loss of {name} is {format_loss(rounds[-1][name])}, far above "
                    f"that of the others for {APART_ROUNDS} rounds."
                ),
                remedy="Look at its data and its learning rate.",
                island=name,
            )


def _is_above(island: str, losses: Mapping[str, float]) -> bool:
    finite = {name: loss for name, loss in losses.items() if math.isfinite(loss)}
    others = [loss for name, loss in finite.items() if name != island]
    if island not in finite or len(others) < MIN_PEERS:
        return False
    median = statistics.median(others)
    deviation = statistics.median(abs(loss - median) for loss in others)
    margin = max(APART_DEVIATIONS * deviation, RISE_SHARE * abs(median))
    return losses[island] > median + margin


def _refused(view: FindingInput) -> Iterator[Finding]:
    for row in view.members:
        record = view.past.islands.get(row["island"]) if view.past else None
        since = record.refused_unix_s if record else None
        if record and since is not None and view.now_unix_s - since < _recent_s(view):
            yield Finding(
                severity=Severity.WARN,
                kind="refused",
                message=f"{row['island']} was refused: {record.refused_because}",
                remedy="Look at its loss and its data; an evicted island can rejoin.",
                command=view.evict(row["island"]),
                island=row["island"],
                since_unix_s=since,
            )


def _silent(view: FindingInput) -> Iterator[Finding]:
    live = sum(row["state"] == "live" for row in view.islands)
    goes_on = "The others continue." if live >= view.status["quorum"] else ""
    for row in view.members:
        if row["state"] == "silent" and view.status["state"] != "ended":
            seen_s = row["seen_s"]
            since = None if seen_s is None else view.now_unix_s - seen_s
            yield Finding(
                severity=Severity.WARN,
                kind="silent",
                message=(
                    f"{row['island']} is silent for {format_brief(seen_s)}. {goes_on}"
                ).rstrip(),
                remedy="Look at its machine; start it again with the same command.",
                island=row["island"],
                since_unix_s=since,
            )


def _flapping(view: FindingInput) -> Iterator[Finding]:
    for row in view.islands:
        record = view.past.islands.get(row["island"]) if view.past else None
        joins = record.joined_unix_s if record else []
        recent = [x for x in joins if view.now_unix_s - x < FLAPPING_S]
        if len(recent) >= FLAPPING_JOINS:
            yield Finding(
                severity=Severity.WARN,
                kind="flapping",
                message=(
                    f"{row['island']} has joined {len(recent)} times in "
                    f"{format_span(FLAPPING_S)}."
                ),
                remedy="Look at its log: something ends it again and again.",
                island=row["island"],
                since_unix_s=recent[0],
            )


def _late(view: FindingInput) -> Iterator[Finding]:
    for row in view.members:
        record = view.past.islands.get(row["island"]) if view.past else None
        marks = record.marks[-LATE_ROUNDS:] if record else ""
        if marks.count("~") >= LATE_OF:
            pace = (
                f" Its pace is {format_span(row['pace_s'])}." if row["pace_s"] else ""
            )
            yield Finding(
                severity=Severity.WARN,
                kind="late",
                message=(
                    f"{row['island']} was late in {marks.count('~')} of its last "
                    f"{len(marks)} rounds.{pace}"
                ),
                remedy=(
                    "Raise run.patience, or set sync.dynamic_local_updates=true in the "
                    "next run."
                ),
                command=view.control("set run.patience=..."),
                island=row["island"],
            )


def _waiting_dear(view: FindingInput) -> Iterator[Finding]:
    share = view.status.get("stall_share_mean")
    if view.is_training and share is not None and share > HIGH_WAITING_SHARE:
        yield Finding(
            severity=Severity.WARN,
            kind="waiting_dear",
            message=f"Islands wait for {format_share(share)} of their time.",
            remedy=view.status["cure"] or "Raise sync.sync_every in the next run.",
        )


def _slowest(view: FindingInput) -> Iterator[Finding]:
    paces = {row["island"]: row["step_s"] for row in view.members if row["step_s"]}
    if len(paces) < 2:
        return
    median = statistics.median(paces.values())
    name = max(paces, key=lambda island: paces[island])
    if paces[name] >= UNEQUAL * median:
        yield Finding(
            severity=Severity.NOTE,
            kind="slowest",
            message=(
                f"{name} takes {paces[name] / median:.1f} times as long for an inner "
                "step as the median island."
            ),
            remedy="Set sync.dynamic_local_updates=true in the next run.",
            island=name,
        )


def _denied(view: FindingInput) -> Iterator[Finding]:
    recent = [
        (time_s, count)
        for time_s, count in (view.past.denied if view.past else ())
        if view.now_unix_s - time_s <= DENIED_S
    ]
    total = int(sum(count for _, count in recent))
    if total > MAX_DENIED:
        yield Finding(
            severity=Severity.NOTE,
            kind="denied",
            message=f"{total} requests were denied in {format_span(DENIED_S)}.",
            remedy="The audit events have their addresses.",
            command=f"atoll events {shlex.quote(view.status['name'])} --since 10min",
            since_unix_s=recent[0][0],
        )


def _restarted(view: FindingInput) -> Iterator[Finding]:
    past, started = view.past, view.status["started_unix_s"]
    if past is None or started is None or past.starts < 2:
        return
    if view.now_unix_s - started < RESTARTED_S:
        manner = (
            ""
            if past.was_clean
            else " The process before it has ended without a close."
        )
        yield Finding(
            severity=Severity.NOTE,
            kind="restarted",
            message=(
                f"The coordinator started {format_brief(view.now_unix_s - started)} "
                f"ago.{manner}"
            ),
            remedy="Nothing is lost: every committed round is durable.",
            since_unix_s=started,
        )


def _ends_soon(view: FindingInput) -> Iterator[Finding]:
    ends_unix_s = view.status.get("ends_unix_s")
    left_s = None if ends_unix_s is None else ends_unix_s - view.now_unix_s
    if view.is_training and left_s is not None and 0.0 <= left_s < SOON_S:
        yield Finding(
            severity=Severity.NOTE,
            kind="ends_soon",
            message=f"The run ends in about {format_span(left_s)}.",
            remedy="",
        )


RULES: tuple[Callable[[FindingInput], Iterator[Finding]], ...] = (
    _no_progress,
    _quorum_lost,
    _loss_not_finite,
    _apart,
    _same_data,
    _dropped,
    _damage,
    _noted,
    _disk_low,
    _silent,
    _refused,
    _loss_rises,
    _island_apart,
    _flapping,
    _late,
    _waiting_dear,
    _restarted,
    _slowest,
    _denied,
    _ends_soon,
)
