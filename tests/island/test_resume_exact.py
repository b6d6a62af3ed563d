"""Killed at any step and resumed exactly, an island ends where it would have ended."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from atoll.errors import AtollWarning
from atoll.exchange import MemoryRun
from tests.island.incarnations import Incarnation, run_of

EVERY, STEPS = 5, 23

SCHEDULES: dict[str, dict[str, Any]] = {
    "at once": {},
    "fragments": {"num_fragments": 3},
    "overlap": {"overlap_steps": 3},
    "fragments in flight": {"num_fragments": 3, "overlap_steps": 4},
    "mix": {"num_fragments": 2, "overlap_steps": 2, "adopt": "mix", "keep_local": 0.5},
    "mix, mostly the anchor": {"overlap_steps": 2, "adopt": "mix", "keep_local": 0.1},
}


def a_run(sync: dict[str, Any], **options: Any) -> MemoryRun:
    wire = options.pop("wire", {"up": "fp32", "down": "fp32"})
    return run_of(sync={"sync_every": EVERY, **sync}, wire=wire, **options)


def uninterrupted(*args: Any, dtype: str = "float32", **options: Any) -> bytes:
    incarnation = Incarnation(a_run(*args, **options), dtype=dtype)
    incarnation.train(STEPS)
    incarnation.die()
    return incarnation.bits()


def interrupted(
    saved_at: int, killed_at: int, *args: Any, dtype: str = "float32", **options: Any
) -> bytes:
    run = a_run(*args, **options)
    first = Incarnation(run, dtype=dtype)
    first.train(saved_at)
    checkpoint = first.save()
    first.train(killed_at - saved_at)
    first.die()
    second = Incarnation(run, checkpoint=checkpoint, dtype=dtype)
    assert second.host.resumed
    assert second.host.resumed.is_exact, second.host.resumed.reason
    assert second.steps == saved_at
    second.train(STEPS - saved_at)
    second.die()
    return second.bits()


@pytest.mark.parametrize("sync", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("killed_after", [0, 1, 4, 6])
def test_a_killed_island_ends_where_it_would_have_ended(
    sync: dict[str, Any], killed_after: int
) -> None:
    """Whichever step it is saved and killed at, every bit is the same at the end."""
    expected = uninterrupted(sync)

    for saved_at in range(0, 2 * EVERY + 1):
        bits = interrupted(saved_at, saved_at + killed_after, sync)
        assert bits == expected, saved_at


@pytest.mark.parametrize("up", ["bf16-stochastic", "int8", "e3m0", "topk-2bit"])
@pytest.mark.parametrize("saved_at", [3, 4, 6, 9])
def test_what_a_codec_leaves_over_is_the_same(up: str, saved_at: int) -> None:
    """Residuals before and after a seal in flight are restored to the bit."""
    sync = {"num_fragments": 3, "overlap_steps": 3}
    wire = {"up": up, "down": "bf16", "error_feedback": True}
    tables = {"wire": wire, "outer": {"optimizer": "sgd", "lr": 1.0}}
    expected = uninterrupted(sync, dtype="bfloat16", **tables)

    bits = interrupted(saved_at, saved_at + 6, sync, dtype="bfloat16", **tables)

    assert bits == expected


def test_work_that_is_not_made_again_to_the_byte_does_not_count_twice() -> None:
    """An incarnation that deviates from the one before drops the counted work."""
    run = a_run({})
    first = Incarnation(run)
    first.train(2)
    checkpoint = first.save()
    first.train(EVERY)
    first.die()
    second = Incarnation(run, checkpoint=checkpoint)
    second.view.local[0][3] += 1.0
    with pytest.warns(AtollWarning, match="drops 5 inner steps with 35 tokens"):
        second.train(EVERY - 2)

    slot = second.host.slots[0]
    assert slot.state.round == 1
    assert np.array_equal(second.view.local[0], slot.state.anchor)
    second.train(EVERY)
    assert slot.state.round == 2
    assert second.host.tally.dropped == 1
    second.die()


def test_outcomes_that_are_kept_no_more_mean_a_rejoin_that_says_so() -> None:
    """A run in memory keeps two outcomes: the island takes the anchor instead."""
    run = a_run({})
    first = Incarnation(run)
    checkpoint = first.save()
    first.train(4 * EVERY)
    first.die()
    second = Incarnation(run, checkpoint=checkpoint)

    resumed = second.host.resumed
    assert resumed is not None
    assert not resumed.is_exact
    assert resumed.reason == (
        "the outcome of round 1 of fragment 0 is no longer stored"
    )
    assert resumed.counted == (4 * EVERY, 28 * EVERY)
    assert np.array_equal(second.view.local[0], second.host.slots[0].state.anchor)
    second.die()


def test_a_life_that_leaves_while_it_makes_steps_again_gives_nothing_twice() -> None:
    """Work that an earlier incarnation has counted is in no departing update."""
    run = a_run({})
    first = Incarnation(run)
    first.train(2)
    checkpoint = first.save()
    first.train(EVERY)
    first.die()
    before = state_of(run)
    second = Incarnation(run, checkpoint=checkpoint)
    second.train(2)
    second.host.leave()

    assert state_of(run) == before


def state_of(run: MemoryRun) -> tuple[int, bytes]:
    header = run.state(0).header
    return header.round, header.base
