"""Findings: one state of a run a row, with its sentence, remedy and command."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from atoll.telemetry import METRICS, Counters, Past, findings, render, render_status
from atoll.telemetry.findings import (
    MAX_FINDINGS,
    MAX_PER_KIND,
    RESTARTED_S,
    RULES,
    Finding,
    Severity,
)
from tests.telemetry.statuses import island, status
from tests.telemetry.streams import Stream

NOW_UNIX_S = 1_700_003_600.0
HOUR_AGO = 1_700_000_000.0

CALM: dict[str, Any] = {
    "last_commit_unix_s": NOW_UNIX_S - 10,
    "usual_round_s": 12.0,
    "disk": {"free_bytes": 10**12, "reserve_bytes": 10**9},
    "agreement": None,
}


def calm(*rows: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return the status of a run without a finding."""
    islands = rows or (island("a"), island("b"))
    return status(*islands, **{**CALM, **changes})


def past_of(act: Callable[[Stream], None] = lambda stream: None) -> Past:
    """Return the past of a run of three islands, after `act` an hour later."""
    stream = Stream(at_unix_s=HOUR_AGO)
    stream.start()
    for slot, name in enumerate("abc"):
        stream.join(name, slot)
    stream.at_unix_s = NOW_UNIX_S - 30
    act(stream)
    past = Past()
    for event in stream.made:
        past.add(event)
    return past


def found(document: dict[str, Any], past: Past | None = None) -> list[Finding]:
    """Return the findings of a status."""
    return findings(document, past or past_of(), now_unix_s=NOW_UNIX_S)


WAIT = {"island": "b", "fragment": 0, "round": 7, "since_s": 300.0, "late_in_s": 48.0}
LONG_AGO = {"last_commit_unix_s": NOW_UNIX_S - 300}
SILENT = island("b", state="silent", seen_s=75.0)
OLD_SILENT = island("a", state="silent", seen_s=900.0)

FROM_STATUS = {
    "no_progress": (
        calm(**LONG_AGO, waits_for=[WAIT]),
        "bad",
        "No round was committed for 5 min 0 s, and the run waits for b.",
        "The round closes by itself in 48.0 s; or evict the island.",
        "atoll control demo evict b",
    ),
    "quorum_lost": (
        calm(SILENT, OLD_SILENT, state="waiting", quorum=2),
        "bad",
        "0 islands are live, below quorum=2. b was the last to fall silent.",
        "Start islands again, add others, or lower the quorum.",
        "atoll control demo set run.quorum=1",
    ),
    "loss_not_finite": (
        calm(island("a"), island("b c", loss=None, loss_is_finite=False)),
        "bad",
        "The loss of b c is not a number.",
        "Evict it: its updates are refused anyway.",
        "atoll control demo evict 'b c'",
    ),
    "apart": (
        calm(agreement={"round": 7, "holding": 1, "of": 2, "apart": ["b"]}),
        "bad",
        "The anchors of b differ from those of the others.",
        "This is a bug: report it, with an update of the island.",
        "atoll inspect UPDATE",
    ),
    "damage": (
        calm(damage=["log/3 does not verify."]),
        "bad",
        "The journal is damaged: log/3 does not verify.",
        "Check the disk of the coordinator, and keep a copy of its journal.",
        "atoll doctor --dir DIR",
    ),
    "same_data": (
        calm(same_data=[["a", "b"]]),
        "bad",
        "a, b have begun with the same batch.",
        "Give each island its own rows, as atoll.torch.shard does.",
        None,
    ),
    "disk_low": (
        calm(disk={"free_bytes": 2 * 10**9, "reserve_bytes": 10**9}),
        "warn",
        "The coordinator's disk has 2.00 GB free, below 4.00 GB.",
        "Free space there: a full disk stops the run.",
        None,
    ),
    "silent": (
        calm(island("a"), SILENT),
        "warn",
        "b is silent for 75 s. The others continue.",
        "Look at its machine; start it again with the same command.",
        None,
    ),
    "waiting_dear": (
        calm(stall_share_mean=0.4, cure="Give sync.overlap_steps."),
        "warn",
        "Islands wait for 40 % of their time.",
        "Give sync.overlap_steps.",
        None,
    ),
    "slowest": (
        calm(island("a", step_s=0.1), island("b", step_s=0.1), island("c", step_s=0.3)),
        "note",
        "c takes 3.0 times as long for an inner step as the median island.",
        "Set sync.dynamic_local_updates=true in the next run.",
        None,
    ),
    "ends_soon": (
        calm(ends_unix_s=NOW_UNIX_S + 600),
        "note",
        "The run ends in about 10 min 0 s.",
        "",
        None,
    ),
}


@pytest.mark.parametrize("kind", FROM_STATUS)
def test_a_state_of_the_run_is_found(kind: str) -> None:
    """One row of the table: the state, and all that is said about it."""
    document, severity, message, remedy, command = FROM_STATUS[kind]
    (finding,) = [row for row in found(document) if row.kind == kind]

    assert finding.severity == severity
    assert (finding.message, finding.remedy) == (message, remedy)
    assert finding.command == command


def refuse(stream: Stream) -> None:
    stream.emit("update_refused", island="b", fragment=0, round=7, reason="norm: 812.1")


def drop(stream: Stream) -> None:
    stream.emit("work_dropped", island="b", steps=20, total_steps=62)


def flap(stream: Stream) -> None:
    for incarnation in (2, 3, 4):
        stream.at_unix_s += 1
        stream.join("b", 1, incarnation)


def come_late(stream: Stream) -> None:
    for number, marks in enumerate(["###", "#~#", "#~#", "###", "#~#"], start=1):
        stream.at_unix_s += 1
        stream.commit(0, number, marks)


