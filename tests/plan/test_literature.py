"""Published figures are rebuilt, or quoted."""

from __future__ import annotations

from collections import Counter

from atoll.plan.literature import (
    STREAMING_M2,
    STREAMING_M4,
    published_losses,
    rebuild,
    table_4_lines,
)


def test_table_4_is_rebuilt() -> None:
    """67 of 75 cells are equal with 13.4 bits per value, none is two steps away."""
    apart = Counter(cell.steps_apart for cell in rebuild())

    assert apart == {0: 67, -1: 7, 1: 1}


def test_table_4_with_nominal_bf16_is_one_step_high() -> None:
    """With 16 bits 13 cells are equal, 61 one step higher and one two steps."""
    apart = Counter(cell.steps_apart for cell in rebuild(bits=16))

    assert apart == {0: 13, 1: 61, 2: 1}


def test_the_printed_table_counts_its_cells() -> None:
    """The last line of `--table4` is the result."""
    lines = table_4_lines()

    assert len(lines) == 2 + 3 * 5 + 1
    assert lines[-1].startswith("67 of 75 cells are equal, 8 one step of the grid")


def test_losses_are_quoted_in_percent_of_data_parallel() -> None:
    """A published 2.50 beside 2.49 is 0.4 % more."""
    assert [row.percents() for row in STREAMING_M4] == [
        (2.6, 3.7),  # 3.60 and 3.64 beside 3.51
        (1.9, 3.1),
        (1.4, 2.5),
        (0.4, 1.6),
    ]
    assert STREAMING_M2[-1].percents() == (-0.4, 0.4)


def test_plans_beyond_the_published_ones_are_named() -> None:
    """More islands, sparser rounds and longer overlap have no figures."""
    within = published_losses(islands=4, sync_every=100, overlap_steps=5)
    beyond = published_losses(islands=8, sync_every=500, overlap_steps=40)

    assert not any("Beyond" in line for line in within)
    assert beyond[-1] == (
        "Beyond these figures: 8 islands, sync_every=500 and an overlap of 40 in 500."
    )
