"""Row numbers for loops that index their data themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np

from atoll.data.ledger import DataSpec
from atoll.data.order import I64
from atoll.errors import UsageError


class RowSource(Protocol):
    """The rows that a run deals to an island, as its loop takes them."""

    def restart(self) -> None:
        """Take the rows again that the loop has not been given."""
        ...

    def take(self, count: int) -> I64:
        """Return at least one row number and at most `count`; none at the end."""
        ...

    def give(self, count: int) -> None:
        """Note that the loop has got the next `count` rows that were taken."""
        ...


class DealtIsland(Protocol):
    """An island of `atoll.torch.join` or `atoll.jax.join`."""

    def deal(self, data: DataSpec) -> RowSource: ...


def batches(
    island: DealtIsland,
    *,
    rows: int,
    batch: int,
    drop_last: bool = False,
    fingerprint: str = "",
) -> Iterator[I64]:
    """Yield the row numbers of one batch after the other, until the run has none left.

    The run needs `data.order = "run"`. The rows of a batch are those of the next inner
    step; a loop that is given several batches before a step trains on all of them.

        for rows in atoll.data.batches(island, rows=len(x), batch=64):
            params, loss = step(params, x[rows], y[rows])
            params = island.stepped(params)

    Args:
        island: as `join` returned it.
        rows: the number of rows of the data, the same on all islands.
        batch: rows of a batch. The last one may have fewer.
        drop_last: whether to leave the rows of an incomplete batch to the others.
        fingerprint: a text that differs between datasets of equal length, if known.

    Raises:
        UsageError: the run deals out no rows, or has another dataset.
    """
    if batch < 1:
        raise UsageError(f"batch={batch} must be at least 1.")
    source = island.deal(DataSpec(rows=rows, fingerprint=fingerprint))
    source.restart()
    return _batches(source, batch, drop_last=drop_last)


def _batches(source: RowSource, batch: int, *, drop_last: bool) -> Iterator[I64]:
    while len(numbers := _take_batch(source, batch)):
        if len(numbers) < batch and drop_last:
            return
        source.give(len(numbers))
        yield numbers


def _take_batch(source: RowSource, batch: int) -> I64:
    """Return the rows of a batch, fewer only at the end."""
    parts, missing = [np.empty(0, np.int64)], batch
    while missing and len(part := source.take(missing)):
        parts.append(part)
        missing -= len(part)
    return np.concatenate(parts)
