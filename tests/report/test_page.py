"""The report of a run is one valid page of a bounded size that loads nothing."""

from __future__ import annotations

import re

import pytest

from atoll.report import RunRecord, run_report
from atoll.report.record import EMPTY
from atoll.report.sections import merged
from atoll.report.svg import apart, ticks
from tests.report.pages import HOSTILE, Reader, record, status_row

MAX_BYTES = 400_000


@pytest.mark.parametrize("count", [1, 4, 30])
def test_every_element_is_closed_in_its_place(count: int) -> None:
    """With one island, with curves for each, and with a band."""
    reader = Reader(run_report(record([f"island-{n}" for n in range(count)])))

    assert reader.misplaced == reader.open == []
    assert reader.tags.count("h1") == 1


def test_the_page_loads_nothing() -> None:
    """No script, no address, no import; links lead to its own sections."""
    page = run_report(record(["tokyo", "oregon"]))
    reader = Reader(page)

    loading = {"script", "link", "img", "iframe", "object", "embed", "base"}
    assert loading & set(reader.tags) == set()
    links = [value for name, value in reader.attributes if name == "href"]
    assert links
    assert all(link is not None and link[0] == "#" for link in links)
    assert re.findall(r"https?://|//\w|@import|url\(", page) == []


def test_hostile_names_are_only_names() -> None:
    """Text from islands and operators is never an element."""
    found = record([HOSTILE, "b"], name=HOSTILE, run=HOSTILE)
    notes = found.past["notes"]
    notes += [
        {"event": "island_left", "island": HOSTILE, "reason": HOSTILE, "at": 1e6},
        {"event": "epoch_set", "epoch": 1, "values": {HOSTILE: HOSTILE}, "at": 1e6},
        {"event": "update_refused", "island": HOSTILE, "reason": HOSTILE, "at": 1e6},
    ]
    reader = Reader(page := run_report(found))

    assert "<script" not in page
    assert reader.misplaced == reader.open == []


def test_a_large_run_has_a_small_page() -> None:
    """100 islands with 512 columns and rows, which is as much as a past keeps."""
    names = [f"island-{n:03}" for n in range(100)]
    found = record(names, rows=512, columns=512)
    for index, column in enumerate(found.past["marks"]["columns"]):
        column[3] = "".join("#~!."[(n * index) % 4] for n in range(100))

    assert len(run_report(found)) <= MAX_BYTES


def test_a_run_without_a_past_says_so() -> None:
    """The table and the settings are there; the page names the rest as missing."""
    found = record(["tokyo"])
    page = run_report(RunRecord(found.status, found.settings, EMPTY, has_past=False))

    assert "The past of this run was not recorded: losses" in page
    assert "<h2>Islands</h2>" in page
    assert "<h2>Loss</h2>" not in page
    assert "no work was lost" in page  # the islands' counters say it


def test_unknown_losses_of_work_are_not_called_none() -> None:
    """An island that never reported its dropped steps may have dropped some."""
    rows = [status_row("tokyo"), status_row("oregon", dropped_steps=None)]
    page = run_report(record(["tokyo", "oregon"], islands=rows))

    assert "lost" not in page


def test_data_parallel_is_compared_if_the_size_is_known() -> None:
    """2 · 2(M - 1)/M gradients of 2 bytes for 100 steps: 400 kB, of 4 kB 1/100."""
    with_size = run_report(record(["a", "b"], parameters=1000))

    assert "1/100 of data parallel" in with_size
    assert "data parallel" not in run_report(record(["a", "b"]))


def test_an_island_that_was_away_has_a_gap() -> None:
    """It left, and joined again later."""
    found = record(["tokyo", "oregon"])
    found.past["notes"][1:1] = [
        {
            "event": "island_left",
            "island": "tokyo",
            "reason": "silent",
            "at": 1e6 + 100,
        },
        {
            "event": "island_joined",
            "island": "tokyo",
            "incarnation": 2,
            "at": 1e6 + 200,
        },
    ]
    page = run_report(found)

    assert "tokyo was away: silent" in page
    assert "tokyo joined, for the 2nd time." in page
    assert "oregon was away" not in page


def test_merged_columns_show_the_worst_mark() -> None:
    """Refused before absent before late before counted; shorter columns are blank."""
    assert merged(["##", "#~", "##", "!."], 2) == ["#~", "!."]
    assert merged(["#", "##"], 1) == ["##"]
    assert merged(["##"], 5) == ["##"]


def test_labels_do_not_touch() -> None:
    """Three at one position are moved apart, about where they were, in their order."""
    assert apart([50.0, 50.0, 50.0], gap=10) == [40.0, 50.0, 60.0]
    assert apart([0.0, 100.0], gap=10) == [0.0, 100.0]


def test_ticks_are_round_numbers_inside() -> None:
    """Between 1.71 and 2.62 they are fifths."""
    assert ticks(1.71, 2.62) == pytest.approx([1.8, 2.0, 2.2, 2.4, 2.6])
    assert ticks(3.0, 3.0) == [3.0]


def test_findings_and_damage_are_events_of_the_page() -> None:
    """The worst first, and then by time."""
    finding = {"severity": "bad", "message": "The run has no quorum."}
    found = record(["tokyo"], findings=[finding])
    found.past["notes"].append(
        {"event": "disk_failed", "message": "No space left.", "at": 1e6 + 5}
    )
    page = run_report(found)

    assert "The run has no quorum." in page
    assert "The disk failed: No space left." in page
