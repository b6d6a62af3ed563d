"""When fragments are sent."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.algorithm.schedule import Stride, due_fragments, next_send, send_step
from atoll.errors import UsageError

sync_everys = st.integers(1, 60)
fragment_counts = st.integers(1, 80)


def test_fragments_are_spread_over_the_window() -> None:
    """Four fragments in ten steps go after steps 3, 5, 8 and 10."""
    # ceil(10/4), ceil(20/4), ceil(30/4), ceil(40/4)
    sent = [send_step(p, 0, sync_every=10, num_fragments=4) for p in range(4)]

    assert sent == [3, 5, 8, 10]


def test_more_fragments_than_steps_share_a_step() -> None:
    """Five fragments in two steps: two after the first, three after the second."""
    # ceil(2/5 .. 10/5) = 1, 1, 2, 2, 2
    assert due_fragments(1, sync_every=2, num_fragments=5) == (0, 1)
    assert due_fragments(2, sync_every=2, num_fragments=5) == (2, 3, 4)


@given(sync_everys, fragment_counts, st.integers(0, 5))
def test_each_fragment_is_sent_once_per_window(
    sync_every: int, num_fragments: int, cycle: int
) -> None:
    """A window of sync_every inner steps sends every fragment once, in order."""
    first = cycle * sync_every + 1
    due = [
        p
        for s in range(first, first + sync_every)
        for p in due_fragments(s, sync_every=sync_every, num_fragments=num_fragments)
    ]

    assert due == list(range(num_fragments))


@given(sync_everys, fragment_counts, st.data())
def test_the_period_is_exactly_sync_every(
    sync_every: int, num_fragments: int, data: st.DataObject
) -> None:
    """Two sends of a fragment are sync_every apart, whatever divides what."""
    p = data.draw(st.integers(0, num_fragments - 1))
    sent = [
        send_step(p, k, sync_every=sync_every, num_fragments=num_fragments)
        for k in range(4)
    ]

    assert [b - a for a, b in pairwise(sent)] == [sync_every] * 3
    assert 1 <= sent[0] <= sync_every
    for step in sent:
        assert p in due_fragments(
            step, sync_every=sync_every, num_fragments=num_fragments
        )


@given(sync_everys, fragment_counts)
def test_gaps_between_sends_are_even(sync_every: int, num_fragments: int) -> None:
    """No two gaps between successive fragments differ by more than one inner step."""
    sent = [
        send_step(p, 0, sync_every=sync_every, num_fragments=num_fragments)
        for p in range(num_fragments)
    ]
    gaps = [b - a for a, b in pairwise([0, *sent])]

    assert max(gaps) - min(gaps) <= 1
    assert sent[-1] == sync_every


def test_nothing_is_due_before_the_first_inner_step() -> None:
    """Step 0 is the founding, not a window's end."""
    assert due_fragments(0, sync_every=1, num_fragments=3) == ()


@given(sync_everys, fragment_counts, st.integers(0, 300), st.data())
def test_next_send_is_the_first_one_later(
    sync_every: int, num_fragments: int, after: int, data: st.DataObject
) -> None:
    """Nothing of the fragment is due between a step and its next send."""
    p = data.draw(st.integers(0, num_fragments - 1))
    sent = next_send(p, after, sync_every=sync_every, num_fragments=num_fragments)
    due_at = [
        s
        for s in range(after + 1, after + 2 * sync_every + 1)
        if p in due_fragments(s, sync_every=sync_every, num_fragments=num_fragments)
    ]

    assert sent == due_at[0]


@st.composite
def strides(draw: st.DrawFn) -> Stride:
    """Draw a stride that has made some inner steps since any schedule step."""
    sync_every = draw(sync_everys)
    window = draw(st.integers(1, sync_every))
    since, inner_steps = draw(st.integers(0, 300)), draw(st.integers(0, 9))
    return Stride(window, sync_every, since, inner_steps)


