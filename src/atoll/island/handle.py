"""The island of a training loop, for any framework.

`TrainedIsland` is the part that the front ends share: the values of the run, reports,
checkpoints, requests to save, SIGTERM and leaving.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from atoll.data import DataSpec
from atoll.errors import RunEnded, UsageError
from atoll.island.base import IslandHandle
from atoll.island.checkpoints import IslandCheckpoints, OnSave
from atoll.island.deal import DealtRows
from atoll.island.identity import island_seed
from atoll.island.signals import Interrupted, Termination
from atoll.settings import RunSettings


class TrainedIsland(ABC):
    """One island of a run. Use it as a context manager around the training loop."""

    _token_count: str
    """The expression that counts a batch's tokens, for an error's remedy."""

    _anchor_is_shown: str
    """The state of the loop in `evaluating`, for an error."""

    _may_sync = True
    """Whether outcomes may be adopted outside of calls that return weights."""

    def __init__(
        self,
        handle: IslandHandle,
        *,
        on_end: str,
        checkpointing: IslandCheckpoints | None,
    ) -> None:
        self._handle, self._checkpointing, self._on_save = (
            handle,
            checkpointing,
            OnSave(),
        )
        self._has_saved_at_end, self._saves = False, handle.saves
        self._on_end = on_end
        self._termination = Termination()
        handle.end_when(lambda: self._termination.is_asked)
        self._is_asked_to_save = False
        self._evaluated_round: int | None = None

    @property
    def name(self) -> str:
        """This island's name in the run."""
        return self._handle.membership.island

    @property
    def slot(self) -> int:
        """A small number that belongs to the name for the duration of the run."""
        return self._handle.membership.slot

    @property
    def place(self) -> tuple[int, int]:
        """The index of this process's share of the island's data, and their number.

        (0, 1) in an island of one process. Ranks that train on the same data, as those
        of tensor parallel or of a pipeline do, have the same place.
        """
        return self._handle.membership.data_share

    @property
    def settings(self) -> RunSettings:
        """The run's settings, which all islands share."""
        return self._handle.membership.settings

    @property
    def round(self) -> int:
        """The last round that every fragment has committed, as far as known here."""
        return self._handle.status.round

    @property
    def inner_steps(self) -> int:
        """Inner steps of this island since it joined, or as its checkpoint counts."""
        return self._handle.counters.inner_steps

    @property
    def run_steps(self) -> int:
        """The run's schedule step, which a late island takes over when it joins."""
        return self._handle.status.run_steps

    @property
    def run_tokens(self) -> int:
        """Tokens of all islands that have reached the anchor."""
        return self._handle.status.run_tokens

    @property
    def seed(self) -> int:
        """A seed of 63 bits that differs between islands, the same in every start.

        `jax.random.key` takes 32 of them, unless x64 is enabled.
        """
        return island_seed(self._handle.membership.run, self.name)

    @property
    def digest(self) -> str:
        """A digest over the anchor and velocity, the same on every island."""
        return self._handle.status.digest

    @property
    def ended(self) -> bool:
        """Whether the run is over."""
        return self._handle.status.has_ended

    @property
    def should_stop(self) -> bool:
        """Whether the loop should end; with `on_end="flag"` this is the only signal.

        True when the run is over, and after a SIGTERM inside the `with` block.
        """
        return self._handle.status.has_ended or self._handle.must_stop

    def deal(self, data: DataSpec) -> DealtRows:
        """Describe the training data to the run, and return the rows that it deals.

        `atoll.torch.shard` and `atoll.data.batches` call it for a run with
        `data.order = "run"`. All ranks of an island call it together.

        Raises:
            UsageError: the run deals out no rows, has another dataset, or this island
                had.
        """
        return self._handle.open_data(data, may_sync=self._may_sync)

    def report(self, *, tokens: int = 0, loss: Any = None, **metrics: Any) -> None:
        """Report tokens and metrics of the coming inner step, without a device sync.

        Call it once per inner step, before the step is counted. Each rank of an island
        reports its own: tokens of ranks with different data are added up, and metrics
        are the leader's. Inside `evaluating()` the metrics are those of the anchor, and
        the loss is its `eval_loss`: nothing is counted.
        """
        plain = {name: self._detached(value) for name, value in metrics.items()}
        if self._evaluated_round is not None:
            loss = self._detached(loss)
            self._handle.counters.note_anchor(self._evaluated_round, loss, plain)
            return
        self._handle.counters.note_report(
            tokens, self._detached(loss), plain, count=self._token_count
        )
        self._finish_saving()
        self._handle.count_tokens(tokens)

    def metrics(self) -> dict[str, float]:
        """Return this island's counters and the values of its last report.

        Reads a reported value, which may wait for a device.
        """
        reported = self._handle.counters.reported
        return {
            "atoll/round": self.round,
            "atoll/run_steps": self.run_steps,
            "atoll/run_tokens": self.run_tokens,
            **self._handle.status.metrics,
            **{f"atoll/{name}": float(value) for name, value in reported.items()},
        }

    def leave(self) -> None:
        """Leave the run; work that has not counted goes with departing updates.

        That is the work up to the last inner step that was counted.
        """
        self._require_local()
        self._detach()
        if self._checkpointing is not None and not self._handle.has_left:
            self._checkpointing.leave()
        self._handle.leave(depart=True, is_alone=False)
        self._close_keeping()

    def on_save(self, function: Callable[[], object]) -> None:
        """Register a function that is called whenever this island is to save.

        That is on an operator's request, and after SIGTERM before the island leaves:
        between two inner steps, in the training thread.
        """
        self._on_save.add(function)

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
        self._detach()
        # Work before an error may have caused it: then only sealed updates count.
        is_error = isinstance(error, Exception) and not isinstance(error, RunEnded)
        departs = not is_error and not (error is not None and self._is_torn())
        is_alone = error is not None and not isinstance(error, RunEnded)
        try:
            if (
                self._checkpointing is not None
                and departs
                and not self._handle.has_left
            ):
                self._checkpointing.leave()
            if self._returns:
                self._handle.pause()
            else:
                self._handle.leave(depart=departs, is_alone=is_alone)
            self._close_keeping(is_broken=is_error)
        finally:  # a SIGTERM while leaving does not interrupt it
            self._termination.__exit__(kind, error, trace)
        return isinstance(error, RunEnded | Interrupted)

    def _detached(self, value: Any) -> Any:
        """Return a reported value without all that would stay in memory with it."""
        return value

    def _detach(self) -> None:  # noqa: B027 # only hooks have to be removed
        """Stop counting the loop's inner steps."""

    def _is_torn(self) -> bool:
        """Return whether an interrupted inner step has left no weights to read."""
        return False

    @property
    def _waits_for_loop(self) -> bool:
        """Whether the loop has not finished its own work after the inner step."""
        return self._checkpointing is not None and self._checkpointing.is_unfinished

    @property
    def _returns(self) -> bool:
        """Whether this incarnation is interrupted, and the next resumes exactly."""
        is_exact = self._checkpointing is not None and self._checkpointing.is_exact
        return is_exact and self._has_saved_at_end and not self.ended

    def _count_step(self) -> None:
        """Count an inner step, save if that is due, and end the loop if it is over."""
        self._handle.stepped()
        if self._handle.must_stop:
            self._termination.heed()  # from here on saving may take long
        if self._checkpointing is not None and not self.ended:
            self._checkpointing.stepped()
        self._save_if_asked()
        if not (self._has_saved_at_end and self._waits_for_loop):
            self._raise_if_ended()

    def _save_if_asked(self) -> None:
        """Save on an operator's request, and once before the island ends."""
        is_last = self._handle.must_stop and not self._has_saved_at_end
        saves = self._handle.saves
        is_wanted = saves > self._saves
        self._saves = saves  # a restarted coordinator counts from 0
        if not is_last and not is_wanted:
            return
        self._has_saved_at_end |= is_last
        if self._checkpointing is not None:
            self._checkpointing.save_last()
        if not self._waits_for_loop:
            self._tell_savers()
        else:
            self._is_asked_to_save = True

    def _finish_saving(self) -> None:
        """Finish a checkpoint, and end the loop if it was the last one."""
        if self._checkpointing is None or not self._checkpointing.is_unfinished:
            return
        self._checkpointing.finish()
        if self._is_asked_to_save:
            self._is_asked_to_save = False
            self._tell_savers()
            self._raise_if_ended()

    def _tell_savers(self) -> None:
        if self._checkpointing is not None:
            self._checkpointing.wait()
        self._on_save()

    def _close_keeping(self, *, is_broken: bool = False) -> None:
        if self._checkpointing is not None:
            checkpointing, self._checkpointing = self._checkpointing, None
            checkpointing.abandon() if is_broken else checkpointing.close()

    def _require_local(self) -> None:
        if self._evaluated_round is not None:
            raise UsageError(
                f"{self._anchor_is_shown} "
                "Leave the evaluating() block before training, syncing or leaving."
            )

    def _raise_if_ended(self) -> None:
        if not self.should_stop or self._on_end != "raise":
            return
        if self.ended:
            raise RunEnded(f"The run has reached its last round, {self.round}.")
        raise RunEnded("SIGTERM came: this island leaves the run.")
