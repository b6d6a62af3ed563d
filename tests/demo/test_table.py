"""The table and the progress are lines that fit a terminal."""

from __future__ import annotations

import pytest

from atoll.demo import report as figures
from atoll.demo import report as progress
from atoll.demo import report as table
from atoll.report.run_report import format_few
from tests.demo.small import results

pytestmark = pytest.mark.torch


def test_the_table_has_loss_perplexity_bytes_ratio_and_stall() -> None:
    """Each has a line, all lines are as wide, and none is wider than a terminal."""
    aligned, _, note = table.table_text(results()).partition("\n\n")
    lines, labels = aligned.splitlines(), aligned

    assert note == table.NOTE

    assert len({len(line) for line in lines}) == 1
    assert len(lines[0]) <= 80
    for word in ("loss", "perplexity", "sent", "received", "times", "stall"):
        assert word in labels


def test_without_a_comparison_its_losses_are_absent() -> None:
    """A dash stands where nothing was measured; the bytes are still worked out."""
    by_label = {row.label: row for row in table.table_rows(results(compares=False))}

    assert by_label["perplexity per byte"].parallel == table.ABSENT
    assert by_label["sent by each"].parallel.endswith("B")


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (figures.format_count(826_112), "0.83 million"),
        (figures.format_count(1_228_800), "1.23 million"),
        (figures.format_count(4_096), "4,096"),
        (figures.format_seconds(3.14), "3.1 s"),
        (figures.format_seconds(59.6), "1 min 0 s"),
        (figures.format_seconds(257), "4 min 17 s"),
        (figures.format_share(0.0094), "0.9 %"),
        (format_few(4), "Four"),
        (format_few(12), "12"),
    ],
)
def test_numbers_read_as_people_say_them(said: str, expected: str) -> None:
    """Units fit the size, and three digits are enough."""
    assert said == expected


def test_progress_has_a_line_for_each_island_and_says_why_it_waits() -> None:
    """Names in order, a bar, the round, the loss once there is one, and the waits."""
    first = {"island": "b", "round": 5, "loss": None, "tokens": 10, "wait_share": 0.0}
    second = first | {"island": "a", "round": 10, "loss": 1.5, "wait_share": 0.25}
    status = {"last_round": 10, "islands": [first, second], "why": "Waits for b."}

    a, b, why = progress.progress_lines(status)

    assert a.startswith("a ")
    assert "loss 1.500" in a
    assert a.endswith("waited 25.0 %")
    assert a.count("━") == 2 * b.count("━") == progress.BAR_MARKS
    assert why == "Waits for b."
