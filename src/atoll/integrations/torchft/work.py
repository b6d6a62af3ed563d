"""The reductions of one step: gathered into one vector, exchanged behind the scenes.

torchft reduces tensor by tensor; a run exchanges a fragment at once. The vector is full
with the last tensor of the fragment, and leaves then: what trains meanwhile overlaps.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta

import numpy as np
import torch

from atoll.errors import UsageError
from atoll.integrations.torchft.lane import Taken
from atoll.weights.layout import F32

Exchanged = Callable[[F32], Taken]


class Step:
    """What one step reduces, and what became of it."""

    def __init__(
        self, elements: int, exchange: Exchanged, *, name: str, timeout_s: float | None
    ) -> None:
        self._values = np.empty(elements, np.float32)
        self._exchange, self._name, self._timeout_s = exchange, name, timeout_s
        self._works: list[Work] = []
        self._filled = 0
        self._done = threading.Event()
        self.taken: Taken | None = None
        self.error: Exception | None = None

    @property
    def is_sent(self) -> bool:
        """Whether its last tensor has come, and with it the exchange has begun."""
        return self._filled == len(self._values)

    @torch.no_grad()
    def add(self, tensor: torch.Tensor) -> Work:
        """Take a tensor in; the last one sends them all.

        Raises:
            UsageError: the fragment does not have so many elements.
        """
        last = self._filled + tensor.numel()
        if last > len(self._values):
            raise UsageError(
                f"This step reduces {last} elements or more, and its fragment has "
                f"{len(self._values)}. Pass to `reduces` the modules that are reduced."
            )
        values = torch.from_numpy(self._values[self._filled : last])
        values.copy_(tensor.detach().reshape(-1))
        work = Work(self, tensor, self._filled)
        self._works.append(work)
        self._filled = last
        if self.is_sent:
            threading.Thread(target=self._run, name=self._name, daemon=True).start()
        return work

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return whether the exchange is over by then, well or not.

        Without a time of its own, it is that of the manager.

        Raises:
            UsageError: tensors are missing, so that it cannot begin.
        """
        if not self.is_sent:
            raise UsageError(
                f"This step has reduced {self._filled} of the {len(self._values)} "
                "elements of its fragment. Reduce every parameter of the module "
                "before waiting."
            )
        timeout_s = timeout.total_seconds() if timeout else self._timeout_s
        return self._done.wait(timeout_s)

    def end(self) -> None:
        """Return when nothing happens behind any more."""
        self._done.wait()

    @property
    def has_mean(self) -> bool:
        """Whether the tensors hold what was agreed."""
        return self.taken is not None and self.taken.mean is not None

    def _run(self) -> None:
        try:
            taken = self._exchange(self._values)
            if taken.mean is not None:
                for work in self._works:
                    work.fill(taken.mean)
            self.taken = taken
        except Exception as exc:  # told to the thread that trains, as torchft does
            self.error = exc
        for work in self._works:
            work.finish()
        # Only now: a callback of the last future may be at work until here.
        self._done.set()


class Work:
    """A handle on one tensor of a step, as torch.distributed has them."""

    def __init__(self, step: Step, tensor: torch.Tensor, first: int) -> None:
        self._step, self._tensor, self._first = step, tensor, first
        self._future: torch.futures.Future[torch.Tensor] = torch.futures.Future()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return whether the tensor holds the mean, and what was chained has run."""
        return self._step.wait(timeout) and self._step.has_mean

    def get_future(self) -> torch.futures.Future[torch.Tensor]:
        """Return a future of the tensor; without an outcome it is as it was."""
        return self._future

    def is_completed(self) -> bool:
        return self._future.done()

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self, timeout: timedelta | None = None) -> None:
        self.wait(timeout)

    @torch.no_grad()
    def fill(self, mean: F32) -> None:
        """Put this tensor's part of the mean where it came from."""
        part = torch.from_numpy(mean[self._first : self._first + self._tensor.numel()])
        self._tensor.copy_(part.view(self._tensor.shape))

    def finish(self) -> None:
        self._future.set_result(self._tensor)


class Skipped:
    """The handle of a reduction that an error has made pointless."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        self._future.set_result(tensor)

    def wait(self, timeout: timedelta | None = None) -> bool:
        return False

    def get_future(self) -> torch.futures.Future[torch.Tensor]:
        return self._future

    def is_completed(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Return at once: there is nothing to wait for."""

    def block_current_stream(self, timeout: timedelta | None = None) -> None:
        """Return at once: there is nothing to wait for."""