def rise(stream: Stream) -> None:
    for number in range(1, 21):
        stream.at_unix_s += 1
        for name in "abc":
            loss = 2.0 + 0.0001 * (number % 2) if number < 11 else 3.0
            stream.report(name, number, loss)
        stream.commit(0, number, "###")


def lose(stream: Stream) -> None:
    for number in range(1, 21):
        stream.at_unix_s += 1
        for name in "abc":
            stream.report(name, number, None, loss_is_finite=number < 5)
        stream.commit(0, number, "###")


def diverge(stream: Stream) -> None:
    stream.join("d", 3)
    for number in range(1, 7):
        stream.at_unix_s += 1
        for name, loss in (("a", 2.0), ("b", 4.0), ("c", 2.01), ("d", 1.99)):
            stream.report(name, number, loss)
        stream.commit(0, number, "####")


def deny(stream: Stream) -> None:
    fields = {"what": "request", "address": "10.0.0.9", "role": "none"}
    stream.emit("audit", answer="no_token", untold=25, **fields)


def restart(stream: Stream) -> None:
    stream.start(was_clean=False)


FROM_PAST = {
    "refused": (refuse, {}, "warn", "b was refused: norm: 812.1"),
    "dropped": (
        drop,
        {},
        "bad",
        "b missed rounds and dropped 62 inner steps so far.",
    ),
    "flapping": (flap, {}, "warn", "b has joined 3 times in 30 min 0 s."),
    "late": (
        come_late,
        {},
        "warn",
        "b was late in 3 of its last 5 rounds. Its pace is 12.4 s.",
    ),
    "loss_rises": (
        rise,
        {},
        "warn",
        "The mean loss rose from 2.000 to 3.000 in the last 10 rounds.",
    ),
    "island_apart": (
        diverge,
        {},
        "warn",
        "The loss of b is 4.000, far above that of the others for 5 rounds.",
    ),
    "denied": (deny, {}, "note", "26 requests were denied in 10 min 0 s."),
    "restarted": (
        restart,
        {"started_unix_s": NOW_UNIX_S - 30},
        "note",
        "The coordinator started 30 s ago. The process before it has ended without a "
        "close.",
    ),
    "disk_failed": (
        lambda stream: stream.emit("disk_failed", message="No space. Free some."),
        {},
        "bad",
        "No space. Free some.",
    ),
    "fault": (
        lambda stream: stream.emit("fault", message="the coordinator: KeyError: 3"),
        {},
        "bad",
        "the coordinator: KeyError: 3",
    ),
    "events_dropped": (
        lambda stream: stream.emit(
            "events_dropped", sink="jsonl", dropped=7, reason=""
        ),
        {},
        "warn",
        "The sink jsonl missed 7 events.",
    ),
}


@pytest.mark.parametrize("kind", FROM_PAST)
def test_a_past_trouble_is_found(kind: str) -> None:
    """It is found for a while after it happened, and not without the event."""
    act, changes, severity, message = FROM_PAST[kind]
    document = calm(**changes)
    (finding,) = [row for row in found(document, past_of(act)) if row.kind == kind]

    assert finding.severity == severity
    assert finding.message == message
    assert finding.remedy
    assert [row for row in found(document) if row.kind == kind] == []


def test_every_rule_has_a_row() -> None:
    """A rule without a row of these tables has no test."""
    assert len(FROM_STATUS) + len(FROM_PAST) == len(RULES) + 2  # three kinds of notes


def test_a_calm_run_has_no_finding() -> None:
    """Nor has a run that nobody has joined, or one whose past is not known."""
    assert found(calm()) == []
    assert findings(calm(), None, now_unix_s=NOW_UNIX_S) == []
    empty = calm(state="founding", round=0, recent=[], last_commit_unix_s=None)
    assert found(empty | {"islands": []}) == []


def test_losses_that_are_no_numbers_are_compared_with_nothing() -> None:
    """A run whose islands have all diverged has no mean that rises."""
    assert found(calm(), past_of(lose)) == []


def test_an_old_restart_is_no_finding() -> None:
    """After a quarter of an hour the start of the coordinator is history."""
    document = calm(started_unix_s=NOW_UNIX_S - RESTARTED_S - 1)

    assert found(document, past_of(restart)) == []


def test_findings_are_few_and_the_worst_come_first() -> None:
    """Of fifty silent islands three are named, and the others are a number."""
    rows = [island(f"i{n:02}", state="silent", seen_s=99.0) for n in range(50)]
    document = calm(*rows, **LONG_AGO, damage=["a", "b"])
    several = found(document, past_of(refuse))

    assert len(several) <= MAX_FINDINGS
    order = [list(Severity).index(row.severity) for row in several]
    assert order == sorted(order)
    silent = [row for row in several if row.kind == "silent"]
    assert len(silent) == MAX_PER_KIND
    assert silent[-1].message.endswith("And 47 more islands.")


def test_findings_are_on_the_page_and_in_the_metrics() -> None:
    """Red and yellow ones with their command; notes only in JSON."""
    document = calm(**LONG_AGO, waits_for=[WAIT], ends_unix_s=NOW_UNIX_S + 600)
    document["findings"] = [row.as_dict() for row in found(document)]
    page = render_status(document, width=200, is_colour=False)
    metrics = render(document, Counters({}, {}))

    assert "!! No round was committed for 5 min" in page
    assert "`atoll control demo evict b`" in page
    assert "ends_soon" not in page
    assert 'atoll_findings{severity="bad"} 1' in metrics
    assert 'atoll_findings{severity="warn"} 0' in metrics
    assert "atoll_findings" in {metric.name for metric in METRICS}
