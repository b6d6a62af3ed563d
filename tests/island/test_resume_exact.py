"""Killed at any step and resumed exactly, an island ends where it would have ended."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from atoll.errors import AtollWarning, CorruptError
from atoll.exchange import Exchange
from atoll.island.saved_state import from_tree
from tests.island.incarnations import Incarnation, run_of
from tests.island.windows import WindowRun

EVERY, STEPS = 5, 23

SCHEDULES: dict[str, dict[str, Any]] = {
    "at once": {},
    "fragments": {"num_fragments": 3},
    "overlap": {"overlap_steps": 3},
    "fragments in flight": {"num_fragments": 3, "overlap_steps": 4},
    "mix": {"num_fragments": 2, "overlap_steps": 2, "adopt": "mix", "keep_local": 0.5},
    "mix, mostly the anchor": {"overlap_steps": 2, "adopt": "mix", "keep_local": 0.1},
}


WINDOWS = (3, 4, 0)
"""Inner steps per window after round 1, 2 and 3, and so on from the first; 0: all."""


def a_run(
    sync: dict[str, Any], *, windows: tuple[int, ...] = (), **options: Any
) -> Exchange:
    wire = options.pop("wire", {"up": "fp32", "down": "fp32"})
    sync = {"sync_every": EVERY, "dynamic_local_updates": bool(windows), **sync}
    run = run_of(sync=sync, wire=wire, **options)
    if not windows:
        return run
    return WindowRun(run, lambda _, round: windows[(round - 1) % len(windows)])


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


@pytest.mark.parametrize("sync", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("killed_after", [1, 3])
def test_windows_that_change_are_made_again(
    sync: dict[str, Any], killed_after: int
) -> None:
    """An island with a window of its own continues in it, and changes it as before."""
    expected = uninterrupted(sync, windows=WINDOWS)
    assert expected != uninterrupted(sync)

    for saved_at in range(0, 2 * EVERY + 1):
        bits = interrupted(saved_at, saved_at + killed_after, sync, windows=WINDOWS)
        assert bits == expected, saved_at


def test_only_an_island_with_a_stride_is_saved_in_the_second_version() -> None:
    """Earlier versions read the checkpoints of islands that make all inner steps."""
    island = Incarnation(a_run({}, windows=(4, 0)))
    versions = []
    for _ in range(3):
        versions.append(island.save().island["version"])
        island.train(EVERY)  # round 1 gives a window of 4, and round 2 of 5
    island.die()

    assert versions == [1, 2, 1]


def test_an_outcome_that_is_saved_has_its_window() -> None:
    """Saved in flight, with the outcome known: the window is still to be taken."""
    run = a_run({"overlap_steps": 3}, windows=(4, 0))
    first = Incarnation(run)
    first.train(EVERY)
    sealed = first.host.slots[0].sealed
    assert sealed is not None
    sealed.arrival.result()
    checkpoint = first.save()
    first.die()
    second = Incarnation(run, checkpoint=checkpoint)
    second.train(3)

    assert checkpoint.island["version"] == 2
    assert second.host.stride.window == 4
    second.die()


@pytest.mark.parametrize(
    ("version", "stride", "match"),
    [
        (4, None, "has version 4, and this Atoll reads 1 to 3"),
        (2, {"window": 6, "sync_every": 5}, "window=6 must be 1 to sync_every=5"),
        (2, {"window": "6"}, "not complete"),
    ],
)
def test_a_stride_that_cannot_be_is_refused(
    version: int, stride: dict[str, Any] | None, match: str
) -> None:
    """A checkpoint of a later version, or a damaged one, is named."""
    island = Incarnation(a_run({}))
    tree = {**island.save().island, "version": version, "stride": stride}
    island.die()

    with pytest.raises(CorruptError, match=match):
        from_tree(tree)


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
    assert second.host.counters.dropped == 1
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


def state_of(run: Exchange) -> tuple[int, bytes]:
    header = run.state(0).header
    return header.round, header.base
