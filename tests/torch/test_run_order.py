"""Rows that the run deals out: each to one island, and none left when all have gone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain, count
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    TensorDataset,
    WeightedRandomSampler,
)

import atoll.data
import atoll.torch
from atoll import RunEnded
from atoll.data import RunOrder, Spans
from atoll.errors import AtollWarning, SettingsError, UsageError
from atoll.exchange import MemoryRun
from atoll.torch import Island, shard
from tests.torch.runs import Weights, run_of, sgd, together, train

pytestmark = pytest.mark.torch

ROWS = 50
EVERY = 3


def dealing_run(islands: int = 1, **data: object) -> MemoryRun:
    """Return a run that deals out units of 4 rows, as they lie."""
    table = {"order": "run", "unit_rows": 4, "shuffle": False, **data}
    return run_of(islands, every=EVERY, data=table)


def spans_of(run: MemoryRun, fragment: int = 0) -> list[tuple[str, Spans]]:
    """Return the rows in each counted update in the order of rounds."""
    counted = []
    with suppress(RunEnded):
        for number in count(1):
            outcome = run.outcome(fragment, number, wait_s=0.0)
            if outcome is None:
                break
            roster = outcome.agreed.header.roster
            assert roster is not None
            counted += [
                (entry.island, Spans.unpack(entry.spans)) for entry in roster.counted
            ]
    return counted


def rows_in(batch: Any) -> list[int]:
    """Return the rows of a batch in any container."""
    if isinstance(batch, torch.Tensor | np.ndarray):
        return [int(row) for row in batch.reshape(-1)]
    if isinstance(batch, dict):
        return list(chain.from_iterable(map(rows_in, batch.values())))
    if isinstance(batch, list | tuple):
        return list(chain.from_iterable(map(rows_in, batch)))
    return [int(batch)]


def train_on(run: MemoryRun, name: str, make: Callable[[Island], Any]) -> list[int]:
    """Make an inner step on each batch until the data ends; return all rows."""
    model = Weights(1.0)
    optimizer = sgd(model, lr=0.1)
    seen: list[int] = []
    with atoll.torch.join(model, optimizer, run, island=name) as island:
        for batch in make(island):
            seen += rows_in(batch)
            train(model, optimizer)
    return seen


class Numbers(Dataset[int]):
    """Row n is the number n."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    """Numbers up to its length, from the beginning in every pass."""

    def __init__(self, length: int = ROWS) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


def _tensors() -> TensorDataset:
    return TensorDataset(torch.arange(ROWS))


SOURCES: dict[str, Callable[[], Any]] = {
    "tensor": lambda: torch.arange(ROWS),
    "list": lambda: list(range(ROWS)),
    "map-style": Numbers,
    "hf": lambda: datasets.Dataset.from_dict({"n": list(range(ROWS))}),
    "loader": lambda: DataLoader(Numbers(), batch_size=3),
    "shuffling loader": lambda: DataLoader(_tensors(), batch_size=3, shuffle=True),
    "loader over hf": lambda: DataLoader(
        datasets.Dataset.from_dict({"n": list(range(ROWS))}), batch_size=3
    ),
    "loader with workers": lambda: DataLoader(_tensors(), batch_size=3, num_workers=2),
    "stream": Stream,
    "hf stream": lambda: datasets.Dataset.from_dict(
        {"n": list(range(ROWS))}
    ).to_iterable_dataset(),
    "range": lambda: range(ROWS),
    "loader over a stream": lambda: DataLoader(Stream(), batch_size=3),
}


@pytest.mark.parametrize("source", SOURCES)
def test_two_islands_train_on_each_row_once(source: str) -> None:
    """Every kind of data, in a pass that is not cut in advance."""
    run = dealing_run(2)
    seen = together(
        *(
            lambda name=name: train_on(
                run, name, lambda island: shard(SOURCES[source](), island)
            )
            for name in "ab"
        )
    )

    assert sorted(seen[0] + seen[1]) == list(range(ROWS))
    assert all(seen)


def test_a_shuffled_run_has_its_order() -> None:
    """The run's seed decides, not the loader's, alike for all kinds of loop."""
    order = RunOrder(rows=ROWS, seed=3).rows_of([(0, ROWS)]).tolist()
    loader = DataLoader(_tensors(), batch_size=4, shuffle=True)

    def batches(island: Island) -> Any:
        return atoll.data.batches(island, rows=ROWS, batch=4)

    run = dealing_run(shuffle=True, seed=3)
    assert train_on(run, "a", lambda island: shard(loader, island)) == order
    assert train_on(dealing_run(shuffle=True, seed=3), "a", batches) == order


def test_passes_go_over_all_rows_again() -> None:
    """Each pass has every row; no batch of the loop is cut at its end."""
    run = dealing_run(passes=3)
    seen = train_on(
        run, "a", lambda island: atoll.data.batches(island, rows=10, batch=4)
    )

    assert seen == [*range(10)] * 3


def test_an_incomplete_last_batch_can_be_left_to_the_others() -> None:
    """Its rows are in no inner step, and stay free."""
    run = dealing_run()
    seen = train_on(
        run,
        "a",
        lambda island: atoll.data.batches(island, rows=10, batch=4, drop_last=True),
    )

    assert seen == [*range(8)]
    assert sum(len(spans) for _, spans in spans_of(run)) == 8


@pytest.mark.parametrize("source", ["loader with workers", "stream", "hf", "list"])
def test_rosters_list_exactly_the_rows_that_the_loop_was_given(source: str) -> None:
    """In windows of three steps, and the rest departs with the island."""
    run = dealing_run()
    seen = train_on(run, "a", lambda island: shard(SOURCES[source](), island))

    counted = [
        turn for _, spans in spans_of(run) for a, b in spans for turn in range(a, b)
    ]
    assert counted == seen == list(range(ROWS))


def test_rows_that_workers_fetched_ahead_are_dealt_to_others() -> None:
    """An island that ends its loop leaves them; the next one has all that is left."""
    run = dealing_run()
    loader = DataLoader(_tensors(), batch_size=3, num_workers=2)
    model = Weights(1.0)
    optimizer = sgd(model, lr=0.1)
    seen: list[int] = []
    with atoll.torch.join(model, optimizer, run, island="a") as island:
        for (batch,) in shard(loader, island):
            seen += batch.tolist()
            train(model, optimizer)
            if len(seen) == 12:
                break
    rest = train_on(run, "b", lambda island: shard(loader, island))

    assert seen == list(range(12))
    assert rest == list(range(12, ROWS))


def test_a_loop_that_begins_anew_continues() -> None:
    """An epoch of the loop means nothing: rows that it was not given come again."""
    run = dealing_run()
    loader = DataLoader(_tensors(), batch_size=3)

    def epochs(island: Island) -> Iterator[Any]:
        for _ in range(3):
            for index, batch in enumerate(shard(loader, island)):
                yield batch
                if index == 4:
                    break

    assert train_on(run, "a", epochs) == list(range(45))


def test_a_stream_begins_anew_for_items_that_came_back() -> None:
    """An island that has read past them reads them when no other is left."""
    run = dealing_run(2)

    def first(island: Island) -> Iterator[int]:
        for index, item in enumerate(shard(Stream(), island)):
            if index == 2:
                return  # two items are trained, and the others of its unit return
            yield item

    lost = train_on(run, "a", first)
    seen = train_on(run, "b", lambda island: shard(Stream(), island))

    assert lost == [0, 1]
    assert sorted(seen) == list(range(2, ROWS))


def test_a_stream_that_ends_within_a_unit_tells_the_run() -> None:
    """Its length is where it ended, and two passes go over that."""
    run = dealing_run(passes=2)

    seen = train_on(run, "a", lambda island: shard(Stream(10), island))
    assert seen == [*range(10), *range(10)]


@pytest.fixture
def island() -> Iterator[Island]:
    """Return an island of a run that deals out rows in its order."""
    model = Weights(1.0)
    with atoll.torch.join(model, sgd(model), dealing_run(shuffle=True)) as island:
        yield island


def test_a_run_that_deals_nothing_out_refuses_by_its_setting() -> None:
    """`batches` has no share to fall back to."""
    model = Weights(1.0)
    with (
        atoll.torch.join(model, sgd(model), run_of()) as island,
        pytest.raises(UsageError, match=r"deals out no rows.*data\.order='run'"),
    ):
        atoll.data.batches(island, rows=10, batch=2)


def test_a_batch_of_nothing_is_refused(island: Island) -> None:
    """It would never end."""
    with pytest.raises(UsageError, match=r"batch=0 must be at least 1"):
        atoll.data.batches(island, rows=10, batch=0)


def test_an_empty_dataset_is_refused(island: Island) -> None:
    """There is nothing to deal out."""
    with pytest.raises(UsageError, match="nothing to deal out"):
        shard([], island)


def test_datasets_of_other_lengths_are_refused() -> None:
    """The second island learns both."""
    run = dealing_run(2)
    models = [Weights(1.0), Weights(1.0)]
    islands = [
        atoll.torch.join(model, sgd(model), run, island=name)
        for model, name in zip(models, "ab", strict=True)
    ]
    with islands[0], islands[1]:
        shard(list(range(ROWS)), islands[0])
        with pytest.raises(UsageError, match=r"has 51 rows, and the run's has 50"):
            shard(list(range(ROWS + 1)), islands[1])


def test_datasets_of_other_contents_are_refused() -> None:
    """Hugging Face knows a fingerprint of each; other data is not compared."""
    run = dealing_run(2)
    models = [Weights(1.0), Weights(1.0)]
    islands = [
        atoll.torch.join(model, sgd(model), run, island=name)
        for model, name in zip(models, "ab", strict=True)
    ]
    first = datasets.Dataset.from_dict({"n": [1, 2, 3]})
    other = datasets.Dataset.from_dict({"n": [1, 2, 4]})
    with islands[0], islands[1]:
        shard(first, islands[0])
        with pytest.raises(UsageError, match="fingerprint") as refused:
            shard(other, islands[1])
    assert first._fingerprint in str(refused.value)
    assert other._fingerprint in str(refused.value)


def test_a_stream_in_a_shuffled_run_is_refused(island: Island) -> None:
    """It has its own order."""
    with pytest.raises(UsageError, match=r"its own order. Set data\.shuffle=false"):
        shard(Stream(), island)


def test_a_stream_in_loader_workers_is_refused() -> None:
    """The process that trains deals the rows out."""
    loader = DataLoader(Stream(), batch_size=2, num_workers=1)
    model = Weights(1.0)
    with (
        atoll.torch.join(model, sgd(model), dealing_run()) as island,
        pytest.raises(UsageError, match="Use num_workers=0, or shard the loader"),
    ):
        shard(loader, island)


@pytest.mark.parametrize("data", [list(range(ROWS)), Stream()], ids=["rows", "stream"])
def test_dealt_data_in_loader_workers_is_refused(data: Any) -> None:
    """A worker has no island."""
    model = Weights(1.0)
    with atoll.torch.join(model, sgd(model), dealing_run()) as island:
        loader = DataLoader(shard(data, island), batch_size=2, num_workers=1)
        with pytest.raises(UsageError, match="Use num_workers=0, or shard the loader"):
            next(iter(loader))


def test_a_loader_with_a_custom_sampler_is_refused(island: Island) -> None:
    """The run decides which rows come."""
    sampler = WeightedRandomSampler([1.0] * ROWS, ROWS)
    with pytest.raises(UsageError, match="custom sampler"):
        shard(DataLoader(Numbers(), batch_size=2, sampler=sampler), island)


def test_a_second_dataset_is_refused(island: Island) -> None:
    """A run deals out one."""
    shard(list(range(ROWS)), island)
    with pytest.raises(UsageError, match="a run deals out one dataset"):
        shard(list(range(ROWS + 1)), island)


def test_a_loop_that_asks_for_no_rows_is_warned_of() -> None:
    """At the first seal: perhaps it trains on its own data."""
    model = Weights(1.0)
    optimizer = sgd(model)
    with (
        pytest.warns(AtollWarning, match="has asked for no rows"),
        atoll.torch.join(model, optimizer, dealing_run()),
    ):
        train(model, optimizer, steps=EVERY)


@pytest.mark.parametrize("key", ["unit_rows", "passes", "seed"])
def test_settings_of_dealing_need_it(key: str) -> None:
    """They would have no effect on shares by slot."""
    with pytest.raises(SettingsError, match=rf"data\.{key}=7 has no effect"):
        run_of(data={key: 7})
