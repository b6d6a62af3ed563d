"""When fragments are sent."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from atoll.algorithm.schedule import due_fragments, next_send, send_step

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
