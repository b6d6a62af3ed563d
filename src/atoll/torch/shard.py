"""Disjoint rows for each island, and a DataLoader over them that can be resumed.

Rows count when the loop gets them: workers fetch ahead of it, and rows that they
fetched too early are fetched again after a restart. A digest of the first batch shows
two islands that train on the same rows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    get_worker_info,
)

from atoll.errors import NoRows, UsageError
from atoll.torch.island import Island, handle_of, register_data
from atoll.torch.run_order import deal_out
from atoll.wire import blake3_digest


def shard(data: Any, island: Island) -> Any:
    """Return the part of `data` that belongs to this island.

    With `data.order = "run"` that is what the run deals to it: an iterable, or a loader
    without a length, that ends when the run has no more rows.

    With `data.order = "islands"`, island `slot` of K takes rows slot, slot + K,
    slot + 2K, ..., where K is the run's `max_islands`, or `start_islands` if that is
    not set: no two islands share a row.
    The ranks of an island that train on their own data divide these rows, the same
    number to each; ranks that train on the same data get the same rows.

    Then loaders and streams have `state_dict` and `load_state_dict`. The first is saved
    with the island, unless `Policy(extra={"data": ...})` is. The status reports if
    another island has the same first batch.

    Args:
        data: a tensor or list (its rows), a map-style dataset or one of Hugging Face
            (its rows), a DataLoader over one (its rows; shuffled by the island's own
            seed if it shuffled, or in the run's order), or any other iterable (its
            items, which must come in the same order on every island).

    Raises:
        NoRows: more islands have joined than the data has parts.
        UsageError: the data cannot be sharded. The message has the remedy.
    """
    _require_ours(data)
    if isinstance(data, DataLoader):
        _require_plain_order(data)
    if island.settings.data.is_dealt:
        return deal_out(data, island, see_first(island))
    row_shard = _row_shard(island)
    if isinstance(data, DataLoader):
        return _shard_loader(data, row_shard, island)
    if isinstance(data, torch.Tensor | list | tuple):
        rows = row_shard.rows(len(data))
        return data[rows.start : rows.stop : rows.step]
    datasets = sys.modules.get("datasets")  # data of an unloaded module does not exist
    if datasets is not None and isinstance(data, datasets.Dataset):
        return data.select(row_shard.rows(len(data)))
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        return _rows(data, row_shard)
    return _registered(ShardedStream(data, row_shard, see_first(island)), island)


def _registered(data: Any, island: Island) -> Any:
    register_data(island, data)
    return data


@dataclass(frozen=True)
class RowShard:
    """The rows of a rank: every `parts`-th from `part` on is the island's."""

    part: int
    parts: int
    rank: int = 0
    ranks: int = 1
    """Of the island's rows every `ranks`-th, from `rank` on, is this rank's."""

    def rows(self, count: int) -> range:
        """Return this rank's rows of `count`; all ranks of an island have as many."""
        num_rows = len(range(self.part, count, self.parts)) // self.ranks
        first, step = self.part + self.rank * self.parts, self.parts * self.ranks
        return range(first, first + num_rows * step, step)


