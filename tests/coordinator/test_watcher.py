"""What a watcher tells of a run, and what status makes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from atoll.coordinator import Service
from atoll.coordinator.status import MAX_NAMES, Watcher, status_of
from atoll.coordinator.status_fields import last_round_of, why_ended
from atoll.exchange.calls import HeartbeatCall, PublishCall
from atoll.protocol import Heartbeat, JoinReply, Stats
from atoll.protocol.events import Leave, PauseRequested
from atoll.protocol.membership import LEASE_S
from atoll.simulate import SimDisk
from atoll.telemetry import (
    EventBus,
    render_status,
)
from atoll.testing.fixtures import plain_settings
from atoll.wire import TrainingProgress
from tests.coordinator.desk import join, update


@dataclass
class Watched:
    """A run of plain averaging that is looked at after each change."""

    service: Service
    events: EventBus = field(default_factory=EventBus)
    watcher: Watcher = field(init=False)

    def __post_init__(self) -> None:
        self.watcher = Watcher(self.events, self.service.state, 0.0)

    def look(self, now_s: float) -> list[str]:
        """Let the watcher look, and return the events since the last look."""
        before = self.events.newest
        self.watcher.look(self.service, now_s)
        return [each.name for each in self.events.after(before)]

    def status(self, now_s: float) -> dict[str, Any]:
        """Return the part of the document that is the run's."""
        return status_of(
            self.service.state,
            now_s,
            stats=self.watcher.stats,
            verdicts=self.watcher.verdicts,
            since_unix_s=self.watcher.since_unix_s,
            recent=list(self.watcher.recent),
        )


def watched(
    *names: str, values: Mapping[str, Any] | None = None, **run: Any
) -> tuple[Watched, list[JoinReply]]:
    """Return a run that these islands have joined; `values` has dotted keys."""
    settings = plain_settings(start_islands=len(names), **run)
    settings = settings.with_values(values or {})
    service = Service.create(SimDisk(), settings, run="run", now_s=0.0)
    it = Watched(service)
    joined = [join(service, name) for name in names]
    it.look(1.0)
    return it, joined


def test_silence_is_told_although_nothing_else_changes() -> None:
    """When every island is stopped nobody calls any more: time alone tells it."""
    it, _ = watched("a", "b")

    assert it.look(LEASE_S - 1.0) == []
    assert it.look(LEASE_S + 2.0) == ["island_silent", "island_silent"]
    assert it.look(LEASE_S + 3.0) == []


def test_a_run_below_its_quorum_says_whom_it_waits_for() -> None:
    """How many more, who is silent, and since when; later losses change no since."""
    it, (a, b, _) = watched("a", "b", "c", quorum=3)
    now_s = LEASE_S + 2.0
    it.service.change(Leave("a", a.incarnation, reason="evicted"), 2.0)
    it.look(2.0)
    since_unix_s = it.watcher.since_unix_s["waiting"]
    it.look(now_s)
    said = it.status(now_s)

    assert said["state"] == "waiting"
    assert said["why"] == "Waits for 3 more of quorum=3. Silent: b, c."
    assert said["since_unix_s"] == since_unix_s
    assert b.island == "b"


def test_a_quorum_that_is_met_again_is_waited_for_no_more() -> None:
    """The time of a wait that is over is forgotten."""
    it, (a, _) = watched("a", "b", quorum=2)
    it.service.change(Leave("a", a.incarnation, reason="evicted"), 2.0)
    it.look(2.0)
    assert it.status(2.0)["since_unix_s"] is not None
    join(it.service, "d")
    it.look(3.0)

    assert it.status(3.0)["since_unix_s"] is None
    assert it.status(3.0)["state"] == "training"


def test_a_pause_is_said_with_the_command_that_ends_it() -> None:
    """By the run's own name, so that it can be pasted; and since when."""
    it, _ = watched("a", name="coral reef")
    it.service.change(PauseRequested(is_paused=True), 2.0)
    it.look(2.0)
    said = it.status(2.0)

    assert said["why"] == (
        "Paused by an operator. Resume it with `atoll control 'coral reef' resume`."
    )
    page = said | {
        "now_unix_s": said["since_unix_s"] + 75.0,
        "started_unix_s": said["since_unix_s"],
        "version": "0.1.0",
        "listening": "https://127.0.0.1:1",
        "recent": [],
        "damage": [],
    }
    text = render_status(page, width=120, is_colour=False)
    assert "resume`. For 1 min 15 s now." in text


def test_many_names_are_few_in_a_sentence() -> None:
    """A hundred silent islands are eight names and a number."""
    names = [f"i{number:02}" for number in range(12)]
    it, _ = watched(*names, quorum=12)
    it.look(LEASE_S + 2.0)
    why = it.status(LEASE_S + 2.0)["why"]

    assert why.endswith(f"{names[MAX_NAMES - 1]} and 4 more.")


