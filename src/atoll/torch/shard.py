"""Disjoint rows for each island."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
)

from atoll.errors import UsageError
from atoll.torch.island import Island

T = TypeVar("T")


def shard(data: Any, island: Island) -> Any:
    """Return the part of `data` that belongs to this island.

    Island `slot` of K takes rows slot, slot + K, slot + 2K, ..., where K is the run's
    `max_islands`, or `start_islands` if that is not set: no two islands share a row.
    The ranks of an island that train on data of their own deal these rows out among
    them, the same number to each; ranks that train on the same data get the same.

    Args:
        data: a tensor or list (its rows), a map-style dataset (its rows), a DataLoader
            over one (its rows; shuffled by the island's own seed if it shuffled), or
            any other iterable (its items, which must come in the same order on every
            island).

    Raises:
        UsageError: more islands have joined than the run was cut for, or a DataLoader
            has a sampler of its own, which a part of its rows would contradict.
    """
    cut = _cut(island)
    if isinstance(data, DataLoader):
        return _shard_loader(data, cut, island.seed)
    if isinstance(data, torch.Tensor | list | tuple):
        rows = cut.rows(len(data))
        return data[rows.start : rows.stop : rows.step]
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        return _rows(data, cut)
    return Dealt(data, cut)


@dataclass(frozen=True)
class Cut:
    """Which rows belong to a rank: every `parts`-th from `part` on is the island's."""

    part: int
    parts: int
    rank: int = 0
    ranks: int = 1
    """Of the island's rows every `ranks`-th, from `rank` on, is this rank's."""

    def rows(self, count: int) -> range:
        """Return this rank's of so many rows; every rank of an island has as many."""
        each = len(range(self.part, count, self.parts)) // self.ranks
        first, step = self.part + self.rank * self.parts, self.parts * self.ranks
        return range(first, first + each * step, step)


class Dealt(Iterable[T]):
    """A rank's items of an iterable, each time it is asked."""

    def __init__(self, items: Iterable[T], cut: Cut) -> None:
        self._items, self._cut = items, cut

    def __iter__(self) -> Iterator[T]:
        cut = self._cut
        mine = islice(self._items, cut.part, None, cut.parts)
        # An item counts only if there is one for every rank: none may have more steps.
        while len(dealt := list(islice(mine, cut.ranks))) == cut.ranks:
            yield dealt[cut.rank]


def _cut(island: Island) -> Cut:
    run = island.settings.run
    parts = run.max_islands if run.max_islands is not None else run.start_islands
    if island.slot >= parts:
        raise UsageError(
            f"Island {island.name!r} is number {island.slot + 1} of a run whose data "
            f"is cut into {parts} parts. Set run.max_islands to the most islands that "
            "will ever join."
        )
    return Cut(island.slot, parts, *island.place)


def _rows(data: Dataset[Any], cut: Cut) -> Subset[Any]:
    return Subset(data, cut.rows(len(data)))  # type: ignore[arg-type]


def _shard_loader(loader: DataLoader[Any], cut: Cut, seed: int) -> Iterable[Any]:
    if isinstance(loader.dataset, IterableDataset):
        return Dealt(loader, cut)
    if (sampler := _own_sampler(loader)) is not None:
        raise UsageError(
            f"The DataLoader has a sampler of its own ({type(sampler).__name__}), "
            "which a part of its rows would contradict. Shard the dataset instead: "
            "DataLoader(atoll.torch.shard(dataset, island), ...)."
        )
    generator = torch.Generator().manual_seed(seed)
    return DataLoader(
        _rows(loader.dataset, cut),
        batch_size=loader.batch_size,
        shuffle=isinstance(loader.sampler, RandomSampler),
        generator=generator,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        drop_last=loader.drop_last,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )


def _own_sampler(loader: DataLoader[Any]) -> object:
    """Return the sampler that neither order nor a plain shuffle explains, or None."""
    sampler, rows = loader.sampler, loader.dataset
    if loader.batch_size is None and loader.batch_sampler is not None:
        return loader.batch_sampler
    if isinstance(sampler, RandomSampler):
        is_plain = not sampler.replacement and sampler.num_samples == len(rows)  # type: ignore[arg-type]
    else:
        is_plain = isinstance(sampler, SequentialSampler)
    return None if is_plain else sampler
