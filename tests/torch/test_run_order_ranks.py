"""The ranks of an island share the rows that the run deals to it."""

from __future__ import annotations

import pytest

from atoll.data import RunOrder
from tests.torch.processes import Group, run_groups
from tests.torch.rank_order import (
    BATCH,
    NUM_ROWS,
    train,
    train_on_other_data,
    train_without_rank_1,
)

# The first of them loads torch for all.
pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]


@pytest.mark.parametrize(("kind", "num_workers"), [("ddp", 0), ("fsdp", 0), ("ddp", 2)])
def test_each_rank_has_every_second_row(kind: str, num_workers: int) -> None:
    """All rows in the run's order, once, and the rosters list exactly those."""
    (ranks,) = run_groups(Group(train, (kind, num_workers), ranks=2))
    order = RunOrder(rows=NUM_ROWS, seed=1).rows_of([(0, NUM_ROWS)]).tolist()

    assert [rank["rows"] for rank in ranks] == [order[0::2], order[1::2]]
    steps = -(-NUM_ROWS // 2 // BATCH)
    assert [rank["steps"] for rank in ranks] == [steps, steps]
    turns = [turn for first, last in ranks[0]["counted"] for turn in range(first, last)]
    assert turns == list(range(NUM_ROWS))


def test_ranks_with_other_datasets_are_refused() -> None:
    """The rank that differs from its leader is told both lengths."""
    (ranks,) = run_groups(Group(train_on_other_data, ranks=2))

    assert "This rank's data is 91 rows, and its leader's is 90 rows" in ranks[1]


def test_a_rank_that_does_not_shard_is_named() -> None:
    """All ranks of an island draw rows, or none does."""
    (ranks,) = run_groups(Group(train_without_rank_1, ranks=2))

    assert "Rank 1 of this island came to a step" in ranks[0]
    assert "and rank 0 to shard()" in ranks[0]