def test_a_committed_round_tells_the_stall() -> None:
    """3 of 12 seconds stood still."""
    it, (a, b) = watched("a", "b")
    it.watcher.stats["a"] = Stats(seconds=4.0, wait_s=3.0)
    it.watcher.stats["b"] = Stats(seconds=8.0)
    it.service.handle(update(it.service, a, 1.0), 1.0)
    it.look(1.0)
    it.service.handle(update(it.service, b, 3.0), 2.0)
    it.look(2.0)
    (told,) = [each for each in it.events.after(0) if each.name == "round_committed"]

    assert told.fields["stall_share_mean"] == 0.25


def paced(it: Watched, joined: JoinReply, step_s: float) -> None:
    """Let an island report its pace."""
    beat = Heartbeat(
        island=joined.island, incarnation=joined.incarnation, step=4, step_s=step_s
    )
    it.service.handle(HeartbeatCall(beat), 1.0)


DYNAMIC = {"sync.dynamic_local_updates": True}


def test_a_window_that_changes_is_an_event() -> None:
    """With the pace that it follows from; a window that stays is none."""
    it, (a, b) = watched("a", "b", values=DYNAMIC)
    paced(it, a, 0.5)
    paced(it, b, 2.0)
    for round in (1, 2):
        for joined in (a, b):
            it.service.handle(update(it.service, joined, 1.0, round=round), 1.0)
        it.look(1.0)
    (event,) = [each for each in it.events.after(0) if each.name == "island_paced"]
    rows = {row["island"]: row for row in it.status(1.0)["islands"]}

    # 100 * 0.5 / 2
    assert event.fields == {"island": "b", "window": 25, "step_s": 2.0}
    assert [(row["window"], row["step_s"]) for row in rows.values()] == [
        (100, 0.5),
        (25, 2.0),
    ]


def test_the_status_has_the_shares_of_the_weights() -> None:
    """Of 30 and 10 tokens the shares are 3/4 and 1/4; uniform weights have none."""
    for weight, expected in (("tokens", [0.75, 0.25]), ("uniform", [None, None])):
        it, joined = watched("a", "b", values={"outer.weight": weight})
        for reply, tokens in zip(joined, (30, 10), strict=True):
            call = update(it.service, reply, 1.0)
            progress = TrainingProgress(inner_steps=5, tokens=tokens)
            header = replace(
                call.frame.header,
                progress=progress,
                weight=tokens if weight == "tokens" else 1,
            )
            frame = replace(call.frame, header=header)
            it.service.handle(PublishCall(frame), 1.0)
        it.look(1.0)

        assert [row["share"] for row in it.status(1.0)["islands"]] == expected


@pytest.mark.parametrize(
    ("paces_s", "values", "remedy"),
    [
        ((0.5, 0.6), {}, "Give sync.overlap_steps in the next run"),
        (
            (0.5, 2.85),
            {},
            "b takes 5.7 times as long for an inner step as a. "
            "Set sync.dynamic_local_updates=true in the next run.",
        ),
        ((0.5, 2.85), DYNAMIC, "Give sync.overlap_steps in the next run"),
        ((0.5, 2.85), {"sync.sync_every": 1}, "Give sync.overlap_steps in the"),
    ],
)
def test_islands_of_unequal_paces_have_a_remedy(
    paces_s: tuple[float, float], values: dict[str, Any], remedy: str
) -> None:
    """Beyond a ratio of 1.3, and only if the setting is not on and has an effect."""
    it, joined = watched("a", "b", values=values)
    for reply, step_s in zip(joined, paces_s, strict=True):
        paced(it, reply, step_s)
    assert it.status(1.0)["cure"] is None
    it.watcher.stats["a"] = Stats(seconds=10.0, wait_s=5.0)  # half of the time

    assert it.status(1.0)["cure"].startswith(remedy)


def test_the_share_of_the_rows_that_no_island_has_is_shown() -> None:
    """Of 8 parts two islands have 2, whoever left or never came has the rest."""
    it, _ = watched("a", "b", max_islands=8)

    assert it.status(1.0)["unowned_share"] == 6 / 8
    it, _ = watched("a", "b", max_islands=8, values={"data.order": "run"})
    assert it.status(1.0)["unowned_share"] == 0.0


def test_islands_that_began_with_the_same_batch_are_listed() -> None:
    """Who has said nothing of it is like nobody."""
    it, _ = watched("a", "b", "c", "d")
    for name, seen in (("a", "batch-1"), ("b", "batch-2"), ("c", "batch-1")):
        it.watcher.stats[name] = Stats(first_batch=seen)

    assert it.status(1.0)["same_data"] == [["a", "c"]]