def test_an_island_with_four_of_ten_steps_sends_after_its_second_and_fourth() -> None:
    """Two fragments are due at schedule steps 5 and 10 of ten."""
    # floor(10 m / 4) = 2, 5, 7, 10 for m = 1, 2, 3, 4
    stride = Stride(4, 10)

    assert [stride.stepped(made).step for made in range(1, 5)] == [2, 5, 7, 10]
    assert (stride.until(5), stride.until(10)) == (2, 4)


def test_overlap_takes_as_long_on_an_island_of_longer_strides() -> None:
    """Three schedule steps after a seal at step 10 are two inner steps of four."""
    # floor(10 m / 4) = 12, 15 for m = 5, 6: step 13 is reached by the sixth
    assert Stride(4, 10, inner_steps=4).until(13) == 2


@given(strides(), fragment_counts, st.data())
def test_every_window_has_exactly_the_inner_steps_of_the_stride(
    stride: Stride, num_fragments: int, data: st.DataObject
) -> None:
    """Two sends of a fragment are `window` inner steps apart, from any step on."""
    p = data.draw(st.integers(0, num_fragments - 1))
    sent, step = [], stride.step
    for _ in range(4):
        step = next_send(
            p, step, sync_every=stride.sync_every, num_fragments=num_fragments
        )
        sent.append(stride.until(step))

    assert [b - a for a, b in pairwise(sent)] == [stride.window] * 3


@given(sync_everys, fragment_counts, st.data())
def test_the_first_window_of_a_stride_is_its_part_of_the_schedule(
    sync_every: int, num_fragments: int, data: st.DataObject
) -> None:
    """A fragment due at schedule step s goes after ceil(s h / H) inner steps."""
    window = data.draw(st.integers(1, sync_every))
    p = data.draw(st.integers(0, num_fragments - 1))
    due = send_step(p, 0, sync_every=sync_every, num_fragments=num_fragments)

    assert Stride(window, sync_every).until(due) == -(-due * window // sync_every)


@given(strides(), st.integers(0, 600))
def test_until_is_the_least_number_of_inner_steps(stride: Stride, step: int) -> None:
    """So many inner steps reach a schedule step, and one fewer does not."""
    inner_steps = stride.until(step)

    assert stride.stepped(inner_steps).step >= step
    if inner_steps:
        assert stride.stepped(inner_steps - 1).step < step


@given(strides(), st.integers(1, 99))
def test_a_full_stride_makes_every_schedule_step(stride: Stride, made: int) -> None:
    """With H inner steps per window, an inner step is a schedule step."""
    full = stride.to(stride.sync_every)

    assert full.is_full
    assert full.stepped(made).step == full.step + made
    assert full.until(full.step + made) == made


@given(strides(), st.data())
def test_another_window_begins_at_the_step_that_is_reached(
    stride: Stride, data: st.DataObject
) -> None:
    """A new window moves no step; the same window changes nothing."""
    window = data.draw(st.integers(1, stride.sync_every))
    changed = stride.to(window)

    assert (changed.step, changed.window) == (stride.step, window)
    assert stride.to(stride.window) == stride


@given(strides(), st.integers(0, 600))
def test_a_stride_that_is_moved_has_the_same_window(stride: Stride, step: int) -> None:
    """It is at the step that it is moved to; at its own it keeps the inner steps."""
    moved = stride.at(step)

    assert (moved.step, moved.window) == (step, stride.window)
    assert stride.at(stride.step) == stride


@pytest.mark.parametrize("window", [0, -1, 11])
def test_a_window_outside_the_schedule_is_refused(window: int) -> None:
    """An island makes at least one inner step of its ten, and at most all."""
    with pytest.raises(UsageError, match=f"window={window} must be 1 to sync_every=10"):
        Stride(window, 10)


@pytest.mark.parametrize(("since", "inner_steps"), [(-1, 0), (0, -1)])
def test_a_stride_before_the_founding_is_refused(since: int, inner_steps: int) -> None:
    """Neither the schedule nor the inner steps begin below 0."""
    with pytest.raises(UsageError, match=f"{since} and inner_steps={inner_steps} at"):
        Stride(1, 10, since, inner_steps)
