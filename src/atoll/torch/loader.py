"""A DataLoader over an island's rows that knows where it stands.

What is counted are rows that the loop has been given: workers fetch ahead of it, and
what they hold is fetched again by a later life.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler, Sampler

from atoll.errors import UsageError

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
