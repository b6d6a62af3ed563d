"""Rows for each island: no two islands share one, and none is left out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import atoll.torch
from atoll.errors import UsageError
from atoll.torch import Island, shard
from tests.torch.runs import Weights, run_of, sgd

pytestmark = pytest.mark.torch

ROWS = 11
"""No multiple of the three islands."""


@pytest.fixture
def islands() -> Iterator[list[Island]]:
    with ExitStack() as stack:
        run = run_of(run={"max_islands": 3})
        models = [Weights(1.0) for _ in "abc"]
        yield [
            stack.enter_context(atoll.torch.join(model, sgd(model), run, island=name))
            for model, name in zip(models, "abc", strict=True)
        ]


class Squares(Dataset[int]):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> int:
        return index * index


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(ROWS))


def rows(data: Any) -> list[int]:
    """Return the rows that a loop over `data` sees, batches taken apart."""
    seen: list[int] = []
    for item in data:
        if isinstance(item, torch.Tensor):
            seen += item.reshape(-1).tolist()
        else:
            seen.append(item)
    return seen


@pytest.mark.parametrize(
    "data",
    [torch.arange(ROWS), list(range(ROWS)), tuple(range(ROWS)), range(ROWS), Stream()],
    ids=["tensor", "list", "tuple", "range", "stream"],
)
def test_rows_are_dealt_in_turns(islands: list[Island], data: Any) -> None:
    """Island `slot` of three takes rows slot, slot + 3, slot + 6, and so on."""
    dealt = [rows(shard(data, island)) for island in islands]

    assert dealt == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8]]


def test_a_dataset_is_dealt_by_its_rows(islands: list[Island]) -> None:
    """A map-style dataset stays one: it has a length and an index."""
    parts = [shard(Squares(), island) for island in islands]

    assert [len(part) for part in parts] == [4, 4, 3]
    assert [parts[1][i] for i in range(4)] == [1, 16, 49, 100]


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_loader_keeps_its_ways_over_its_own_rows(
    islands: list[Island], shuffle: bool
) -> None:
    """Batch size and shuffling stay; rows are disjoint and complete in every epoch."""
    loader = DataLoader(
        TensorDataset(torch.arange(ROWS)), batch_size=2, shuffle=shuffle
    )
    parts = [shard(loader, island) for island in islands]
    for _ in range(2):
        epochs = [[batch[0].tolist() for batch in part] for part in parts]

        assert [[len(batch) for batch in epoch] for epoch in epochs] == [
            [2, 2],
            [2, 2],
            [2, 1],
        ]
        dealt = [[row for batch in epoch for row in batch] for epoch in epochs]
        assert [set(own) for own in dealt] == [{0, 3, 6, 9}, {1, 4, 7, 10}, {2, 5, 8}]
        if not shuffle:
            assert dealt == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8]]


def test_a_shuffled_loader_is_shuffled_by_the_islands_seed(
    islands: list[Island],
) -> None:
    """The same island sees the same order again; epochs differ."""
    loader = DataLoader(TensorDataset(torch.arange(300)), batch_size=50, shuffle=True)

    def epochs() -> list[list[int]]:
        part = shard(loader, islands[0])
        return [[r for batch in part for r in batch[0].tolist()] for _ in range(2)]

    first, again = epochs(), epochs()
    assert first == again
    assert first[0] != first[1]
    assert first[0] != sorted(first[0])


def test_a_loader_over_a_stream_deals_its_batches(islands: list[Island]) -> None:
    """Nobody can index a stream: whole batches go in turns."""
    loader = DataLoader(Stream(), batch_size=2)

    dealt = [rows(shard(loader, island)) for island in islands]
    assert dealt == [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10]]


def test_an_iterable_may_be_read_again(islands: list[Island]) -> None:
    """The second epoch starts where the first one did."""
    part = shard(range(ROWS), islands[2])

    assert rows(part) == rows(part) == [2, 5, 8]


def test_a_loader_without_batches_deals_its_rows(islands: list[Island]) -> None:
    """batch_size=None gives rows one by one, as it did before."""
    loader = DataLoader(TensorDataset(torch.arange(ROWS)), batch_size=None)

    assert [row[0].item() for row in shard(loader, islands[2])] == [2, 5, 8]


def odd_loaders() -> list[DataLoader[Any]]:
    data = TensorDataset(torch.arange(ROWS))
    order = SequentialSampler(range(ROWS))
    return [
        DataLoader(data, sampler=WeightedRandomSampler([1.0] * ROWS, num_samples=4)),
        DataLoader(data, sampler=RandomSampler(range(ROWS), replacement=True)),
        DataLoader(data, sampler=RandomSampler(range(ROWS), num_samples=4)),
        DataLoader(data, batch_sampler=BatchSampler(order, 2, drop_last=False)),
    ]


@pytest.mark.parametrize(
    ("loader", "sampler"),
    [
        *zip(
            odd_loaders(),
            ("WeightedRandomSampler", "RandomSampler", "RandomSampler", "BatchSampler"),
            strict=True,
        )
    ],
)
def test_a_loader_with_a_sampler_of_its_own_is_refused(
    islands: list[Island], loader: DataLoader[Any], sampler: str
) -> None:
    """It would draw rows of other islands; the message shows what to write instead."""
    with pytest.raises(
        UsageError, match=rf"\({sampler}\).*DataLoader\(atoll\.torch\.shard"
    ):
        shard(loader, islands[0])


def test_without_a_maximum_the_starting_islands_are_the_cut() -> None:
    """Two islands start, so that data is cut in two; a third one has no part."""
    run = run_of(2)
    models = [Weights(1.0) for _ in "abc"]
    with ExitStack() as stack:
        a, b, c = (
            stack.enter_context(atoll.torch.join(model, sgd(model), run, island=name))
            for model, name in zip(models, "abc", strict=True)
        )
        assert rows(shard(range(4), a)) == [0, 2]
        assert rows(shard(range(4), b)) == [1, 3]
        with pytest.raises(
            UsageError, match=r"'c' is number 3 .*cut into 2 parts.*run\.max_islands"
        ):
            shard(range(4), c)


def test_an_island_that_comes_back_has_its_own_rows_again() -> None:
    """The slot belongs to the name, whoever joined in between."""
    run, model, other = run_of(run={"max_islands": 3}), Weights(1.0), Weights(1.0)
    with atoll.torch.join(other, sgd(other), run, island="stays"):
        for _ in range(2):
            with atoll.torch.join(model, sgd(model), run, island="returns") as island:
                assert rows(shard(range(6), island)) == [1, 4]


def test_alone_there_is_nothing_to_share() -> None:
    """A solo island takes every row."""
    model = Weights(1.0)
    with atoll.torch.join(model, sgd(model), "none") as island:
        assert rows(shard(range(4), island)) == [0, 1, 2, 3]
