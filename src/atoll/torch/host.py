"""The port between a training loop's island and its host, and the one of one process.

`checkpoints_of` makes the checkpoints of a loop: of its model and its optimizers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from atoll.island import Host, IslandCounters
from atoll.island.checkpoints import CheckpointLike, IslandCheckpoints, as_policy
from atoll.island.join import is_alone
from atoll.island.progress import RunClock
from atoll.settings import RunSettings
from atoll.torch.model import TorchView
from atoll.weights import FragmentLayout
from atoll.weights.layout import F32


class IslandHandle(Protocol):
    """One incarnation of an island, in one of its processes. `Island` calls it.

    All ranks of the island make the same calls, after the same inner steps.
    """

    is_end_requested: Callable[[], bool]
    """Whether this process has a request to end."""

    @property
    def name(self) -> str: ...

    @property
    def slot(self) -> int: ...

    @property
    def run(self) -> str:
        """The run's name."""
        ...

    @property
    def settings(self) -> RunSettings: ...

    @property
    def tally(self) -> IslandCounters: ...

    @property
    def data_share(self) -> tuple[int, int]:
        """Index of this process's share of the island's data, and their number."""
        ...

    @property
    def round(self) -> int: ...

    @property
    def last_common_round(self) -> int:
        """The round at the last collective call, the same on all ranks."""
        ...

    @property
    def run_steps(self) -> int: ...

    @property
    def run_tokens(self) -> int: ...

    @property
    def clock(self) -> RunClock:
        """The run's clock at the last synchronisation, the same on all ranks."""
        ...

    @property
    def trained(self) -> tuple[int, int]:
        """Inner steps of the island, and their tokens: the same on all ranks."""
        ...

    @property
    def saves(self) -> int:
        """Number of an operator's requests to save, the same on all ranks."""
        ...

    @property
    def digest(self) -> str: ...

    @property
    def has_ended(self) -> bool: ...

    @property
    def has_left(self) -> bool: ...

    @property
    def must_stop(self) -> bool:
        """Whether all ranks of the island are to end their loops here."""
        ...

    @property
    def host(self) -> Host:
        """The island's host, where checkpoints find it."""
        ...

    def count_tokens(self, tokens: int) -> None: ...

    def metrics(self) -> Mapping[str, float]:
        """Return the island's counters."""
        ...

    def stepped(self) -> None: ...

    def sync_now(self) -> None: ...

    def leave(self, *, depart: bool, is_alone: bool) -> None:
        """Leave the run; `is_alone` if the other ranks may not call this."""
        ...

    def pause(self) -> None:
        """End this incarnation; the next one resumes exactly."""
        ...

    def anchor(self) -> dict[str, torch.Tensor]: ...

    def keep_local(self) -> Any:
        """Return a copy of the local weights, for `restore_local`."""
        ...

    def load_anchor(self) -> int:
        """Put the anchor into the model, and return its lowest round."""
        ...

    def restore_local(self, vectors: Any) -> None: ...


class SingleProcessHandle:
    """An island of one process. Implements `IslandHandle`."""

    def __init__(self, host: Host, view: TorchView) -> None:
        self._host, self._view = host, view
        self.host, self.pause = host, host.pause
        self.is_end_requested: Callable[[], bool] = lambda: False
        self.stepped = host.stepped
        self.sync_now = host.sync_now
        self.settings, self.tally = host.settings, host.tally
        self.name, self.slot = host.joined.island, host.joined.slot
        self.run, self.data_share = host.joined.run, (0, 1)

    @property
    def round(self) -> int:
        return self._host.round

    @property
    def last_common_round(self) -> int:
        return self._host.round

    @property
    def run_steps(self) -> int:
        return self._host.run_steps

    @property
    def run_tokens(self) -> int:
        return self._host.position.tokens

    @property
    def clock(self) -> RunClock:
        return self._host.clock

    @property
    def trained(self) -> tuple[int, int]:
        return self.tally.inner_steps, self.tally.tokens

    @property
    def saves(self) -> int:
        return self._host.position.saves

    @property
    def digest(self) -> str:
        return self._host.digest

    @property
    def has_ended(self) -> bool:
        return self._host.has_ended

    @property
    def has_left(self) -> bool:
        return self._host.has_left

    @property
    def must_stop(self) -> bool:
        return self.is_end_requested()

    def count_tokens(self, tokens: int) -> None:
        self.tally.tokens += tokens

    def metrics(self) -> Mapping[str, float]:
        return self.tally.metrics()

    def leave(self, *, depart: bool, is_alone: bool) -> None:
        self._host.leave(depart=depart)

    def anchor(self) -> dict[str, torch.Tensor]:
        weights: dict[str, torch.Tensor] = {}
        for slot in self._host.slots:
            flat = np.empty(slot.layout.elements, np.float32)
            self._host.read_anchor(slot.index, flat)
            weights |= by_name(slot.layout, flat)
        return weights

    def keep_local(self) -> list[F32]:
        return [self._read(index) for index in range(len(self._host.slots))]

    def load_anchor(self) -> int:
        return min(map(self._load_anchor, range(len(self._host.slots))))

    def restore_local(self, vectors: list[F32]) -> None:
        for index, values in enumerate(vectors):
            self._view.write(index, values)

    def _read(self, fragment: int) -> F32:
        values = np.empty(self._host.slots[fragment].layout.elements, np.float32)
        self._view.read(fragment, values)
        return values

    def _load_anchor(self, fragment: int) -> int:
        values = np.empty(self._host.slots[fragment].layout.elements, np.float32)
        round = self._host.read_anchor(fragment, values)
        self._view.write(fragment, values)
        return round


def by_name(layout: FragmentLayout, flat: F32) -> dict[str, torch.Tensor]:
    """Return the tensors of a fragment's flat vector, which they share."""
    parts = torch.from_numpy(flat).split_with_sizes(list(layout.sizes))
    return {
        tensor.name: part.view(tensor.shape)
        for tensor, part in zip(layout.tensors, parts, strict=True)
    }


Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


def checkpoints_of(
    checkpoint: CheckpointLike | None,
    model: torch.nn.Module,
    optimizer: Optimizers,
    run: object,
) -> IslandCheckpoints | None:
    """Restore the newest checkpoint, and return its saver; None without `checkpoint=`.

    Raises:
        UsageError: it is neither a policy nor a directory, or its objects do not fit.
        CorruptError: there are checkpoints, and none is valid.
    """
    if checkpoint is None:
        return None
    several = list(optimizer) if isinstance(optimizer, Sequence) else optimizer
    objects = {"model": model, "optimizer": several}
    return IslandCheckpoints(as_policy(checkpoint), objects, is_alone=is_alone(run))
