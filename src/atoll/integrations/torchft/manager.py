"""The surface of `torchft.Manager`, over any exchange.

Differences that matter: a round that an island misses costs the others nothing, an
island that takes over a state does not count its donor's work a second time, and how
many islands a round needs is the run's own setting, not an argument.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

import torch
from torch.distributed import ReduceOp

from atoll.errors import OutcomeLost, RunEnded, Unreachable, UsageError
from atoll.exchange import Exchange
from atoll.integrations.torchft.demands import require_codec
from atoll.integrations.torchft.holder import Holder
from atoll.integrations.torchft.lane import Taken
from atoll.integrations.torchft.registered import Registered
from atoll.integrations.torchft.work import Skipped, Step, Work
from atoll.weights.layout import F32
from atoll.wire import as_reason


class Manager:
    """What torchft's `DiLoCo` and `LocalSGD` call a manager: one island of a run.

    A context manager too: leaving the block leaves the run, and the end of the run
    ends the block.

    Args:
        run: a coordinator's address, an object store's URL or a path, an exchange such
            as a `MemoryRun`, or None to read ATOLL_RUN.
        reduces: the modules that are reduced one after the other, as `DiLoCo` gets
            them; `[model]` for `LocalSGD`.
        load_state_dict, state_dict: what to give to an island that comes late, besides
            what torchft registers itself: weights and the inner optimizer.
        replica_id: the island's name; None reads ATOLL_ISLAND, and without it lets the
            run choose one.
        init_sync: whether to begin with the founder's weights; False promises that all
            islands begin with the same.
        timeout: how long to wait for an outcome; None waits as long as the run does.
    """

    _use_async_quorum = False  # torchft's DiLoCo reads it, and wants no other

    def __init__(
        self,
        run: Exchange | str | None = None,
        *,
        reduces: Sequence[torch.nn.Module],
        load_state_dict: Callable[[Any], None] | None = None,
        state_dict: Callable[[], Any] | None = None,
        replica_id: str | None = None,
        init_sync: bool = True,
        timeout: timedelta | None = None,
    ) -> None:
        self._registered = Registered()
        if load_state_dict and state_dict:
            self.register_state_dict_fn("default", load_state_dict, state_dict)
        self._timeout_s = timeout.total_seconds() if timeout else None
        self._holder = Holder(
            run,
            reduces,
            self._registered,
            island=replica_id,
            init_sync=init_sync,
        )
        self._step: Step | None = None
        self._abandoned = threading.Event()
        self._errored: Exception | None = None

    def register_state_dict_fn(
        self,
        key: str,
        load_state_dict: Callable[[Any], None],
        state_dict: Callable[[], Any],
    ) -> None:
        """Give what `state_dict` returns to islands that come late, for the other."""
        self._registered.register(key, load_state_dict, state_dict)

    def allow_state_dict_read(self) -> None:
        """Let the registered state be read: no inner step is under way."""
        self._registered.allow()

    def disallow_state_dict_read(self) -> None:
        """Keep the registered state from being read, until the inner step is made."""
        self._registered.disallow()

    def start_quorum(
        self,
        allow_heal: bool = True,
        shrink_only: bool = False,
        timeout: timedelta | None = None,
    ) -> None:
        """Join if need be, and hold the state that the coming round is about.

        An island that comes late, or fell behind, is given the state here. Others give
        it here, or stand by. That takes as long as the run's rounds do: `timeout` is
        part of torchft's surface, and is not read.
        """
        if not allow_heal or shrink_only:
            raise UsageError(
                f"allow_heal={allow_heal} and shrink_only={shrink_only}: an island "
                "without the state cannot take part, and a round takes who is there. "
                "Leave both as they are."
            )
        self._end_step()
        self._errored = None
        self._holder.keep_up()
        self._abandoned = abandoned = threading.Event()

        def exchange(values: F32) -> Taken:
            return self._holder.exchange(values, abandoned.is_set)

        self._step = Step(
            self._holder.lane.layout.elements,
            exchange,
            name=f"atoll-{self._holder.name}-reduce",
            timeout_s=self._timeout_s,
        )

    def wait_quorum(self) -> None:
        """Return at once: `start_quorum` has waited already."""
        self._present()

    def allreduce(
        self,
        tensor: torch.Tensor,
        should_quantize: bool = False,
        reduce_op: ReduceOp.RedOpType = ReduceOp.AVG,
    ) -> Work | Skipped:
        """Begin to average a tensor in place, over the islands of the round.

        The tensors of one step are exchanged together, with the last of them.
        """
        if self._errored is not None:
            return Skipped(tensor)
        step = self._present()
        if reduce_op != ReduceOp.AVG:
            raise UsageError(f"reduce_op={reduce_op}: a run agrees on means. Use AVG.")
        if not tensor.is_floating_point():
            raise UsageError(
                f"A tensor of {tensor.dtype} has no mean. Reduce floating-point ones."
            )
        require_codec(self._holder.settings, should_quantize=should_quantize)
        return step.add(tensor)

    def should_commit(self, timeout: timedelta | None = None) -> bool:
        """Return whether every tensor of this step holds the mean of its round.

        True on every island that has the outcome, though one that came late or was
        refused has no work of its own in it: all must make the same outer step. False
        when there is none: nobody's update could count, it did not come in time, or an
        error was reported.

        Raises:
            RunEnded: the run is over.
            AtollError: this island cannot go on, and why.
        """
        step = self._present()
        if self._errored is not None and not step.is_sent:
            self._holder.refuse(as_reason(f"torchft: {self._errored}"))
            return False
        if not step.wait(timeout):
            self.report_error(Unreachable("No outcome came in time. It may yet."))
            return False
        self._step = None
        if self._errored is not None:
            self._holder.keep(step.taken)
            return False
        return self._settled(step)

    def report_error(self, e: Exception) -> None:
        """Make this step come to nothing on this island."""
        self._errored = e

    def errored(self) -> Exception | None:
        """Return what has gone wrong in this step, if something has."""
        return self._errored

    def current_step(self) -> int:
        """Return how many outer steps have been made."""
        return self._holder.step

    def batches_committed(self) -> int:
        """Return how many updates have counted, over all steps and islands."""
        return self._holder.batches_committed

    def num_participants(self) -> int:
        """Return how many islands' updates are in the last mean."""
        return len(self._holder.counted)

    def participating_rank(self) -> int | None:
        """Return this island's place among them, or None if it is not."""
        holder = self._holder
        if not holder.has_joined or holder.name not in holder.counted:
            return None
        return holder.counted.index(holder.name)

    def is_participating(self) -> bool:
        """Return whether this island's update is in the last mean."""
        return self.participating_rank() is not None

    def rank(self) -> int:
        """Return this process's place in its island, which has but one."""
        return 0

    def is_leader(self) -> bool:
        """Return whether this process speaks for its island."""
        return True

    def state_dict(self) -> dict[str, int]:
        """Return what a checkpoint must hold of this object."""
        return {
            "step": self.current_step(),
            "batches_committed": self.batches_committed(),
        }

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Begin where a checkpoint ended; call it before the first step."""
        if self._holder.has_joined:
            raise UsageError(
                "The island has joined its run, and holds the state of the run. "
                "Load a checkpoint before the first step."
            )
        self._holder.restore(
            step=state_dict["step"], batches_committed=state_dict["batches_committed"]
        )

    def shutdown(self, wait: bool = True) -> None:
        """Leave the run, waited for whatever `wait` says. Safe to repeat."""
        self._abandoned.set()
        self._step = None
        self._holder.leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        self.shutdown()
        return isinstance(error, RunEnded)

    def _present(self) -> Step:
        if self._step is None:
            raise UsageError("No step is under way. Call start_quorum() first.")
        return self._step

    def _settled(self, step: Step) -> bool:
        """Return whether the exchange of a step gave a mean, and go on after it."""
        if step.taken is not None:
            return self._holder.took(step.taken)
        assert step.error is not None
        if isinstance(step.error, OutcomeLost):
            self._holder.lose()
        elif not isinstance(step.error, Unreachable):
            raise step.error
        self.report_error(step.error)
        return False

    def _end_step(self) -> None:
        """Give up a step that was not committed; what it has sent may still count."""
        step, self._step = self._step, None
        if step is None or not step.is_sent:
            return
        self._abandoned.set()
        step.end()
        self._holder.keep(step.taken)
