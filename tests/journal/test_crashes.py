"""A crash at any call of the disk: nothing promised is lost, nothing is half there."""

from __future__ import annotations

import random
from itertools import zip_longest
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.errors import DiskFull
from atoll.simulate.scheduler import ProcessDead
from atoll.simulate.world import SimDisk
from tests.journal.runs import Run
from tests.journal.stories import (
    ACTS,
    BEGINNING,
    EVERYTHING,
    NoRoom,
    Telling,
    tell_until_crash,
    tell_with_no_room,
    tell_with_no_room_and_crash,
)

STEPS = sorted(ACTS.keys() - set(BEGINNING))


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("is_power_cut", [False, True], ids=["killed", "power-cut"])
def test_a_crash_at_every_call_keeps_what_was_promised(
    after: bool, is_power_cut: bool
) -> None:
    """Before and after every call of a whole run, the journal comes back as it was."""
    call = 1
    while tell_until_crash(
        EVERYTHING, call=call, after=after, is_power_cut=is_power_cut, seed=call
    ):
        call += 1

    # Twenty steps make more calls than that, and a crash has hit every one of them.
    assert call > 100


@pytest.mark.parametrize(
    ("share", "times"), [(0.0, 2), (0.4, 1), (1.0, 1)], ids=["none", "part", "all"]
)
def test_a_disk_without_room_at_any_call_commits_nothing_by_halves(
    share: float, times: int
) -> None:
    """What fails can be repeated, whether the disk had done none, some or all of it."""
    call = 1
    while tell_with_no_room(EVERYTHING, failing=range(call, call + times), share=share):
        call += 1

    # At least an append and a sync for each of the nine commits and stagings.
    assert call > 18


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("share", [0.0, 1.0], ids=["none", "all"])
def test_a_crash_after_a_full_disk_keeps_what_was_promised(
    share: float, times: int
) -> None:
    """A record that failed comes back with all it names, or never."""
    story = (*BEGINNING, "join a", "sync", "large", "compact large")
    crashes = 0
    # Calls 1 to 7 make and found the run; two for island a and three for the round.
    for call in range(8, 13):
        crash_in = 1
        while tell_with_no_room_and_crash(
            story, failing=range(call, call + times), share=share, crash_in=crash_in
        ):
            crash_in += 1
        crashes += crash_in - 1

    assert crashes > 40


@pytest.mark.parametrize("seed", range(12))
def test_a_state_that_may_not_be_durable_replaces_nothing(seed: int) -> None:
    """A state that was written although that failed is made durable, then trusted."""
    inner = SimDisk(rng=random.Random(seed))
    disk = NoRoom(inner, share=1.0)
    run = Run(disk).start()
    for _ in range(3):
        run.commit(1)
        disk.is_full = True
        with pytest.raises(DiskFull):
            run.journal.compact(1)
        disk.is_full = False
        run.journal.compact(1)

    inner.crash(is_power_cut=True)

    run.reopen().check()
    assert run.journal.damage == []


class Trouble(NamedTuple):
    """What goes wrong at one step."""

    is_full: bool = False
    """The disk has no room at first; the step is repeated when it has."""

    crash_in: int | None = None
    """After so many calls of the disk the process dies."""

    is_power_cut: bool = False
    crash_again_in: int | None = None
    """After so many calls of coming back it dies again."""


TROUBLES = st.builds(
    Trouble,
    is_full=st.booleans(),
    crash_in=st.none() | st.integers(1, 40),
    is_power_cut=st.booleans(),
    crash_again_in=st.none() | st.integers(1, 80),
)


@settings(max_examples=120)
@given(
    steps=st.lists(st.sampled_from(STEPS), min_size=1, max_size=10),
    troubles=st.lists(TROUBLES, max_size=10),
    share=st.sampled_from([0.0, 0.4]),
    seed=st.integers(0, 2**32),
)
def test_any_run_survives_any_troubles(
    steps: list[str], troubles: list[Trouble], share: float, seed: int
) -> None:
    """No room, a crash, a crash while coming back: what is left is a promised past."""
    inner = SimDisk(rng=random.Random(seed))
    disk = NoRoom(inner, share=share)
    telling = Telling(inner, Run(disk))
    for step in BEGINNING:
        telling.step(step)
    for step, trouble in zip_longest(steps, troubles[: len(steps)]):
        go_through(telling, disk, inner, step, trouble or Trouble())
    telling.come_back(is_power_cut=True)


def go_through(
    telling: Telling, disk: NoRoom, inner: SimDisk, step: str, trouble: Trouble
) -> None:
    """Make one step in spite of its trouble, or come back from it."""
    arm(inner, trouble.crash_in)
    disk.is_full = trouble.is_full
    try:
        try:
            telling.step(step)
        except DiskFull:
            disk.is_full = False
            telling.step(step)
    except ProcessDead:
        disk.is_full = False
        arm(inner, trouble.crash_again_in)
        try:
            telling.come_back(is_power_cut=trouble.is_power_cut)
        except ProcessDead:
            telling.come_back(is_power_cut=True)
    disk.is_full = False
    arm(inner, None)


def arm(disk: SimDisk, crash_in: int | None) -> None:
    disk.crash_at(disk.calls + crash_in if crash_in else 0)
