"""Bounds of the numbers that islands claim."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.protocol.membership import (
    SPARE_ROUNDS,
    WINDOWS_PER_ROUND,
    max_schedule_step,
    progress_fault,
)
from atoll.protocol.messages import CountedWork
from atoll.protocol.rounds import judge_updates
from atoll.settings import RunSettings
from atoll.wire import FrameKind, Header, TrainingProgress, Verdict, with_body

U64_MAX = 2**64 - 1
BASE = b"\1" * 16
SETTINGS = RunSettings.from_dict(
    {
        "sync": {"sync_every": 10},
        "outer": {"weight": "tokens"},
        "limits": {"max_step_tokens": 100},
    }
)


def update(
    island: str = "a",
    *,
    inner_steps: int = 0,
    tokens: int = 0,
    weight: int = 1,
    round: int = 1,
) -> Header:
    body = np.float32(1.0).tobytes()
    header = Header(
        kind=FrameKind.UPDATE,
        run="run",
        fragment=0,
        round=round,
        island=island,
        incarnation=1,
        base=BASE,
        elements=1,
        norm=1.0,
        weight=weight,
        progress=TrainingProgress(inner_steps=inner_steps, tokens=tokens),
    )
    return with_body(header, body)


def fault(header: Header, counted: CountedWork | None = None) -> str:
    return progress_fault(header, counted=counted, settings=SETTINGS)


@given(st.integers(1, 2**40), st.integers(0, 3), st.integers(1, 100))
def test_what_the_schedule_allows_is_accepted(
    round: int, behind: int, step_tokens: int
) -> None:
    """An island that made every window since the first round, with any batch."""
    steps = max(0, round + 3 - behind) * 10
    made = update(round=round, inner_steps=steps, tokens=steps * step_tokens)

    assert fault(made) == ""


@given(st.integers(1, 2**40), st.integers(1, U64_MAX))
def test_more_steps_than_the_schedule_has_are_refused(round: int, over: int) -> None:
    """The bound grows with the round, and never reaches the field's."""
    most = WINDOWS_PER_ROUND * (round + SPARE_ROUNDS) * 10
    claimed = min(most + over, U64_MAX)

    assert "inner_steps=" in fault(update(round=round, inner_steps=claimed))
    assert fault(update(round=round, inner_steps=most)) == ""


def test_more_tokens_than_its_steps_can_hold_are_refused() -> None:
    """3 inner steps of at most 100 tokens, and one that is under way: 400."""
    assert fault(update(inner_steps=3, tokens=400)) == ""
    assert "limits.max_step_tokens=100" in fault(update(inner_steps=3, tokens=401))


def test_a_weight_is_at_most_the_tokens_since_the_last_counted_update() -> None:
    """Of 300 tokens 120 have counted before: 180 are left."""
    before = CountedWork(round=1, inner_steps=2, tokens=120, incarnation=1)
    made: dict[str, Any] = {"inner_steps": 3, "tokens": 300, "round": 2}

    assert fault(update(weight=180, **made), before) == ""
    assert "weight: 181 exceeds 180" in fault(update(weight=181, **made), before)
    assert "weight: 301 exceeds 300" in fault(update(weight=301, **made))


def test_an_update_without_tokens_weighs_one() -> None:
    """The least weight that counts is always allowed."""
    before = CountedWork(round=1, inner_steps=2, tokens=120, incarnation=1)

    assert fault(update(inner_steps=2, tokens=120), before) == ""
    assert fault(update(inner_steps=2, tokens=120, weight=2), before) != ""


def test_a_uniform_run_takes_no_other_weight_than_one() -> None:
    """Whatever tokens the island has reported."""
    heavy = update(inner_steps=3, tokens=30, weight=30)

    found = progress_fault(heavy, counted=None, settings=RunSettings())
    assert found == "weight: 30 is not 1, and outer.weight is 'uniform'"


@pytest.mark.parametrize(
    "claimed",
    [
        {"inner_steps": U64_MAX},
        {"tokens": U64_MAX},
        {"weight": U64_MAX},
        {"inner_steps": U64_MAX, "tokens": U64_MAX, "weight": U64_MAX},
    ],
)
def test_an_impossible_update_is_listed_as_refused(claimed: dict[str, int]) -> None:
    """It is in the roster with a reason, and the others count without it."""
    honest = update("b", inner_steps=10, tokens=50, weight=50)
    roster = judge_updates(
        [update("a", **claimed), honest],
        round=honest.round,
        base=BASE,
        known_bases=(),
        norms={},
        window_of=lambda _: 1,
        counted=lambda island: None,
        settings=SETTINGS,
    )

    assert [entry.verdict for entry in roster.entries] == [
        Verdict.REFUSED,
        Verdict.COUNTED,
    ]
    assert roster.entries[0].reason.split(":")[0] in ("progress", "weight")


def test_the_schedule_step_is_bounded_by_the_furthest_round() -> None:
    """Rounds 4 and 7 are open: windows of 10 steps up to the tenth."""
    assert max_schedule_step([4, 7], SETTINGS) == 100
    assert max_schedule_step([], SETTINGS) == 40


def test_a_new_life_weighs_its_own_tokens() -> None:
    """It joined at 40 tokens; an earlier life's update then counted up to 100.

    Its first update has trained on 80 of its own: 120 in all, of which only 20 are
    beyond the counted ones.
    """
    header = update(inner_steps=5, tokens=120, weight=80)
    earlier = CountedWork(round=1, inner_steps=2, tokens=100, incarnation=7)
    same = CountedWork(round=1, inner_steps=2, tokens=100, incarnation=1)

    assert fault(header, earlier) == ""
    assert "weight: 80 exceeds 20" in fault(header, same)
