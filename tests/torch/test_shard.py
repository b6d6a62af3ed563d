"""Rows for each island: no two islands share one, and none is left out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import datasets
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
    get_worker_info,
)

import atoll.torch
from atoll.checkpoint import COMPONENTS, Policy
from atoll.errors import UsageError
from atoll.exchange import MemoryRun
from atoll.torch import Island, shard
from atoll.torch.island import handle_of
from atoll.torch.shard import digest_of
from tests.torch.runs import Weights, run_of, sgd, train
from tests.torch.test_resume import die

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


def loaders(num_workers: int) -> DataLoader[Any]:
    return DataLoader(
        TensorDataset(torch.arange(40)),
        batch_size=3,
        shuffle=True,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
    )


def batches(loader: Any, count: int) -> list[list[int]]:
    """Return the next batches of a pass that is broken off after them."""
    given: list[list[int]] = []
    for batch in loader:
        given.append(batch[0].tolist())
        if len(given) == count:
            break
    return given


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("given", [2, 5])
def test_a_loader_goes_on_after_the_rows_that_were_given(
    islands: list[Island], num_workers: int, given: int
) -> None:
    """What workers have fetched ahead was not given; the pass after it is the next."""
    whole = shard(loaders(0), islands[0])
    passes = [batches(whole, 99) for _ in range(3)]

    begun = shard(loaders(num_workers), islands[0])
    first = batches(begun, 99)
    second = batches(begun, given)
    state = json.loads(json.dumps(begun.state_dict()))
    later = shard(loaders(num_workers), islands[0])
    later.load_state_dict(state)
    rest, third = batches(later, 99), batches(later, 99)

    assert isinstance(later, DataLoader)
    assert state == {"epoch": 1, "rows": min(14, 3 * given), "of": 14}
    assert [first, second + rest, third] == passes


def test_a_state_of_other_rows_is_refused(islands: list[Island]) -> None:
    """Rows are counted: of other data they would be others."""
    state = shard(loaders(0), islands[0]).state_dict()
    other = shard(DataLoader(TensorDataset(torch.arange(9))), islands[0])

    with pytest.raises(UsageError, match=r"had 14 rows for this island, and has 3\. G"):
        other.load_state_dict(state)


def test_a_stream_goes_on_after_the_items_that_were_given(
    islands: list[Island],
) -> None:
    """They are read again, and given to nobody; the pass after it is whole."""
    begun = shard(range(ROWS), islands[0])
    items = iter(begun)
    assert [next(items), next(items)] == [0, 3]
    later = shard(range(ROWS), islands[0])
    later.load_state_dict(begun.state_dict())

    assert list(later) == [6, 9]
    assert list(later) == [0, 3, 6, 9]


def test_a_dealt_stream_is_divided_among_a_loaders_workers(
    islands: list[Island],
) -> None:
    """Nothing comes twice, though every worker has all of it."""
    loader = DataLoader(shard(range(ROWS), islands[1]), batch_size=2, num_workers=2)

    assert sorted(rows(loader)) == [1, 4, 7, 10]


class Halves(IterableDataset[int]):
    """A stream that divides itself among workers, as those of Hugging Face do."""

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        step = worker.num_workers if worker else 1
        return iter(range(worker.id if worker else 0, 12, step))


def test_a_stream_that_divides_itself_is_dealt_in_each_worker(
    islands: list[Island],
) -> None:
    """Islands with as many workers share nothing, and leave nothing out."""
    parts = [
        rows(DataLoader(shard(Halves(), island), batch_size=2, num_workers=2))
        for island in islands
    ]

    assert sorted(parts[0] + parts[1] + parts[2]) == list(range(12))


def test_hugging_face_datasets_stay_what_they_are(islands: list[Island]) -> None:
    """Rows of a table are selected; of a stream they are dealt."""
    table = datasets.Dataset.from_dict({"x": list(range(ROWS))})
    parts = [shard(table, island) for island in islands]
    assert all(isinstance(part, datasets.Dataset) for part in parts)
    assert [part["x"][:] for part in parts] == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8]]

    stream = table.to_iterable_dataset(num_shards=2)
    dealt = [[row["x"] for row in shard(stream, island)] for island in islands]
    assert sorted(dealt[0] + dealt[1] + dealt[2]) == list(range(ROWS))
    loader = DataLoader(table.with_format("torch"), batch_size=2, num_workers=2)
    given = [batch["x"].tolist() for batch in shard(loader, islands[2])]
    assert given == [[2, 5], [8]]


def test_splits_are_sharded_one_by_one(islands: list[Island]) -> None:
    """A dictionary of datasets says which of them to give."""
    table = datasets.Dataset.from_dict({"x": [1]})
    splits = datasets.DatasetDict({"train": table, "test": table})
    with pytest.raises(UsageError, match=r"splits train, test\. Shard one of them"):
        shard(splits, islands[0])


def test_a_loader_with_a_state_of_its_own_is_refused_with_a_way_out(
    islands: list[Island],
) -> None:
    """Torchdata's loader is made over the island's rows, and keeps its own state."""

    class StatefulDataLoader(DataLoader[Any]):
        __module__ = "torchdata.stateful_dataloader"

    with pytest.raises(UsageError, match=r"Shard the dataset instead: StatefulDataLo"):
        shard(StatefulDataLoader(Squares()), islands[0])

    assert rows(StatefulDataLoader(shard(Squares(), islands[2]))) == [4, 25, 64]


def test_the_first_batch_is_told_apart(islands: list[Island]) -> None:
    """Islands with rows of their own differ; the same rows are the same digest."""
    loader = DataLoader(TensorDataset(torch.arange(ROWS)), batch_size=2)
    for island in islands:
        next(iter(shard(loader, island)))
    told = [handle_of(island).counters.stats(1.0).first_batch for island in islands]

    assert len(set(told)) == 3
    assert digest_of({"x": torch.arange(3)}) == digest_of({"x": torch.arange(3)})
    assert digest_of({"x": torch.arange(3)}) != digest_of({"x": torch.arange(3.0)})


@pytest.mark.parametrize(
    ("losses", "is_told"),
    [([0.5, 0.25, 0.125], True), ([0.5, 0.25], False), ([0.5, 0.5, 0.5], False)],
)
def test_equal_losses_tell_of_equal_rows(
    islands: list[Island], losses: list[float], is_told: bool
) -> None:
    """An own loader is seen by what its batches lead to, if that says anything."""
    told = []
    for island in islands[:2]:
        for loss in losses:
            island.report(tokens=4, loss=torch.tensor(loss))
        told.append(handle_of(island).counters.stats(1.0).first_batch)

    assert told[0] == told[1]
    assert (told[0] is not None) == is_told


def lives(run: MemoryRun, folder: Path, stops: list[int], kind: str) -> list[list[int]]:
    """Train up to each inner step in a life of its own; return each step's rows."""
    trained: dict[int, list[int]] = {}
    for stop in stops:
        model = Weights(1.0)
        optimizer = sgd(model)
        policy = Policy(folder, every_rounds=1, components=COMPONENTS)
        island = atoll.torch.join(
            model, optimizer, run, island="a", checkpoint=policy, on_end="flag"
        )
        data = loaders(0) if kind == "loader" else torch.split(torch.arange(200), 3)
        given = shard(data if kind == "loader" else iter(data), island)
        for batch in chain.from_iterable(repeat(given)):
            rows_given = batch[0] if kind == "loader" else batch
            trained[island.inner_steps] = rows_given.tolist()
            train(model, optimizer)
            if island.inner_steps >= stop:
                break
        die(island)
    return [trained[step] for step in sorted(trained)]


@pytest.mark.parametrize("kind", ["loader", "stream"])
@pytest.mark.parametrize("killed_at", [3, 7])
def test_a_killed_island_goes_on_with_its_rows(
    tmp_path: Path, kind: str, killed_at: int
) -> None:
    """The data is in the checkpoint without a word, and no row is trained twice."""
    plain = lives(run_of(every=4), tmp_path / "plain", [12], kind)
    killed = lives(run_of(every=4), tmp_path / "killed", [killed_at, 12], kind)

    assert killed == plain
