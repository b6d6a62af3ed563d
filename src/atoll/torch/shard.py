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

from atoll.errors import UsageError
from atoll.torch.island import Island, life_of, take_in_data
from atoll.wire import blake3_digest


def shard(data: Any, island: Island) -> Any:
    """Return the part of `data` that belongs to this island.

    Island `slot` of K takes rows slot, slot + K, slot + 2K, ..., where K is the run's
    `max_islands`, or `start_islands` if that is not set: no two islands share a row.
    The ranks of an island that train on data of their own deal these rows out among
    them, the same number to each; ranks that train on the same data get the same.

    Loaders and streams have `state_dict` and `load_state_dict`. The first of them is
    saved with the island, unless `Policy(extra={"data": ...})` is. Of what they give
    first, status says if another island has it too.

    Args:
        data: a tensor or list (its rows), a map-style dataset or one of Hugging Face
            (its rows), a DataLoader over one (its rows; shuffled by the island's own
            seed if it shuffled), or any other iterable (its items, which must come in
            the same order on every island).

    Raises:
        UsageError: more islands have joined than the run was cut for, or the data
            cannot be cut as it is, and what to shard instead.
    """
    cut = _cut(island)
    _require_ours(data)
    if isinstance(data, DataLoader):
        return _shard_loader(data, cut, island)
    if isinstance(data, torch.Tensor | list | tuple):
        rows = cut.rows(len(data))
        return data[rows.start : rows.stop : rows.step]
    datasets = sys.modules.get("datasets")  # who has not loaded it has none of its own
    if datasets is not None and isinstance(data, datasets.Dataset):
        return data.select(cut.rows(len(data)))
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        return _rows(data, cut)
    return _kept(Dealt(data, cut, see_first(island)), island)


def _kept(data: Any, island: Island) -> Any:
    take_in_data(island, data)
    return data


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


class Dealt(IterableDataset[Any]):
    """A rank's items of an iterable, each time it is asked.

    A loader takes it for a dataset: in its workers a stream that divides itself among
    them is dealt as each worker has it, and any other iterable is divided here.
    """

    def __init__(self, items: Iterable[Any], cut: Cut, seen: Seen) -> None:
        self._items, self._cut, self._seen = items, cut, seen
        self._given, self._is_resumed = 0, False

    def __iter__(self) -> Iterator[Any]:
        skipped = self._given if self._is_resumed else 0
        self._given, self._is_resumed = skipped, False
        for item in islice(self._dealt(), skipped, None):
            self._given += 1
            self._seen(item)
            yield item

    def state_dict(self) -> dict[str, int]:
        """Return how many items of this pass were given."""
        return {"items": self._given}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Let the next pass begin after those; they are read, and given to nobody."""
        self._given, self._is_resumed = state["items"], True

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_seen": _nobody}  # a worker has no island

    def _dealt(self) -> Iterator[Any]:
        cut = self._cut
        mine = islice(self._items, cut.part, None, cut.parts)
        # An item counts only if there is one for every rank: none may have more steps.
        own = iter(lambda: list(islice(mine, cut.ranks)), [])
        whole = (dealt[cut.rank] for dealt in own if len(dealt) == cut.ranks)
        worker = get_worker_info()
        if worker is None or isinstance(self._items, IterableDataset):
            return whole
        return islice(whole, worker.id, None, worker.num_workers)


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


def _shard_loader(loader: DataLoader[Any], cut: Cut, island: Island) -> Any:
    if isinstance(loader.dataset, IterableDataset):
        return _kept(Dealt(loader, cut, see_first(island)), island)
    if (sampler := _own_sampler(loader)) is not None:
        raise UsageError(
            f"The DataLoader has a sampler of its own ({type(sampler).__name__}), "
            "which a part of its rows would contradict. Shard the dataset instead: "
            "DataLoader(atoll.torch.shard(dataset, island), ...)."
        )
    rows, seen = _rows(loader.dataset, cut), see_first(island)
    return _kept(IslandLoader(rows, loader, seed=island.seed, seen=seen), island)


def _require_ours(data: object) -> None:
    """Raise UsageError for what has a better way of its own."""
    if type(data).__module__.partition(".")[0] == "torchdata":
        name = type(data).__name__
        raise UsageError(
            f"{name} keeps a state of its own, which a part of its rows would not fit. "
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


def _nobody(batch: object) -> None:
    """Nobody looks."""


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


Seen = Callable[[object], None]


class Order(Sampler[int]):
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

    Trainers ask for a DataLoader, so it is one. A pass that was begun in an earlier
    life goes on where its state says; every other pass begins anew.
    """

    def __init__(
        self, rows: Dataset[Any], like: DataLoader[Any], *, seed: int, seen: Seen
    ) -> None:
        self._seen = seen
        self._epoch, self._given = 0, 0
        self._is_resumed = self._has_begun = False
        self._count: int = len(rows)  # type: ignore[arg-type]
        is_shuffled = isinstance(like.sampler, RandomSampler)
        self._order = Order(self._count, seed, is_shuffled=is_shuffled)
        super().__init__(
            rows,
            batch_size=like.batch_size,
            sampler=self._order,
            generator=torch.Generator().manual_seed(seed),
            num_workers=like.num_workers,
            collate_fn=like.collate_fn,
            pin_memory=like.pin_memory,
            drop_last=like.drop_last,
            timeout=like.timeout,
            worker_init_fn=like.worker_init_fn,
            multiprocessing_context=like.multiprocessing_context,
            prefetch_factor=like.prefetch_factor,
            persistent_workers=like.persistent_workers,
        )

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if not self._is_resumed:
            self._epoch, self._given = self._epoch + self._has_begun, 0
        self._is_resumed, self._has_begun = False, True
        self._order.epoch, self._order.first = self._epoch, self._given
        for batch in super().__iter__():
            self._given = min(self._count, self._given + (self.batch_size or 1))
            self._seen(batch)
            yield batch

    def state_dict(self) -> dict[str, int]:
        """Return the number of this pass, and how many of its rows were given."""
        return {"epoch": self._epoch, "rows": self._given, "of": self._count}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Let the next pass be the rest of the one that a state was taken in.

        Raises:
            UsageError: this island has another number of rows.
        """
        if state["of"] != self._count:
            raise UsageError(
                f"The data had {state['of']} rows for this island, and has "
                f"{self._count}. Give the data that was saved, or leave 'data' out of "
                "the components."
            )
        self._epoch, self._given = state["epoch"], state["rows"]
        self._is_resumed = True


def see_first(island: Island) -> Callable[[object], None]:
    """Return what takes note of the first batch it is shown, and of no other."""
    tally = life_of(island).tally

    def see(batch: object) -> None:
        if tally.first_batch is None and not tally.inner_steps:
            tally.first_batch = f"batch-{digest_of(batch)}"

    return see


def digest_of(batch: object) -> str:
    """Return a digest of a batch's values, whatever holds them."""
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
            for key, each in value.items():
                yield repr(key).encode()
                yield from _parts(each)
        case list() | tuple():
            yield f"({len(value)}".encode()
            for each in value:
                yield from _parts(each)
        case str() | bytes() | int() | float() | None:
            yield repr(value).encode()
        case _:
            # An object of the loop's own says nothing that is the same elsewhere.
            yield type(value).__qualname__.encode()
