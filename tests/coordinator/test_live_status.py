"""The status of a served run: open rounds, agreement, and findings as events."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from atoll.coordinator.live_status import agreement_of, open_rounds
from atoll.exchange.calls import HeartbeatCall
from atoll.protocol import Heartbeat
from atoll.protocol.messages import HeldRound
from atoll.telemetry import Finding, Severity
from atoll.testing.fixtures import plain_settings
from tests.coordinator.desk import update
from tests.coordinator.serving import serving
from tests.coordinator.test_watcher import watched


def test_an_open_round_tells_whom_it_awaits() -> None:
    """One of two islands has published; the round closes when the other is late."""
    it, (a, _) = watched("a", "b", quorum=1)
    it.service.handle(update(it.service, a, 1.0), 1.0)
    (row,) = open_rounds(it.service.state, 2.0, now_unix_s=1002.0)

    assert (row["fragment"], row["round"]) == (0, 1)
    assert (row["staged"], row["awaited"]) == (["a"], ["b"])
    assert row["opened_unix_s"] == 1000.0
    assert row["closes_unix_s"] > 1002.0


def test_islands_that_hold_other_anchors_are_named() -> None:
    """Two of three agree: the third is apart. Before any holds a round: unknown."""
    it, joined = watched("a", "b", "c")
    assert agreement_of(it.service.state, 1.0) is None
    members = it.service.state.members.known
    holds = {"a": b"same", "b": b"same", "c": b"else"}
    state = it.service.state
    known = {
        name: replace(member, holds=(HeldRound(3, holds[name]),))
        for name, member in members.items()
    }
    state = replace(state, members=replace(state.members, known=known, _looked=[]))
    agreement = agreement_of(state, 1.0)

    assert agreement is not None
    assert agreement["apart"] == ["c"]
    assert (agreement["round"], agreement["holding"], agreement["of"]) == (3, 2, 3)
    assert agreement["digest"] == b"same".hex()
    assert {reply.island for reply in joined} == {"a", "b", "c"}


def test_a_beat_without_holdings_is_no_disagreement() -> None:
    """An island that has just joined holds nothing, and differs from nobody."""
    it, (a, _) = watched("a", "b")
    beat = Heartbeat(island="a", incarnation=a.incarnation, step=0)
    it.service.handle(HeartbeatCall(beat), 1.0)

    assert agreement_of(it.service.state, 1.0) is None


def test_findings_begin_and_end_as_events(tmp_path: Path) -> None:
    """Each is emitted once when it begins, and once when it is over."""
    silent = Finding(
        severity=Severity.WARN,
        kind="silent",
        message="b is silent.",
        remedy="Start it again.",
        island="b",
    )
    with serving(tmp_path / "run", plain_settings()) as coordinator:
        before = coordinator.events.newest
        for present in ([silent], [silent], []):
            coordinator.live_status.report(present)
        told = [
            (event.name, event.fields["kind"], event.fields["island"])
            for event in coordinator.events.after(before)
            if event.name.startswith("finding")
        ]
        document = coordinator.status()

    assert told == [("finding_began", "silent", "b"), ("finding_ended", "silent", "b")]
    assert document["findings"] == []
    assert document["open"] == []