class ShardedStream(IterableDataset[Any]):
    """A rank's items of an iterable, in every pass.

    A loader accepts it as a dataset: in its workers, a stream that divides itself among
    them is sharded per worker, and any other iterable is divided here.
    """

    def __init__(
        self, items: Iterable[Any], row_shard: RowShard, on_batch: BatchHook
    ) -> None:
        self._items, self._row_shard, self._on_batch = items, row_shard, on_batch
        self._num_given, self._is_resumed = 0, False

    def __iter__(self) -> Iterator[Any]:
        skipped = self._num_given if self._is_resumed else 0
        self._num_given, self._is_resumed = skipped, False
        for item in islice(self._own_items(), skipped, None):
            self._num_given += 1
            self._on_batch(item)
            yield item

    def state_dict(self) -> dict[str, int]:
        """Return the number of items that this pass has given."""
        return {"items": self._num_given}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Start the next pass after those items; they are read and skipped."""
        self._num_given, self._is_resumed = state["items"], True

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_on_batch": _ignore_batch}  # a worker has no island

    def _own_items(self) -> Iterator[Any]:
        row_shard = self._row_shard
        island_items = islice(self._items, row_shard.part, None, row_shard.parts)
        # An item counts only if there is one for every rank: none may have more steps.
        groups = iter(lambda: list(islice(island_items, row_shard.ranks)), [])
        items = (
            group[row_shard.rank] for group in groups if len(group) == row_shard.ranks
        )
        worker = get_worker_info()
        if worker is None or isinstance(self._items, IterableDataset):
            return items
        return islice(items, worker.id, None, worker.num_workers)


def _row_shard(island: Island) -> RowShard:
    run = island.settings.run
    parts = run.max_islands if run.max_islands is not None else run.start_islands
    if island.slot >= parts:
        raise NoRows(
            f"Island {island.name!r} is number {island.slot + 1} of a run whose data "
            f"is cut into {parts} parts. In the next run, set data.order='run' for any "
            "number of islands, or run.max_islands to the most that will ever join."
        )
    return RowShard(island.slot, parts, *island.place)


def _rows(data: Dataset[Any], row_shard: RowShard) -> Subset[Any]:
    return Subset(data, row_shard.rows(len(data)))  # type: ignore[arg-type]


def _shard_loader(loader: DataLoader[Any], row_shard: RowShard, island: Island) -> Any:
    if isinstance(loader.dataset, IterableDataset):
        return _registered(ShardedStream(loader, row_shard, see_first(island)), island)
    rows, on_batch = _rows(loader.dataset, row_shard), see_first(island)
    return _registered(
        IslandLoader(rows, loader, seed=island.seed, on_batch=on_batch), island
    )


def _require_plain_order(loader: DataLoader[Any]) -> None:
    """Raise UsageError for a loader that chooses its rows itself."""
    if isinstance(loader.dataset, IterableDataset):
        return
    if (sampler := _own_sampler(loader)) is not None:
        raise UsageError(
            f"The DataLoader has a custom sampler ({type(sampler).__name__}), "
            "which a part of its rows would contradict. Shard the dataset instead: "
            "DataLoader(atoll.torch.shard(dataset, island), ...)."
        )


def _require_ours(data: object) -> None:
    """Raise UsageError for data that must be sharded elsewhere."""
    if type(data).__module__.partition(".")[0] == "torchdata":
        name = type(data).__name__
        raise UsageError(
            f"{name} keeps a separate state, which a part of its rows would not fit. "
            f"Shard the dataset instead: {name}(atoll.torch.shard(dataset, island), "
            "...)."
        )
    datasets = sys.modules.get("datasets")
    if datasets is not None and isinstance(
        data, datasets.DatasetDict | datasets.IterableDatasetDict
    ):
        raise UsageError(
            f"The data has the splits {', '.join(map(str, data))}. Shard one of them: "
            "atoll.torch.shard(data['train'], island)."
        )


def _ignore_batch(batch: object) -> None:
    """Ignore a batch: a worker process has no island."""


def _own_sampler(loader: DataLoader[Any]) -> object:
    """Return a sampler that is neither sequential nor a plain shuffle, or None."""
    sampler, rows = loader.sampler, loader.dataset
    if loader.batch_size is None and loader.batch_sampler is not None:
        return loader.batch_sampler
    if isinstance(sampler, RandomSampler):
        is_plain = not sampler.replacement and sampler.num_samples == len(rows)  # type: ignore[arg-type]
    else:
        is_plain = isinstance(sampler, SequentialSampler)
    return None if is_plain else sampler


BatchHook = Callable[[object], None]


class RowOrder(Sampler[int]):
    """The rows of one pass: in turn, or shuffled by the seed and the pass's number."""

    def __init__(self, rows: int, seed: int, *, is_shuffled: bool) -> None:
        self._rows, self._seed, self._is_shuffled = rows, seed, is_shuffled
        self.epoch, self.first = 0, 0

    def __iter__(self) -> Iterator[int]:
        if not self._is_shuffled:
            return iter(range(self.first, self._rows))
        generator = torch.Generator().manual_seed((self._seed + self.epoch) % 2**63)
        return iter(
            torch.randperm(self._rows, generator=generator)[self.first :].tolist()
        )

    def __len__(self) -> int:
        return self._rows


