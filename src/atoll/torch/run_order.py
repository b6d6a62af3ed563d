"""Data in the run's order: the rows that a run deals to an island, for its loop.

The process that trains draws the rows, so that it can count the rows of the loop.
Workers of a loader fetch what a sampler in that process names.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    get_worker_info,
)

from atoll.data import DataSpec
from atoll.errors import UsageError
from atoll.island.deal import Deal, DealtRows
from atoll.torch.island import Island, handle_of

BatchHook = Callable[[object], None]


def deal_out(data: Any, island: Island, on_batch: BatchHook) -> Any:
    """Return the rows of `data` that the run deals to an island, until none is left.

    Raises:
        UsageError: the run has another dataset, or the data cannot be dealt out.
    """
    if isinstance(data, DataLoader):
        return _deal_loader(data, island, on_batch)
    if has_rows(data):
        return DealtDataset(data, rows_of(data, island), on_batch)
    return DealtStream(data, _stream_of(data, island), on_batch)


def has_rows(data: Any) -> bool:
    """Return whether data has a length and an index."""
    if _is_hf(data, "Dataset"):
        return True
    if isinstance(data, torch.Tensor | list | tuple | range):
        return True
    return isinstance(data, Dataset) and not isinstance(data, IterableDataset)


def rows_of(data: Any, island: Island) -> DealtRows:
    """Describe the data to the run, and return this process's rows."""
    fingerprint = data._fingerprint if _is_hf(data, "Dataset") else ""
    return island.deal(DataSpec(rows=len(data), fingerprint=fingerprint))


def _is_hf(data: Any, kind: str) -> bool:
    datasets = sys.modules.get("datasets")  # data of an unloaded module does not exist
    return datasets is not None and isinstance(data, getattr(datasets, kind))


class DealtDataset(IterableDataset[Any]):
    """The rows of a dataset in the order in which the run deals them."""

    def __init__(self, data: Any, rows: DealtRows, on_batch: BatchHook) -> None:
        self._data, self._rows, self._on_batch = data, rows, on_batch

    def __iter__(self) -> Iterator[Any]:
        _require_no_worker()
        self._rows.restart()
        while len(numbers := self._rows.take(1)):
            row = self._data[int(numbers[0])]
            self._rows.give(1)
            self._on_batch(row)
            yield row

    def __getstate__(self) -> dict[str, Any]:
        return {}  # a worker has no island, and is refused


class DealtOrder(Sampler[int]):
    """The rows that a loader fetches, in the order in which the run deals them."""

    def __init__(self, rows: DealtRows, batch: int) -> None:
        self._rows, self._batch = rows, batch

    def __iter__(self) -> Iterator[int]:
        self._rows.restart()
        while len(numbers := self._rows.take(self._batch)):
            yield from numbers.tolist()


class DealtLoader(DataLoader[Any]):
    """A loader like another, over the rows that the run deals to an island.

    It has no length: the run decides how many rows this island gets.
    """

    def __init__(
        self, rows: DealtRows, template: DataLoader[Any], on_batch: BatchHook
    ) -> None:
        self._dealt, self._on_batch = rows, on_batch
        super().__init__(
            template.dataset,
            sampler=DealtOrder(rows, template.batch_size or 1),
            **_options_of(template),
        )

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for batch in super().__iter__():
            self._dealt.give(self.batch_size or 1)
            self._on_batch(batch)
            yield batch


def _options_of(template: DataLoader[Any]) -> dict[str, Any]:
    return {
        "batch_size": template.batch_size,
        "num_workers": template.num_workers,
        "collate_fn": template.collate_fn,
        "pin_memory": template.pin_memory,
        "drop_last": template.drop_last,
        "timeout": template.timeout,
        "worker_init_fn": template.worker_init_fn,
        "multiprocessing_context": template.multiprocessing_context,
        "prefetch_factor": template.prefetch_factor,
        "persistent_workers": template.persistent_workers,
        "generator": template.generator,
    }


def _deal_loader(loader: DataLoader[Any], island: Island, on_batch: BatchHook) -> Any:
    if not isinstance(loader.dataset, IterableDataset):
        rows = rows_of(loader.dataset, island)
        return DealtLoader(rows, loader, on_batch)
    if loader.num_workers:
        raise _in_workers()
    stream = DealtStream(loader.dataset, _stream_of(loader.dataset, island), on_batch)
    return DataLoader(stream, **_options_of(loader))


class DealtStream(IterableDataset[Any]):
    """The items of a stream that the run deals to an island.

    The reader goes forward, and begins again for an item that it has passed.
    """

    def __init__(self, items: Any, deal: Deal, on_batch: BatchHook) -> None:
        self._items, self._deal, self._on_batch = items, deal, on_batch
        self._reader: Iterator[Any] = iter(())
        self._next = -1
        """The item that the reader comes to next; -1: it has not begun."""

    def __iter__(self) -> Iterator[Any]:
        _require_no_worker()
        rows = self._deal.rows
        rows.restart()
        while len(numbers := rows.take(1)):
            number = int(numbers[0])
            try:
                item = self._read(number)
            except StopIteration:
                self._end(number)
                continue
            rows.give(1)
            self._deal.stand_at(self._next)
            self._on_batch(item)
            yield item

    def __getstate__(self) -> dict[str, Any]:
        return {}  # a worker has no island, and is refused

    def _read(self, number: int) -> Any:
        """Return an item.

        Raises:
            StopIteration: the stream ends before it.
        """
        if not 0 <= self._next <= number:
            self._reader, self._next = iter(self._items), 0
        while True:
            item = next(self._reader)
            self._next += 1
            if self._next > number:
                return item

    def _end(self, number: int) -> None:
        """Tell the run how many items the stream has."""
        length = self._next
        self._next = -1
        data = self._deal.rows.data
        if data is not None and data.rows is not None:
            raise UsageError(
                f"This island's stream ends after {length:,} items, and item "
                f"{number:,} of {data.rows:,} was dealt to it. Give all islands the "
                "same data."
            )
        self._deal.end_stream(length)


def _stream_of(items: Any, island: Island) -> Deal:
    """Tell the run that the data is a stream, and return the island's rows."""
    if island.settings.data.shuffle:
        raise UsageError(
            "data.shuffle=true: a stream has its own order. Set "
            "data.shuffle=false, or give a dataset with a length."
        )
    if island.place[1] > 1:
        raise UsageError(
            f"The data is a stream, and {island.place[1]} ranks of island "
            f"{island.name!r} would each read all of it. Give a dataset with a length."
        )
    fingerprint = getattr(items, "_fingerprint", "")
    spec = DataSpec(rows=None, fingerprint=fingerprint)
    island.deal(spec)
    deal = handle_of(island).host.deal
    assert deal is not None
    return deal


def _require_no_worker() -> None:
    if get_worker_info() is not None:
        raise _in_workers()


def _in_workers() -> UsageError:
    return UsageError(
        "Rows are dealt in the process that trains, and this is a worker of a loader. "
        "Use num_workers=0, or shard the loader."
    )
