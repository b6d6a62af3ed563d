"""What a training loop of JAX holds of its run.

Nothing is changed in place: the loop gives its parameters after every inner step, and
goes on with those that it gets back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import numpy as np

from atoll.errors import RunEnded, UsageError
from atoll.island import Host
from atoll.island.keeping import Keeping, OnSave
from atoll.island.seeds import island_seed
from atoll.island.signals import Interrupted, Termination
from atoll.jax.leaves import Tree
from atoll.jax.resuming import OptimizerPart
from atoll.jax.view import JaxView, by_name
from atoll.settings import RunSettings
from atoll.weights.layout import F32

P = TypeVar("P")


@dataclass(frozen=True)
class Evaluation(Generic[P]):
    """An anchor, for `evaluating`."""

    round: int
    """The lowest round over the fragments."""

    params: P
    """The loop's tree with the anchor in it, in the tree's own dtypes."""


class Island(Generic[P]):
    """One island of a run. Use it as a context manager around the training loop."""

    def __init__(
        self,
        host: Host,
        view: JaxView,
        optimizer: OptimizerPart,
        *,
        on_end: str,
        keeping: Keeping | None = None,
    ) -> None:
        self._host, self._view, self._optimizer = host, view, optimizer
        self._keeping, self._on_save = keeping, OnSave()
        self._has_saved_at_end, self._saves = False, host.position.saves
        self._on_end = on_end
        self._termination = Termination()
        self._is_evaluating = False
        self._has_begun = self._has_stepped = False

    @property
    def params(self) -> P:
        """The live weights: the run's at joining, then what an inner step returned.

        After the last round they are here, as `stepped` raises then.
        """
        self._has_begun = True
        tree: P = self._view.tree
        return tree

    @property
    def optimizer(self) -> Tree:
        """The optimizer's state as a checkpoint had it, or as it was given last."""
        return self._optimizer.tree

    @property
    def name(self) -> str:
        """This island's name in the run."""
        return self._host.joined.island

    @property
    def slot(self) -> int:
        """A small number that belongs to the name for the life of the run."""
        return self._host.joined.slot

    @property
    def place(self) -> tuple[int, int]:
        """Which of how many shares of the island's data this process trains on."""
        return (0, 1)

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
        """Inner steps of this island since it joined, or as its checkpoint counts."""
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
        """A seed of 63 bits that differs for each island, and not between starts.

        `jax.random.key` takes 32 of them, unless x64 is enabled.
        """
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
        """Say what the coming inner step trains on. Never waits for a device.

        Call it once per inner step, before `stepped`.
        """
        tally = self._host.tally
        tally.note_report(tokens, loss, metrics, count="batch.size, not an array")
        tally.tokens += tokens

    def metrics(self) -> dict[str, float]:
        """Return what this island counted, and what it reported last, for any logger.

        Reads a reported array's value, which may wait for a device.
        """
        tally = self._host.tally
        return {
            "atoll/round": self.round,
            "atoll/run_steps": self.run_steps,
            "atoll/run_tokens": self.run_tokens,
            **tally.metrics(),
            **{f"atoll/{name}": float(each) for name, each in tally.reported.items()},
        }

    def stepped(self, params: P, *, optimizer: Tree = None) -> P:
        """Count one inner step, whose parameters these are; return those to go on with.

        They are the same arrays, unless an outcome was due: then they are new ones.
        `optimizer` is the optimizer's state now, if a checkpoint is to have it.

        Raises:
            RunEnded: the run is over, and `on_end` is "raise"; `island.params` has the
                parameters.
            UsageError: the loop did not begin with `island.params`, or an array was
                donated.
        """
        self._require_local()
        self._take(params)
        self._optimizer.give(optimizer)
        self._host.stepped()
        if self._keeping is not None and not self._host.has_ended:
            self._keeping.stepped()
            self._keeping.finish()  # all that a loop changes, it has given by now
        self._save_if_asked()
        self._raise_if_ended()
        return self.params

    def sync_now(self, params: P) -> P:
        """Put all work into the open rounds now; return what to go on with.

        Others keep their schedule, so this may wait for them; it stands for the next
        send of each fragment.
        """
        self._require_local()
        self._take(params)
        self._host.sync_now()
        self._raise_if_ended()
        return self.params

    def leave(self) -> None:
        """Leave the run; work that has not counted goes with departing updates.

        That is work up to the parameters that the island was given last.
        """
        self._require_local()
        if self._keeping is not None and not self._host.has_left:
            self._keeping.leave()
        self._host.leave()
        self._close_keeping()

    def on_save(self, function: Callable[[], object]) -> None:
        """Have a function called whenever this island is asked to save.

        That is by an operator, and by SIGTERM before the island leaves: between two
        inner steps, in the thread that trains.
        """
        self._on_save.add(function)

    def anchor(self) -> dict[str, F32]:
        """Return the agreed weights by the run's names, on the host and in fp32."""
        weights: dict[str, F32] = {}
        for slot in self._host.slots:
            flat, _ = self._read_anchor(slot.index)
            weights |= by_name(slot.layout, flat)
        return weights

    @contextmanager
    def evaluating(self) -> Iterator[Evaluation[P]]:
        """Give the newest anchor as parameters; inside, nothing is trained.

        With overlap the anchor may be a round ahead of what local weights have taken.
        """
        self._require_local()
        read = [self._read_anchor(slot.index) for slot in self._host.slots]
        params: P = self._view.tree_of([flat for flat, _ in read])
        self._is_evaluating = True
        try:
            yield Evaluation(round=min(round for _, round in read), params=params)
        finally:
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
        # Work before an error may be what caused it: then only what was sealed counts.
        is_error = isinstance(error, Exception) and not isinstance(error, RunEnded)
        # An inner step that was interrupted may have taken the arrays with it.
        is_torn = error is not None and self._view.was_donated
        departs = not is_error and not is_torn
        try:
            if self._keeping is not None and departs and not self._host.has_left:
                self._keeping.leave()
            if self._returns:
                self._host.pause()
            else:
                self._host.leave(depart=departs)
            self._close_keeping(is_broken=is_error)
        finally:  # a SIGTERM during the farewell does not end it
            self._termination.__exit__(kind, error, trace)
        return isinstance(error, RunEnded | Interrupted)

    @property
    def _returns(self) -> bool:
        """Whether this life is interrupted, and its next goes on to the bit."""
        is_exact = self._keeping is not None and self._keeping.is_exact
        return is_exact and self._has_saved_at_end and not self._host.has_ended

    def _take(self, params: P) -> None:
        if not self._has_begun:
            raise UsageError(
                "The loop trains parameters that are not the run's. "
                "Begin it with params = island.params."
            )
        self._view.give(params)
        if not self._has_stepped:
            self._view.require_same()  # a mistake shows at once, and not at a sync
            self._has_stepped = True

    def _read_anchor(self, fragment: int) -> tuple[F32, int]:
        flat = np.empty(self._host.slots[fragment].layout.elements, np.float32)
        return flat, self._host.read_anchor(fragment, flat)

    def _save_if_asked(self) -> None:
        """Save when an operator says so, and once before the island is ended."""
        is_last = self._termination.is_asked and not self._has_saved_at_end
        saves = self._host.position.saves
        is_wanted = saves > self._saves
        self._saves = saves  # a coordinator that restarts begins anew
        if not is_last and not is_wanted:
            return
        self._has_saved_at_end |= is_last
        if self._keeping is not None:
            self._keeping.save_last()
            self._keeping.wait()
        self._on_save()

    def _close_keeping(self, *, is_broken: bool = False) -> None:
        if self._keeping is not None:
            keeping, self._keeping = self._keeping, None
            keeping.abandon() if is_broken else keeping.close()

    def _require_local(self) -> None:
        if self._is_evaluating:
            raise UsageError(
                "The anchor is being evaluated. "
                "Leave the evaluating() block before training, syncing or leaving."
            )

    def _raise_if_ended(self) -> None:
        if not self.should_stop or self._on_end != "raise":
            return
        if self._host.has_ended:
            raise RunEnded(f"The run has reached its last round, {self.round}.")
        raise RunEnded("SIGTERM came: this island leaves the run.")
