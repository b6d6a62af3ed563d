"""JAX islands over rows that the run deals out, by their numbers."""

from __future__ import annotations

from contextlib import suppress
from itertools import count

import jax.numpy as jnp
import numpy as np
import pytest

import atoll.data
from atoll import RunEnded
from atoll.data import RunOrder, Spans
from atoll.data.spans import union
from atoll.errors import UsageError
from atoll.exchange import MemoryRun
from atoll.jax import join
from tests.jax.islands import moved, run_of, together, weights

pytestmark = pytest.mark.jax

ROWS, BATCH = 90, 4


def trained(run: MemoryRun, name: str, *, most: int = 10**6) -> list[int]:
    """Train on dealt rows, and return them in the order of the loop."""
    x, seen = jnp.arange(ROWS), list[int]()
    with join(weights(0.0), run=run, island=name) as island:
        params = island.params
        for rows in atoll.data.batches(island, rows=ROWS, batch=BATCH):
            seen += np.asarray(x[rows]).tolist()
            params = island.stepped(moved(params, float(len(rows))))
            if len(seen) >= most:
                break
    return seen


def turns_of(run: MemoryRun) -> list[Spans]:
    """Return the turns of every counted update."""
    counted: list[Spans] = []
    with suppress(RunEnded):
        for number in count(1):
            outcome = run.outcome(0, number, wait_s=0.0)
            if outcome is None:
                break
            roster = outcome.agreed.header.roster
            assert roster is not None
            counted += [Spans.unpack(entry.spans) for entry in roster.counted]
    return counted


def test_two_islands_train_each_row_once() -> None:
    """No row counts twice, and all turns of the pass are in rosters."""
    run = run_of(2, every=3, data={"order": "run", "unit_rows": 8})
    seen = together(lambda: trained(run, "north"), lambda: trained(run, "south"))

    assert all(seen)
    assert sorted(seen[0] + seen[1]) == list(range(ROWS))
    counted = turns_of(run)
    assert union(counted) == Spans([(0, ROWS)])
    assert sum(map(len, counted)) == ROWS


def test_the_rows_are_in_the_order_of_the_run() -> None:
    """As a loop of torch over the same run would get them."""
    run = run_of(1, every=3, data={"order": "run", "unit_rows": 8, "seed": 9})
    order = RunOrder(rows=ROWS, seed=9, is_shuffled=True)

    assert trained(run, "a") == order.rows_at(np.arange(ROWS)).tolist()


def test_a_loop_that_ends_early_leaves_its_rows_to_the_next() -> None:
    """An island that leaves gives back the rows of its units that it did not train."""
    run = run_of(1, every=3, data={"order": "run", "unit_rows": 8})
    first = trained(run, "a", most=5 * BATCH)
    second = trained(run, "b")

    assert len(first) == 5 * BATCH
    assert sorted(first + second) == list(range(ROWS))


def test_a_run_that_deals_nothing_out_is_named() -> None:
    """The message has the setting."""
    with (
        join(weights(0.0), run=run_of()) as island,
        pytest.raises(UsageError, match=r"Set data\.order='run'"),
    ):
        atoll.data.batches(island, rows=ROWS, batch=BATCH)