ASYNC = {"sync.mode": "async", "async.grace_s": 2.0, "sync.sync_every": 100}


def test_an_asynchronous_run_shows_ages_and_rounds_per_window() -> None:
    """An update of round 1 that counts in round 3 has age 2, and others 0."""
    it, (a, b) = watched("a", "b", values=ASYNC)
    paced(it, a, 0.5)
    paced(it, b, 2.0)
    slow = update(it.service, b, 1.0)
    for round in (1, 2, 3):
        it.service.handle(update(it.service, a, 1.0, round=round), 1.0 + 3.0 * round)
        if round == 3:
            it.service.handle(slow, 10.5)
        it.service.tick(3.0 + 3.0 * round)
        it.look(3.0 + 3.0 * round)
    for index, row in enumerate(it.watcher.recent):
        row["committed_unix_s"] = 10.0 * index
    document = it.status(12.0)
    rows = {row["island"]: row for row in document["islands"]}

    assert document["mode"] == "async"
    assert (rows["a"]["age"], rows["a"]["ages_max"]) == (0, 0)
    assert (rows["b"]["age"], rows["b"]["ages_max"]) == (2, 2)
    # A round each 10 s: 5 in the 50 s of a, and 20 in the 200 s of b. With SGD a state
    # has the bytes of one mean in fp32.
    assert document["rounds_per_window"] == 5.0
    assert document["bytes_down_factor"] == 1.0


def test_the_shares_of_an_asynchronous_run_are_those_of_its_recent_rounds() -> None:
    """Four rounds count one update each, of 10 tokens: three of a, and one of b."""
    it, (a, b) = watched("a", "b", values=ASYNC | {"outer.weight": "tokens"})
    sent = [(a, 1, 1), (a, 2, 2), (b, 3, 1), (a, 4, 3)]
    for joined, round, number in sent:
        call = update(it.service, joined, 1.0, round=round)
        progress = TrainingProgress(inner_steps=5 * number, tokens=10 * number)
        header = replace(call.frame.header, progress=progress, weight=10)
        frame = replace(call.frame, header=header)
        it.service.handle(PublishCall(frame), 3.0 * round)
        it.service.tick(2.0 + 3.0 * round)
        it.look(2.0 + 3.0 * round)

    assert [row["share"] for row in it.status(15.0)["islands"]] == [0.75, 0.25]
    assert [row["counted"] for row in it.watcher.recent] == [1, 1, 1, 1]


def test_a_synchronous_run_has_no_ages() -> None:
    """The keys are there, and empty."""
    it, (a, b) = watched("a", "b")
    it.service.handle(update(it.service, a, 1.0), 1.0)
    it.service.handle(update(it.service, b, 1.0), 1.0)
    it.look(1.0)
    document = it.status(1.0)

    assert (document["mode"], document["rounds_per_window"]) == ("sync", None)
    assert {row["age"] for row in document["islands"]} == {None}


def test_an_end_by_tokens_says_how_many_were_the_goal() -> None:
    """And how many have counted beyond them."""
    it, (a, b) = watched("a", "b", end_tokens=2000)
    assert it.status(1.0)["overshoot"] is None
    for joined in (a, b):
        call = update(it.service, joined, 1.0)
        progress = TrainingProgress(inner_steps=5, tokens=1500)
        header = replace(call.frame.header, progress=progress)
        it.service.handle(PublishCall(replace(call.frame, header=header)), 1.0)
    it.look(1.0)
    document = it.status(1.0)

    assert document["why"] == (
        "Round 1 was the last: 2,000 tokens were the goal, 3,000 counted."
    )
    assert (document["end_tokens"], document["overshoot"]) == (2000, 1000)


def test_fragments_that_end_apart_are_said_to() -> None:
    """Each has a last round of its own, and the highest is the run's."""
    it, _ = watched("a", "b", values=ASYNC)
    state = replace(it.service.state, last_rounds=(7, 5))

    assert why_ended(state) == "Rounds 5 to 7 were the last of their fragments."
    assert last_round_of(state) == 7


@pytest.mark.parametrize(
    ("values", "remedy"),
    [
        ({}, "Give sync.overlap_steps in the next run"),
        (
            {"sync.overlap_steps": 8},
            "Raise sync.overlap_steps above 8 in the next run, or lower async.grace_s",
        ),
    ],
)
def test_islands_that_wait_in_an_asynchronous_run_have_a_remedy(
    values: dict[str, Any], remedy: str
) -> None:
    """Neither patience nor equal windows shorten a wait there."""
    it, (a, b) = watched("a", "b", values=ASYNC | values)
    paced(it, a, 0.5)
    paced(it, b, 5.0)
    it.watcher.stats["a"] = Stats(seconds=10.0, wait_s=5.0)

    assert it.status(1.0)["cure"].startswith(remedy)
