"""The data of a trainer: the rows of its island, and the tokens of its batches.

A trainer makes its loader before its island has joined, and counts its epochs by it. So
the loader stays, with as many batches as before, and reads other rows: an epoch goes
over the island's own rows as often as that takes, each time in another order.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import BatchSampler, IterableDataset

from atoll.errors import AtollWarning, UsageError
from atoll.island.deal import DealtRows
from atoll.torch import Island, shard
from atoll.torch.run_order import rows_of


class IslandRows:
    """A sampler of a rank's own rows, the same in every incarnation of its island."""

    def __init__(
        self, rows: torch.Tensor, *, length: int, seed: int, shuffles: bool
    ) -> None:
        self._rows, self._length = rows, length
        self._seed, self._shuffles = seed, shuffles
        self._epoch = self._skip = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def skip_once(self, rows: int) -> None:
        """Leave out the first rows of the coming epoch: they were trained before."""
        self._skip = rows

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        # One number of 64 bits: epochs of two islands never have the same seed.
        seed = (self._seed + 0x9E3779B97F4A7C15 * self._epoch) % 2**63
        generator = torch.Generator().manual_seed(seed)
        skip, self._skip = self._skip, 0
        for first in range(0, self._length, len(self._rows)):
            rows = self._rows
            if self._shuffles:
                rows = rows[torch.randperm(len(rows), generator=generator)]
            last = min(self._length - first, len(rows))
            yield from rows[max(0, skip - first) : last].tolist()


class RunRows:
    """A sampler of the rows that the run deals to a rank.

    The epochs of a trainer are as long as before, and mean nothing: the run's rows are
    over at any batch of any epoch.
    """

    def __init__(
        self, rows: DealtRows, *, length: int, batch: int, drops_last: bool
    ) -> None:
        self._rows, self._length, self._batch = rows, length, batch
        self._min_rows = batch if drops_last else 1

    @property
    def is_over(self) -> bool:
        """Whether the trainer has had its last batch."""
        return self._rows.is_over and self._rows.num_fetched < self._min_rows

    def note_batch(self) -> None:
        """Note that the trainer has got a batch, the next of those fetched."""
        self._rows.give(self._batch)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        self._rows.restart()
        remaining = self._length
        while remaining and len(rows := self._rows.take(min(self._batch, remaining))):
            remaining -= len(rows)
            yield from rows.tolist()


def deal_rows(
    loader: Any, island: Island, *, shuffles: bool, ranks: int = 1
) -> IslandRows:
    """Make a DataLoader read only this rank's own rows, and return the sampler.

    Args:
        loader: over a map-style dataset; it keeps its number of batches.
        island: the owner of the rows.
        shuffles: whether the new sampler shuffles, as the one it replaces does.
        ranks: the number of ranks among which the replaced sampler's rows were dealt.

    Raises:
        UsageError: more islands have joined than the run was cut for, or there are
            fewer rows than ranks.
    """
    batches = innermost(loader.batch_sampler)
    count = len(loader.dataset)
    rows = shard(torch.arange(count), island)
    if not len(rows):
        raise UsageError(
            f"The dataset has {count} rows, too few for a share of island "
            f"{island.name!r}. Give it more rows, or lower run.max_islands."
        )
    sampler = IslandRows(
        rows,
        length=len(batches.sampler) // ranks,
        seed=island.seed,
        shuffles=shuffles,
    )
    batches.sampler = sampler
    return sampler


def deal_run_rows(loader: Any, island: Island, *, ranks: int = 1) -> RunRows:
    """Make a DataLoader read the rows that the run deals out, and return the sampler.

    The arguments are those of `deal_rows`.

    Raises:
        UsageError: the run has another dataset.
    """
    batches = innermost(loader.batch_sampler)
    sampler = RunRows(
        rows_of(loader.dataset, island),
        length=len(batches.sampler) // ranks,
        batch=batches.batch_size,
        drops_last=batches.drop_last,
    )
    batches.sampler = sampler
    return sampler


def innermost(batch_sampler: Any) -> Any:
    """Return the sampler that batches rows, inside those that deal out batches."""
    while isinstance(inner := vars(batch_sampler).get("batch_sampler"), BatchSampler):
        batch_sampler = inner
    return batch_sampler


def can_be_dealt(loader: Any, sampler_types: tuple[type, ...]) -> bool:
    """Return whether a loader's rows come from a sampler of one of these types."""
    if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
        return False
    batches = innermost(loader.batch_sampler)
    return type(batches) is BatchSampler and type(batches.sampler) in sampler_types


def warn_of_same_rows(loader: Any, island: Island) -> None:
    """Warn that other islands may read the same rows, unless the run has one island."""
    run = island.settings.run
    if 1 in (run.max_islands, run.start_islands if run.max_islands is None else 0):
        return
    warnings.warn(
        f"The rows of {type(loader.dataset).__name__} are not dealt out among the "
        f"islands, because its loader has a custom order. Give island "
        f"{island.name!r} rows that no other island has, and shard=False.",
        AtollWarning,
        stacklevel=2,
    )


FIRST = ("input_ids", "inputs_embeds", "pixel_values", "input_features")
"""Keys of the tensor that holds a batch's tokens, in the order they are tried."""


def tokens_of(batch: Any) -> int:
    """Return the tokens of a batch: all elements of its first tensor of integers.

    Padding counts. A tensor of other numbers has one token per row, and one of
    embeddings one per vector. Reads shapes only, so no device is synchronised.
    """
    if isinstance(batch, torch.Tensor):
        return batch.shape[0] if batch.is_floating_point() else batch.numel()
    if isinstance(batch, Mapping):
        return _tokens_of_mapping(batch)
    if isinstance(batch, Sequence) and not isinstance(batch, str):
        return next((n for n in map(tokens_of, batch) if n), 0)
    return 0


def _tokens_of_mapping(batch: Mapping[Any, Any]) -> int:
    for name in FIRST:
        value = batch.get(name)
        if isinstance(value, torch.Tensor):
            is_embedded = name == "inputs_embeds"
            return value.shape[:-1].numel() if is_embedded else tokens_of(value)
    return next((n for n in map(tokens_of, batch.values()) if n), 0)
