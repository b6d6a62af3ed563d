"""The run's order is a permutation of each pass, and the same everywhere."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.data import RunOrder, Spans


def test_ten_rows_by_seed_seven() -> None:
    """The order of ten rows by seed 7 is the one that the format fixes."""
    order = RunOrder(rows=10, seed=7)

    assert order.rows_of([(0, 10)]).tolist() == [1, 0, 3, 9, 5, 8, 4, 6, 2, 7]


@given(
    st.integers(1, 3000), st.integers(0, 2**63 - 1), st.integers(0, 5), st.booleans()
)
def test_each_pass_has_each_row_once(
    rows: int, seed: int, number: int, is_shuffled: bool
) -> None:
    """At any length, seed and pass, the order is a permutation of the rows."""
    order = RunOrder(rows=rows, seed=seed, is_shuffled=is_shuffled)

    dealt = order.rows_of([(number * rows, (number + 1) * rows)])

    assert sorted(dealt.tolist()) == list(range(rows))
    assert is_shuffled or dealt.tolist() == list(range(rows))


@given(st.integers(2, 500), st.lists(st.integers(0, 2000), min_size=1, max_size=50))
def test_a_turn_has_its_row_whoever_asks(rows: int, turns: list[int]) -> None:
    """Turns of several passes in any order have the rows that they have alone."""
    order = RunOrder(rows=rows, seed=3)

    together = order.rows_at(np.array(turns, np.int64)).tolist()

    assert together == [order.rows_of([(t, t + 1)])[0] for t in turns]


def test_passes_have_orders_of_their_own() -> None:
    """Two passes, and two seeds, take the rows in different orders."""
    order = RunOrder(rows=1000, seed=0)
    other = RunOrder(rows=1000, seed=1)

    first = order.rows_of([(0, 1000)]).tolist()

    assert first != order.rows_of([(1000, 2000)]).tolist()
    assert first != other.rows_of([(0, 1000)]).tolist()


def test_a_trillion_rows_need_no_memory() -> None:
    """Single turns of a huge dataset are computed alone, and are different rows."""
    order = RunOrder(rows=10**12, seed=5)
    spans = Spans([(0, 500), (10**12 - 500, 10**12)])

    rows = order.rows_of(spans)

    assert len(set(rows.tolist())) == 1000
    assert rows.max() < 10**12


def test_no_turns_have_no_rows() -> None:
    """An empty set of turns gives an empty array of whole numbers."""
    rows = RunOrder(rows=10).rows_of([])

    assert rows.tolist() == []
    assert rows.dtype == np.int64


def test_an_empty_dataset_has_no_order() -> None:
    """No order is made of no rows."""
    with pytest.raises(ValueError, match="0 rows has no order"):
        RunOrder(rows=0)