class IslandLoader(DataLoader[Any]):
    """A loader like another, over the rows of an island.

    Trainers require a DataLoader, so it is one. A pass that an earlier incarnation
    began continues from its state; every other pass starts at the beginning.
    """

    def __init__(
        self,
        rows: Dataset[Any],
        template: DataLoader[Any],
        *,
        seed: int,
        on_batch: BatchHook,
    ) -> None:
        self._on_batch = on_batch
        self._epoch, self._num_given = 0, 0
        self._is_resumed = self._has_begun = False
        self._count: int = len(rows)  # type: ignore[arg-type]
        is_shuffled = isinstance(template.sampler, RandomSampler)
        self._order = RowOrder(self._count, seed, is_shuffled=is_shuffled)
        super().__init__(
            rows,
            batch_size=template.batch_size,
            sampler=self._order,
            generator=torch.Generator().manual_seed(seed),
            num_workers=template.num_workers,
            collate_fn=template.collate_fn,
            pin_memory=template.pin_memory,
            drop_last=template.drop_last,
            timeout=template.timeout,
            worker_init_fn=template.worker_init_fn,
            multiprocessing_context=template.multiprocessing_context,
            prefetch_factor=template.prefetch_factor,
            persistent_workers=template.persistent_workers,
        )

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if not self._is_resumed:
            self._epoch, self._num_given = self._epoch + self._has_begun, 0
        self._is_resumed, self._has_begun = False, True
        self._order.epoch, self._order.first = self._epoch, self._num_given
        for batch in super().__iter__():
            self._num_given = min(self._count, self._num_given + (self.batch_size or 1))
            self._on_batch(batch)
            yield batch

    def state_dict(self) -> dict[str, int]:
        """Return the number of this pass, and of the rows that it has given."""
        return {"epoch": self._epoch, "rows": self._num_given, "of": self._count}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue the pass of the state in the next pass.

        Raises:
            UsageError: this island has another number of rows.
        """
        if state["of"] != self._count:
            raise UsageError(
                f"The data had {state['of']} rows for this island, and has "
                f"{self._count}. Give the data that was saved, or leave 'data' out of "
                "the components."
            )
        self._epoch, self._num_given = state["epoch"], state["rows"]
        self._is_resumed = True


def see_first(island: Island) -> Callable[[object], None]:
    """Return a function that records the digest of the first batch it gets."""
    counters = handle_of(island).counters

    def see(batch: object) -> None:
        if counters.first_batch is None and not counters.inner_steps:
            counters.first_batch = f"batch-{digest_of(batch)}"

    return see


def digest_of(batch: object) -> str:
    """Return a digest of a batch's values, in any container."""
    return blake3_digest(b"".join(_parts(batch))).hex()[:16]


def _parts(value: object) -> Iterator[bytes]:
    match value:
        case torch.Tensor():
            plain = value.detach().cpu().contiguous()
            yield f"{plain.dtype}{tuple(plain.shape)}".encode()
            yield plain.reshape(-1).view(torch.uint8).numpy().tobytes()
        case np.ndarray():
            yield f"{value.dtype}{value.shape}".encode()
            yield value.tobytes()
        case Mapping():
            for key, item in value.items():
                yield repr(key).encode()
                yield from _parts(item)
        case list() | tuple():
            yield f"({len(value)}".encode()
            for item in value:
                yield from _parts(item)
        case str() | bytes() | int() | float() | None:
            yield repr(value).encode()
        case _:
            # The contents of other objects may differ between processes.
            yield type(value).__qualname__.encode()
