"""A trainer's loader reads the rows of its island, in as many batches as before."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, TensorDataset

import atoll.torch
from atoll.errors import AtollWarning, UsageError
from atoll.integrations.data import (
    can_be_dealt,
    deal_rows,
    tokens_of,
    warn_of_same_rows,
)
from tests.torch.runs import Weights, run_of, sgd

pytestmark = pytest.mark.torch
KNOWN = (RandomSampler, SequentialSampler)


def loader(count: int = 12, *, shuffle: bool = True) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(count)), batch_size=4, shuffle=shuffle)


def read(given: DataLoader[Any]) -> list[int]:
    return [row for (batch,) in given for row in batch.tolist()]


def islands(stack: ExitStack, count: int) -> list[atoll.torch.Island]:
    """Return islands of one run, which nobody trains."""
    run = run_of(1, run={"max_islands": count})
    joined = []
    for number in range(count):
        model = Weights(1.0)
        island = atoll.torch.join(model, sgd(model), run, island=f"i{number}")
        joined.append(stack.enter_context(island))
    return joined


@pytest.mark.parametrize("shuffles", [True, False])
def test_no_two_islands_read_one_row(shuffles: bool) -> None:
    """Together they read all rows; each goes over its own until the epoch is full."""
    with ExitStack() as stack:
        seen = []
        for island in islands(stack, 3):
            each = loader(shuffle=shuffles)
            deal_rows(each, island, shuffles=shuffles)
            seen.append(read(each))

    assert [len(rows) for rows in seen] == [12, 12, 12]
    assert [sorted(set(rows)) for rows in seen] == [
        [0, 3, 6, 9],
        [1, 4, 7, 10],
        [2, 5, 8, 11],
    ]
    assert all(sorted(rows[:4]) == sorted(set(rows)) for rows in seen)


def test_an_order_belongs_to_island_and_epoch() -> None:
    """Another life reads the same rows in the same order, and goes on where it was."""
    with ExitStack() as stack:
        (island,) = islands(stack, 1)
        first, again = loader(), loader()
        rows = deal_rows(first, island, shuffles=True)
        resumed = deal_rows(again, island, shuffles=True)
        whole = read(first)
        resumed.skip_once(8)
        rest = read(again)
        rows.set_epoch(1)
        other = read(first)

    assert rest == whole[8:]
    assert read(again) == whole
    assert sorted(other) == sorted(whole)
    assert other != whole


def test_what_has_an_order_of_its_own_is_not_dealt() -> None:
    """A sampler that means something stays, and a warning names the island."""
    own = DataLoader(TensorDataset(torch.arange(4)), sampler=[3, 1])
    with ExitStack() as stack:
        first, second = islands(stack, 2)

        assert not can_be_dealt(own, KNOWN)
        assert can_be_dealt(loader(), KNOWN)
        with pytest.warns(AtollWarning, match="'i1' rows that no other island has"):
            warn_of_same_rows(own, second)
        with pytest.raises(UsageError, match=r"has 1 rows, too few .* 'i1'"):
            deal_rows(loader(1), second, shuffles=True)
        deal_rows(loader(1), first, shuffles=True)


def test_tokens_are_words_vectors_or_rows() -> None:
    """Padding counts; whatever a batch is made of, no device is asked."""
    words = torch.zeros(2, 8, dtype=torch.long)

    assert tokens_of({"labels": torch.zeros(2), "input_ids": words}) == 16
    assert tokens_of({"inputs_embeds": torch.zeros(2, 8, 5)}) == 16
    assert tokens_of([torch.zeros(3, 5), words]) == 3
    assert tokens_of({"x": "text", "y": words}) == 16
    assert tokens_of("text") == 0
