"""What a training loop holds of its run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch.utils.hooks import RemovableHandle

from atoll.errors import RunEnded, UsageError
from atoll.island import Host
from atoll.island.seeds import island_seed
from atoll.island.signals import Interrupted, Termination
from atoll.settings import RunSettings
from atoll.torch.model import TorchView


@dataclass(frozen=True)
class Evaluation:
    """Which anchor is in the model while `evaluating`."""

    round: int
    """The lowest round over the fragments."""


class Island:
    """One island of a run. Use it as a context manager around the training loop."""

    def __init__(
        self,
        host: Host,
        view: TorchView,
        model: torch.nn.Module,
        counted: torch.optim.Optimizer | None,
        *,
        on_end: str,
    ) -> None:
        self._host, self._view, self._model = host, view, model
        self._on_end = on_end
        self._termination = Termination()
        self._is_evaluating = False
        self._hook: RemovableHandle | None = None
        if counted is not None:
            # Under torch.compile(optimizer.step) the hook would be traced as well.
            opaque = torch.compiler.disable(self._after_step)  # type: ignore[no-untyped-call]
            self._hook = counted.register_step_post_hook(opaque)

    @property
    def name(self) -> str:
        """This island's name in the run."""
        return self._host.joined.island

    @property
    def slot(self) -> int:
        """A small number that belongs to the name for the life of the run."""
        return self._host.joined.slot

    @property
    def settings(self) -> RunSettings:
        """The run's settings: an island has none of its own."""
        return self._host.settings

    @property
    def round(self) -> int:
        """The last round that every fragment has committed, as this island knows it."""
        return self._host.round

    @property
    def inner_steps(self) -> int:
        """Inner steps that this island has made since it joined."""
        return self._host.tally.inner_steps

    @property
    def run_steps(self) -> int:
        """The run's schedule step, which a late island takes over when it joins."""
        return self._host.run_steps

    @property
    def run_tokens(self) -> int:
        """Tokens of all islands that have reached the anchor."""
        return self._host.position.tokens

    @property
    def seed(self) -> int:
        """A seed that differs for each island, and not from one start to the next."""
        return island_seed(self._host.joined.run, self.name)

    @property
    def digest(self) -> str:
        """A digest over the anchor and velocity, the same on every island."""
        return self._host.digest

    @property
    def ended(self) -> bool:
        """Whether the run is over."""
        return self._host.has_ended

    @property
    def should_stop(self) -> bool:
        """Whether the loop should end; with `on_end="flag"` nothing else says so.

        It should when the run is over, and when SIGTERM came inside the `with` block.
        """
        return self._host.has_ended or self._termination.is_asked

    def report(self, *, tokens: int = 0, loss: Any = None, **metrics: Any) -> None:
        """Say what the coming inner step trains on. Never synchronises a device.

        Call it once per inner step, before `optimizer.step()`.
        """
        if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 0:
            raise UsageError(
                f"tokens={tokens!r} must be a whole number of at least 0. "
                "Use batch.numel(), not a tensor."
            )
        tally = self._host.tally
        tally.tokens += tokens
        reported = metrics if loss is None else {"loss": loss, **metrics}
        tally.reported = {name: _detached(value) for name, value in reported.items()}

    def metrics(self) -> dict[str, float]:
        """Return what this island counted, and what it reported last, for any logger.

        Reads a reported tensor's value, which may wait for a device.
        """
        reported = {
            f"atoll/{name}": float(value)
            for name, value in self._host.tally.reported.items()
        }
        return {
            "atoll/round": self.round,
            "atoll/run_steps": self.run_steps,
            "atoll/run_tokens": self.run_tokens,
            **self._host.tally.metrics(),
            **reported,
        }

    def stepped(self) -> None:
        """Count one inner step by hand: for `count="manual"`.

        Raises:
            RunEnded: the run is over, and `on_end` is "raise".
        """
        if self._hook is not None:
            raise UsageError(
                "Inner steps are counted by the optimizer's hook. "
                'Join with count="manual" to count them yourself.'
            )
        self._stepped()

    def sync_now(self) -> None:
        """Put all work into the open rounds now, and return when it is adopted.

        Others keep their schedule, so this may wait for them; it stands for the next
        send of each fragment.
        """
        self._require_local()
        self._host.sync_now()
        self._raise_if_ended()

    def leave(self) -> None:
        """Leave the run; work that has not counted goes with departing updates."""
        self._require_local()
        self._remove_hook()
        self._host.leave()

    def anchor(self) -> dict[str, torch.Tensor]:
        """Return the agreed weights by name, on the CPU and in fp32."""
        weights: dict[str, torch.Tensor] = {}
        for slot in self._host.slots:
            flat = np.empty(slot.layout.elements, np.float32)
            self._host.read_anchor(slot.index, flat)
            parts = torch.from_numpy(flat).split_with_sizes(list(slot.layout.sizes))
            for tensor, part in zip(slot.layout.tensors, parts, strict=True):
                weights[tensor.name] = part.view(tensor.shape)
        return weights

    @contextmanager
    def evaluating(self) -> Iterator[Evaluation]:
        """Put the newest anchor into the model, and restore everything on exit.

        With overlap the anchor may be a round ahead of what local weights have taken.
        """
        self._require_local()
        self._is_evaluating = True
        modes = [(module, module.training) for module in self._model.modules()]
        buffers = [(buffer, buffer.clone()) for buffer in self._model.buffers()]
        local = [self._read(slot.index) for slot in self._host.slots]
        try:
            yield Evaluation(round=min(map(self._load_anchor, range(len(local)))))
        finally:
            for buffer, saved in buffers:
                buffer.copy_(saved)
            for index, values in enumerate(local):
                self._view.write(index, values)
            for module, is_training in modes:
                module.training = is_training
            self._is_evaluating = False

    def __enter__(self) -> Self:
        self._termination.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        self._termination.heed()
        self._remove_hook()
        # Work before an error may be what caused it: then only what was sealed counts.
        departs = error is None or not isinstance(error, Exception)
        try:
            self._host.leave(depart=departs or isinstance(error, RunEnded))
        finally:  # a SIGTERM during the farewell does not end it
            self._termination.__exit__(kind, error, trace)
        return isinstance(error, RunEnded | Interrupted)

    def _after_step(
        self, optimizer: torch.optim.Optimizer, args: object, kwargs: object
    ) -> None:
        if not _was_skipped(optimizer):
            self._stepped()

    def _require_local(self) -> None:
        if self._is_evaluating:
            raise UsageError(
                "The model holds the anchor while it is evaluated. "
                "Leave the evaluating() block before training, syncing or leaving."
            )

    def _stepped(self) -> None:
        self._require_local()
        self._host.stepped()
        self._raise_if_ended()

    def _raise_if_ended(self) -> None:
        if not self.should_stop or self._on_end != "raise":
            return
        if self._host.has_ended:
            raise RunEnded(f"The run has reached its last round, {self.round}.")
        raise RunEnded("SIGTERM came: this island leaves the run.")

    def _remove_hook(self) -> None:
        if self._hook is not None:
            self._hook.remove()

    def _read(self, fragment: int) -> np.ndarray:
        values = np.empty(self._host.slots[fragment].layout.elements, np.float32)
        self._view.read(fragment, values)
        return values

    def _load_anchor(self, fragment: int) -> int:
        values = np.empty(self._host.slots[fragment].layout.elements, np.float32)
        round = self._host.read_anchor(fragment, values)
        self._view.write(fragment, values)
        return round


def _detached(value: Any) -> Any:
    """Return the value without the graph that made it, which would stay in memory."""
    return value.detach() if isinstance(value, torch.Tensor) else value


def _was_skipped(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a gradient scaler made this step do nothing.

    A scaler leaves out the call of `step` itself, unless the optimizer is fused: then
    it hands over `found_inf`, and the step's own kernel does nothing.
    """
    found_inf = vars(optimizer).get("found_inf")
    return found_inf is not None and bool(found_inf.item())
