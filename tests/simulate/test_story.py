"""What happens, in the words that people read."""

from __future__ import annotations

import doctest
from types import ModuleType

import pytest

from atoll.simulate import FaultPlan, TraceEvent
from atoll.simulate import report as page
from atoll.simulate import story as wording
from atoll.simulate.report import Page, table, tally_cells, tally_columns, wrap
from atoll.simulate.story import (
    CommitTrace,
    Narrator,
    StoryEntry,
    Tone,
    describe_end,
    describe_start,
    fault_kinds,
    lasts_s,
)

ISLANDS = ("i0", "i1", "i2")
EVERY_FAULT = (
    FaultPlan()
    .kill("i0", at_s=1, back_after_s=2.5)
    .freeze("i0", at_s=1, for_s=3)
    .slow("i0", factor=4, for_s=5)
    .delay("i0->i1", by_s=2, rate=0.25, for_s=5)
    .loss("i0", rate=0.5, for_s=5)
    .duplicate("*", rate=1.0, for_s=5)
    .reorder("*", by_s=2, for_s=5)
    .corrupt("i1", rate=0.05, for_s=5)
    .throttle("i1", bytes_per_s=1000, for_s=5)
    .partition(["i0"], ["i1", "i2"], at_s=1, for_s=5)
    .disk_full("coordinator", at_s=1, for_s=5)
    .disk_read_only("coordinator", at_s=1, for_s=5)
    .clock_jump("i2", by_s=-3, at_s=1)
    .clock_drift("i2", rate=1.1)
    .outage("store", rate=0.5, for_s=5)
    .list_lag("store", by_s=3, for_s=5)
    .roster_lag("store", by_s=3, for_s=5)
    .damage("store", how="cut", at_s=1)
)


def told(plan: FaultPlan, *happenings: TraceEvent) -> list[StoryEntry]:
    """Return what is written of these happenings."""
    entries: list[StoryEntry] = []
    narrator = Narrator(plan, ISLANDS, entries.append)
    for happening in happenings:
        narrator.add(happening)
    return entries


def begun(plan: FaultPlan, at_s: float) -> list[TraceEvent]:
    """Return the happenings by which a simulation begins these faults."""
    return [
        TraceEvent(at_s, "fault", fault.kind, str(fault.values()))
        for fault in plan.faults
    ]


def commit(at_s: float, round: int, fragment: int = 0, **verdicts: str) -> TraceEvent:
    about = str(CommitTrace(fragment, round, verdicts))
    return TraceEvent(at_s, "coordinator", "commit", about)


def lines(
    *happenings: TraceEvent, is_verbose: bool = False, is_async: bool = False
) -> list[str]:
    """Return the page of these happenings."""
    page = Page(ISLANDS, rounds=9, is_verbose=is_verbose, is_async=is_async)
    said = [
        line for entry in told(FaultPlan(), *happenings) for line in page.add(entry)
    ]
    return [line.text for line in [*said, *page.flush()]]


def test_a_round_of_an_asynchronous_run_says_how_old_its_updates_are() -> None:
    """Who is not in it is not missing, and rounds of other ages are other lines."""
    verdicts = {"i0": "counted", "i2": "counted"}
    old = [CommitTrace(0, 3, verdicts, ages) for ages in ({}, {"i0": 2, "i2": 2})]
    commits = [TraceEvent(1.0, "coordinator", "commit", str(each)) for each in old]

    assert [line.split(maxsplit=3)[3] for line in lines(*commits, is_async=True)] == [
        "f0   #.#  2 counted",
        "f0   #.#  2 counted, i0 i2 at age 2",
    ]
    narrator = Narrator(FaultPlan(), ISLANDS, lambda entry: None)
    for event in commits:
        narrator.add(event)
    cells = tally_cells(narrator.tallies["i2"], is_async=True)
    assert dict(zip(tally_columns(True), cells, strict=True))["age"] == "1.0"
    assert "late" in tally_columns(False)


def test_every_fault_begins_and_ends_in_words() -> None:
    """No kind of fault is without its sentence."""
    assert [describe_start(fault) for fault in EVERY_FAULT.faults] == [
        "crashes, to be back in 2.5 s",
        "stands still, for 3 s",
        "takes 4 times as long for its work, for 5 s",
        "25 % of messages from i0 to i1 take 2 s longer, for 5 s",
        "50 % of messages of i0 are lost, for 5 s",
        "all messages everywhere arrive twice, for 5 s",
        "all messages everywhere overtake each other by up to 2 s, for 5 s",
        "5 % of messages of i1 arrive changed, for 5 s",
        "messages of i1 get 1000 bytes per second in each direction, for 5 s",
        "is cut between i0 | i1 i2 | all others, for 5 s",
        "has no room left on its disk, for 5 s",
        "cannot write to its disk, for 5 s",
        "has a clock that stands still for 3 s",
        "has a clock that runs at 1.1 of true time from now on",
        "fails 50 % of requests, done or not, for 5 s",
        "has lists that are up to 3 s late, for 5 s",
        "gets rosters 3 s after their decision, for 5 s",
        "has an object damaged: cut",
    ]
    lasting = [fault for fault in EVERY_FAULT.faults[2:] if lasts_s(fault)]
    assert [describe_end(fault) for fault in lasting] == [
        "is no longer slow",
        "delay of messages from i0 to i1 is over",
        "loss of messages of i0 is over",
        "doubling of messages everywhere is over",
        "disorder of messages everywhere is over",
        "corruption of messages of i1 is over",
        "throttling of messages of i1 is over",
        "the cut between i0 | i1 i2 | all others heals",
        "has room on its disk again",
        "can write to its disk again",
        "answers again",
        "has lists that are up to date again",
        "gets rosters without delay again",
    ]
    assert fault_kinds(FaultPlan().kill("i0", at_s=1)) == "1 fault (1 kill)"


