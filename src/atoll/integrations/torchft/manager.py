"""The methods of `torchft.Manager` that `DiLoCo` and `LocalSGD` call.

Differences that matter: a round that an island misses costs the others nothing, an
island that takes over a state does not count its donor's work a second time, and the
number of islands that a round needs is the run's own setting, not an argument.

torchft reduces tensor by tensor; a run exchanges a whole fragment. A `ReductionStep`
collects the tensors in one vector, and sends it with the last one, in a background
thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch.distributed import ReduceOp

from atoll.errors import OutcomeLost, RunEnded, Unreachable, UsageError
from atoll.exchange import Exchange
from atoll.integrations.torchft.fragment import RoundResult
from atoll.integrations.torchft.island import StateRegistry, TorchftIsland
from atoll.integrations.torchft.settings import require_codec
from atoll.weights.layout import F32
from atoll.wire import as_reason


class Manager:
    """The manager for torchft's `DiLoCo` and `LocalSGD`: one island of a run.

    A context manager too: leaving the block leaves the run, and the end of the run
    ends the block.

    Args:
        run: a coordinator's address, an object store's URL or a path, an exchange such
            as a `MemoryRun`, or None to read ATOLL_RUN.
        reduces: the modules that are reduced one after the other, as `DiLoCo` gets
            them; `[model]` for `LocalSGD`.
        load_state_dict, state_dict: load and return the state for islands that come
            late, besides the weights and the inner optimizer, which torchft registers.
        replica_id: the island's name; None reads ATOLL_ISLAND. If that is unset too,
            the run chooses one.
        init_sync: whether to begin with the founder's weights; False promises that all
            islands begin with the same.
        timeout: longest wait for an outcome; None waits as long as the run does.
    """

    _use_async_quorum = False  # torchft's DiLoCo reads it, and requires False

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
        self._registry = StateRegistry()
        if load_state_dict and state_dict:
            self.register_state_dict_fn("default", load_state_dict, state_dict)
        self._timeout_s = timeout.total_seconds() if timeout else None
        self._island = TorchftIsland(
            run,
            reduces,
            self._registry,
            island=replica_id,
            init_sync=init_sync,
        )
        self._step: ReductionStep | None = None
        self._abandoned = threading.Event()
        self._errored: Exception | None = None

    def register_state_dict_fn(
        self,
        key: str,
        load_state_dict: Callable[[Any], None],
        state_dict: Callable[[], Any],
    ) -> None:
        """Register one part of the state that late islands receive."""
        self._registry.register(key, load_state_dict, state_dict)

    def allow_state_dict_read(self) -> None:
        """Allow reads of the registered state: no inner step is in progress."""
        self._registry.allow()

    def disallow_state_dict_read(self) -> None:
        """Block reads of the registered state until the inner step is made."""
        self._registry.disallow()

    def start_quorum(
        self,
        allow_heal: bool = True,
        shrink_only: bool = False,
        timeout: timedelta | None = None,
    ) -> None:
        """Join if necessary, and hold the state that the coming round is about.

        An island that comes late, or fell behind, receives the state here. The others
        send it here, or stand by. That takes as long as the run's rounds do: `timeout`
        is part of torchft's interface, and is ignored.
        """
        if not allow_heal or shrink_only:
            raise UsageError(
                f"allow_heal={allow_heal} and shrink_only={shrink_only}: an island "
                "without the state cannot take part, and a round takes all islands "
                "that are present. Omit both arguments."
            )
        self._end_step()
        self._errored = None
        self._island.keep_up()
        self._abandoned = abandoned = threading.Event()

        def exchange(values: F32) -> RoundResult:
            return self._island.exchange(values, abandoned.is_set)

        self._step = ReductionStep(
            self._island.fragment.layout.elements,
            exchange,
            name=f"atoll-{self._island.name}-reduce",
            timeout_s=self._timeout_s,
        )

    def wait_quorum(self) -> None:
        """Return immediately: `start_quorum` has waited already."""
        self._step_in_progress()

    def allreduce(
        self,
        tensor: torch.Tensor,
        should_quantize: bool = False,
        reduce_op: ReduceOp.RedOpType = ReduceOp.AVG,
    ) -> Work | SkippedWork:
        """Begin to average a tensor in place, over the islands of the round.

        The tensors of one step are exchanged together, with the last of them.
        """
        if self._errored is not None:
            return SkippedWork(tensor)
        step = self._step_in_progress()
        if reduce_op != ReduceOp.AVG:
            raise UsageError(f"reduce_op={reduce_op}: a run agrees on means. Use AVG.")
        if not tensor.is_floating_point():
            raise UsageError(
                f"A tensor of {tensor.dtype} has no mean. Reduce floating-point ones."
            )
        require_codec(self._island.settings, should_quantize=should_quantize)
        return step.add(tensor)

    def should_commit(self, timeout: timedelta | None = None) -> bool:
        """Return whether every tensor of this step holds the mean of its round.

        True on every island that has the outcome, even if its own update came late or
        was refused: all must make the same outer step. False if there is none: no
        update could count, the outcome did not come in time, or an error was reported.

        Raises:
            RunEnded: the run is over.
            AtollError: this island cannot continue. The message has the reason.
        """
        step = self._step_in_progress()
        if self._errored is not None and not step.is_sent:
            self._island.refuse(as_reason(f"torchft: {self._errored}"))
            return False
        if not step.wait(timeout):
            self.report_error(Unreachable("No outcome came in time. It may yet."))
            return False
        self._step = None
        if self._errored is not None:
            self._island.keep(step.result)
            return False
        return self._settled(step)

    def report_error(self, e: Exception) -> None:
        """Fail this step on this island."""
        self._errored = e

    def errored(self) -> Exception | None:
        """Return the error of this step, or None."""
        return self._errored

    def current_step(self) -> int:
        """Return the number of outer steps that have been made."""
        return self._island.step

    def batches_committed(self) -> int:
        """Return the number of updates that counted, over all steps and islands."""
        return self._island.batches_committed

    def num_participants(self) -> int:
        """Return the number of islands whose updates are in the last mean."""
        return len(self._island.counted)

    def participating_rank(self) -> int | None:
        """Return this island's index among the participants; None if it is not one."""
        island = self._island
        if not island.has_joined or island.name not in island.counted:
            return None
        return island.counted.index(island.name)

    def is_participating(self) -> bool:
        """Return whether this island's update is in the last mean."""
        return self.participating_rank() is not None

    def rank(self) -> int:
        """Return this process's rank in its island, which has only one."""
        return 0

    def is_leader(self) -> bool:
        """Return True: an island has one process."""
        return True

    def state_dict(self) -> dict[str, int]:
        """Return the values of this object that a checkpoint must hold."""
        return {
            "step": self.current_step(),
            "batches_committed": self.batches_committed(),
        }

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Continue from a checkpoint; call it before the first step."""
        if self._island.has_joined:
            raise UsageError(
                "The island has joined its run, and holds the state of the run. "
                "Load a checkpoint before the first step."
            )
        self._island.restore(
            step=state_dict["step"], batches_committed=state_dict["batches_committed"]
        )

    def shutdown(self, wait: bool = True) -> None:
        """Leave the run, and wait for that; `wait` is ignored. Safe to repeat."""
        self._abandoned.set()
        self._step = None
        self._island.leave()

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

    def _step_in_progress(self) -> ReductionStep:
        if self._step is None:
            raise UsageError("No step is in progress. Call start_quorum() first.")
        return self._step

    def _settled(self, step: ReductionStep) -> bool:
        """Apply the result of a step; return whether it has a mean."""
        if step.result is not None:
            return self._island.apply_result(step.result)
        assert step.error is not None
        if isinstance(step.error, OutcomeLost):
            self._island.lose()
        elif not isinstance(step.error, Unreachable):
            raise step.error
        self.report_error(step.error)
        return False

    def _end_step(self) -> None:
        """Give up a step that was not committed; its update may still count."""
        step, self._step = self._step, None
        if step is None or not step.is_sent:
            return
        self._abandoned.set()
        step.end()
        self._island.keep(step.result)


class ReductionStep:
    """The tensors that one step reduces, and the result of their exchange."""

    def __init__(
        self,
        elements: int,
        exchange: Callable[[F32], RoundResult],
        *,
        name: str,
        timeout_s: float | None,
    ) -> None:
        self._values = np.empty(elements, np.float32)
        self._exchange, self._name, self._timeout_s = exchange, name, timeout_s
        self._works: list[Work] = []
        self._filled = 0
        self._done = threading.Event()
        self.result: RoundResult | None = None
        self.error: Exception | None = None

    @property
    def is_sent(self) -> bool:
        """Whether the last tensor was added, which starts the exchange."""
        return self._filled == len(self._values)

    @torch.no_grad()
    def add(self, tensor: torch.Tensor) -> Work:
        """Copy a tensor; with the last one, send them all.

        Raises:
            UsageError: the fragment does not have that many elements.
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
        """Return whether the exchange is over by then, successful or not.

        The default is the timeout of the manager.

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
        """Return when the background thread has finished."""
        self._done.wait()

    @property
    def has_mean(self) -> bool:
        """Whether the tensors hold the agreed mean."""
        return self.result is not None and self.result.mean is not None

    def _run(self) -> None:
        try:
            result = self._exchange(self._values)
            if result.mean is not None:
                for work in self._works:
                    work.fill(result.mean)
            self.result = result
        except Exception as exc:  # the training thread raises it, as torchft does
            self.error = exc
        for work in self._works:
            work.finish()
        # Only now: a callback of the last future may run until here.
        self._done.set()


class Work:
    """A handle on one tensor of a step, as torch.distributed has them."""

    def __init__(self, step: ReductionStep, tensor: torch.Tensor, first: int) -> None:
        self._step, self._tensor, self._first = step, tensor, first
        self._future: torch.futures.Future[torch.Tensor] = torch.futures.Future()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return whether the tensor holds the mean, after all chained callbacks ran."""
        return self._step.wait(timeout) and self._step.has_mean

    def get_future(self) -> torch.futures.Future[torch.Tensor]:
        """Return a future of the tensor, which is unchanged if there is no outcome."""
        return self._future

    def is_completed(self) -> bool:
        return self._future.done()

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self, timeout: timedelta | None = None) -> None:
        self.wait(timeout)

    @torch.no_grad()
    def fill(self, mean: F32) -> None:
        """Copy this tensor's part of the mean into the tensor."""
        part = torch.from_numpy(mean[self._first : self._first + self._tensor.numel()])
        self._tensor.copy_(part.view(self._tensor.shape))

    def finish(self) -> None:
        self._future.set_result(self._tensor)


class SkippedWork:
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
        """Return immediately: there is nothing to wait for."""

    def block_current_stream(self, timeout: timedelta | None = None) -> None:
        """Return immediately: there is nothing to wait for."""
