"""The search prefers frequent rounds, then many bits, then little overlap."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.plan import IslandLink, Workload, advise, judge, marked
from atoll.plan.search import GRID_RATES, grid, reasons
from atoll.settings import RunSettings

LINK = IslandLink(up_bits_per_s=1e8, down_bits_per_s=1e8, delay_s=0.04)
WORKLOAD = Workload(parameters=10**9, steps_s=(1.0,) * 4)


def test_the_example_of_the_docs() -> None:
    """1 billion parameters on 100 Mbit/s: rounds of 200 steps in bf16, 100 in int8."""
    rows = advise(WORKLOAD, LINK)

    assert [row.plan.wire for row in rows] == ["bf16/bf16", "int8/int8", "e3m0/int8"]
    assert [row.plan.sync_every for row in rows] == [200, 100, 100]
    assert all(row.prediction.utilisation >= 0.97 for row in rows)
    assert marked(rows) is rows[2]  # as frequent as int8, and half of the bytes up


def test_no_shorter_interval_and_no_less_overlap_would_do() -> None:
    """One step of overlap less misses the target, and so does the next interval."""
    row = advise(WORKLOAD, LINK)[2]
    less = replace(row.plan, overlap_steps=row.plan.overlap_steps - 3)
    sooner = replace(row.plan, sync_every=75, overlap_steps=37)

    assert judge(WORKLOAD, LINK, less).utilisation < 0.97
    assert judge(WORKLOAD, LINK, sooner).utilisation < 0.97


def test_the_advised_overlap_is_twice_the_least_if_it_fits() -> None:
    """Otherwise it is just below half of a round."""
    rows = advise(WORKLOAD, LINK)
    assert all(row.advised_overlap == 2 * row.plan.overlap_steps for row in rows)

    tight = advise(
        WORKLOAD, IslandLink(up_bits_per_s=85e6, down_bits_per_s=85e6, delay_s=0.04)
    )
    assert all(row.advised_overlap < row.plan.sync_every / 2 for row in tight)
    assert all(row.advised_overlap >= row.plan.overlap_steps for row in tight)


def test_advised_settings_are_accepted_by_a_run() -> None:
    """The printed tables make settings."""
    for row in advise(WORKLOAD, LINK):
        plan = row.advised
        settings = RunSettings.from_dict(
            {
                "sync": {
                    "sync_every": plan.sync_every,
                    "num_fragments": plan.num_fragments,
                    "overlap_steps": plan.overlap_steps,
                },
                "wire": {"up": plan.up, "down": plan.down},
            }
        )
        assert settings.sync.overlap_steps == row.advised_overlap


def test_an_impossible_link_names_what_would_do() -> None:
    """The last reason has a faster link, a longer step, and an interval."""
    link = IslandLink(up_bits_per_s=1e6, down_bits_per_s=1e6, delay_s=0.04)
    rows = advise(WORKLOAD, link)

    assert marked(rows) is None
    assert not any(row.reaches_target for row in rows)
    # 8.125 Gbit at 1 Mbit/s are 8,125 s, and 1,000 steps of a second are too few.
    assert "a link 8.1 times as fast" in reasons(WORKLOAD, link, rows)[-1]
    assert "sync_every of at least 8125" in reasons(WORKLOAD, link, rows)[-1]


def test_a_limit_of_the_interval_that_excludes_all_names_it() -> None:
    """On a fast link with a short round, half of it is the longest overlap."""
    link = IslandLink(
        up_bits_per_s=1e10, down_bits_per_s=1e10, delay_s=20.0, window_bytes=1e12
    )
    rows = advise(WORKLOAD, link, max_sync_every=10)

    assert "Raise --max-sync-every" in reasons(WORKLOAD, link, rows)[-1]


def test_a_long_line_is_not_filled_by_one_connection() -> None:
    """The remedy is the kernel's buffers."""
    link = IslandLink(up_bits_per_s=1e10, down_bits_per_s=1e10, delay_s=0.06)
    rows = advise(WORKLOAD, link)

    assert "carries 419 Mbit/s" in reasons(WORKLOAD, link, rows)[-1]


def test_the_grid_rises_with_interval_and_rate() -> None:
    """More of either never lowers utilisation by more than the walk's last window."""
    rows = grid(WORKLOAD, LINK, advise(WORKLOAD, LINK)[2].plan)

    for _, shares in rows:
        assert len(shares) == len(GRID_RATES)
        assert shares == pytest.approx(sorted(shares), abs=0.01)
    for column in zip(*(shares for _, shares in rows), strict=True):
        assert list(column) == pytest.approx(sorted(column), abs=0.01)