def test_a_fault_is_over_when_its_time_has_passed() -> None:
    """The end is told at its own instant, before whatever happens next."""
    plan = FaultPlan().loss("i0", rate=0.5, at_s=2, for_s=5)
    entries = told(plan, *begun(plan, 2.0), TraceEvent(9.0, "i1", "leave"))

    assert [(each.at_s, each.action) for each in entries] == [
        (2.0, "loss"),
        (7.0, "loss over"),
        (9.0, "leave"),
    ]


def test_what_another_fault_keeps_up_is_not_over() -> None:
    """Of two that overlap, only the last end is an end."""
    plan = FaultPlan().slow("i0", factor=2, for_s=3).slow("i0", factor=3, for_s=8)
    entries = told(plan, *begun(plan, 0.0), TraceEvent(9.0, "i1", "leave"))

    assert [each.at_s for each in entries if each.action == "slow over"] == [8.0]


def test_a_crash_says_whether_its_process_will_be_back() -> None:
    """A plan knows; a kill of what is not running changes nothing, and says so."""
    plan = FaultPlan().kill("i0", at_s=1)
    crash = TraceEvent(1.0, "i0", "crash", "incarnation 1")

    assert told(FaultPlan(), crash)[0].text == "crashes"
    assert told(plan, *begun(plan, 1.0), crash) == [
        StoryEntry(1.0, "i0", "crash", "crashes, and will not come back", Tone.BAD)
    ]
    missed, _ = told(plan, *begun(plan, 1.0), TraceEvent(2.0, "i1", "leave"))
    assert missed.text == "is not running: this kill changes nothing"


def test_rounds_that_came_to_the_same_are_one_line() -> None:
    """Until somebody's verdict differs, or something else happens."""
    full = {"i0": "counted", "i1": "counted", "i2": "counted"}
    rounds = [
        commit(6.0 * n, n, fragment, **full) for n in (1, 2) for fragment in (0, 1)
    ]
    late = commit(80.0, 3, i0="counted", i1="late")

    assert lines(*rounds, late) == [
        "  0:06  rounds 1-2   ###  all 3 counted; 4 outcomes until 0:12",
        "  1:20  round 3 f0   #~.  1 counted, i1 late, i2 absent",
    ]
    assert len(lines(*rounds, late, is_verbose=True)) == 5


def test_a_round_in_which_nobody_counted_is_void() -> None:
    """Refused updates are marked, and the round says what it came to."""
    assert lines(commit(1.0, 1, i0="refused", i1="refused", i2="refused")) == [
        "  0:01  round 1 f0   !!!  no island counted, void, i0 i1 i2 refused"
    ]


def test_islands_that_join_together_share_a_line() -> None:
    """A later life joins by itself: which one matters."""
    joins = [TraceEvent(0.1, each, "join", "incarnation 1") for each in ISLANDS]
    again = TraceEvent(30.0, "i1", "join", "incarnation 2")

    assert lines(*joins, again) == [
        "  0:00  3 islands    join: i0 i1 i2",
        "  0:30  i1           joins again, as incarnation 2",
    ]


def test_messages_are_weighed_and_not_told() -> None:
    """Bytes up are what was sent, lost or not; bytes down are what arrived."""
    narrator = Narrator(FaultPlan(), ISLANDS, lambda entry: None)
    for what, link in (
        ("send", "i0->coordinator"),
        ("lose", "i0->coordinator"),
        ("send", "coordinator->i0"),
        ("deliver", "coordinator->i0"),
    ):
        narrator.add(TraceEvent(1.0, link, what, "PublishCall, 300 bytes"))

    tally = narrator.tallies["i0"]
    assert (tally.bytes_up, tally.bytes_down) == (300, 300)
    assert (
        told(FaultPlan(), TraceEvent(1.0, "i0->i1", "send", "JoinCall, 1 bytes")) == []
    )


@pytest.mark.parametrize("module", [page, wording], ids=lambda each: each.__name__)
def test_docstring_examples_run(module: ModuleType) -> None:
    """Every example is there, and gives what it says."""
    result = doctest.testmod(module)

    assert (result.attempted > 0, result.failed) == (True, 0)


def test_a_long_line_goes_on_below_itself() -> None:
    """Numbers keep their units, and columns their places."""
    assert wrap("messages take 12 s longer, for 30 s", 33) == [
        "messages take 12 s longer, for",
        "30 s",
    ]
    assert table([("island", "late"), ("i0", "12")]) == ["island  late", "i0        12"]
