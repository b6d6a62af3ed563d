"""The rank that talks to the run for its island. Implements `IslandHandle`.

`StopAgreement` agrees on a step at which all ranks stop, though no rank waits for
another between steps.
Rule 1: a rank that gets the request reports its number of inner steps, and makes no
        further step before it has the common one. A background thread reports, so
        ranks that wait for each other in their training do not block it.
Rule 2: all stop at the step after the last step that any of them had made.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch

from atoll.errors import AtollError, RemoteError
from atoll.island import Host
from atoll.island.progress import RunClock
from atoll.island.saved_state import SavedIsland
from atoll.torch.host import by_name
from atoll.torch.ranks.channel import (
    LEADER,
    BackgroundOrders,
    CollectiveCalls,
    Message,
    RankChannel,
    to_message,
)
from atoll.torch.ranks.sharded_memory import MakeFragments, ShardedMemory
from atoll.torch.ranks.view import RankView
from atoll.weights.layout import F32

LEAVE_S = 20.0
"""Time that a leader that leaves waits for the others to leave as well."""

PULSE_S = 1.0
"""Interval of keepalives, unless a quarter of the timeout is shorter."""


class LeaderRank:
    """An island's handle at its leader.

    Joining is a collective call: an error of `join` is raised on all ranks.
    """

    def __init__(
        self,
        orders: RankChannel,
        works: RankChannel,
        view: RankView,
        make_fragments: MakeFragments,
        *,
        timeout_s: float,
        data_ranks: list[bool],
        returns: bool = False,
    ) -> None:
        self._view, self._data_ranks, self._returns = view, data_ranks, returns
        self.is_end_requested: Callable[[], bool] = lambda: False
        self.data_share = data_share_of(LEADER, data_ranks)
        self._stop_agreement = StopAgreement(timeout_s)
        self._calls = CollectiveCalls(orders, self._conclusion)
        self._background = BackgroundOrders(works, lambda: self._calls.num_orders)
        self.memory = ShardedMemory(self._calls, self._background, make_fragments)
        self._host_: Host | None = None
        self._tokens = self._counted = self._noted = 0
        self._stops = False
        self.has_left = False
        self._deferred_error: BaseException | None = None
        """An error of this rank between two calls: the next call raises it on all."""

        self._saves, self.last_common_round = 0, 0
        self.clock, self.trained = RunClock(), (0, 0)
        self._has_stepped = False
        """Whether the ranks have made a call after an inner step, with its tokens."""

        self._is_interrupted = False
        """Whether this rank was interrupted in a call: then all ranks leave."""

        self._failure: Exception | None = None
        """The error after which the ranks can make no more calls."""

        self._ends = threading.Event()
        self._pulse_s = min(PULSE_S, timeout_s / 4)
        self._pulse = threading.Thread(
            target=self._beat, name="atoll-ranks-pulse", daemon=True
        )
        self._pulse.start()

    def join(self, enter: Callable[[], Host]) -> None:
        """Enter the run, while the other ranks execute the orders for it."""
        try:
            self._join(enter)
        except BaseException:
            self._end()
            raise

    def order(self, order: Message) -> None:
        """Send an order to every other rank, during a collective call."""
        self._calls.order(order)

    def _join(self, enter: Callable[[], Host]) -> None:
        with self._collective_call("join"):
            self._host_ = enter()
            self.settings, self.tally = self._host.settings, self._host.tally
            joined = self._host.joined
            self.name, self.slot, self.run = joined.island, joined.slot, joined.run

    @property
    def _host(self) -> Host:
        assert self._host_ is not None, "the island has not joined"
        return self._host_

    @property
    def round(self) -> int:
        return self._host.round

    @property
    def run_steps(self) -> int:
        return self._host.run_steps

    @property
    def run_tokens(self) -> int:
        return self._host.position.tokens

    @property
    def saves(self) -> int:
        return self._saves

    @property
    def digest(self) -> str:
        return self._host.digest

    @property
    def has_ended(self) -> bool:
        return self._host.has_ended

    @property
    def must_stop(self) -> bool:
        return self._stops

    @property
    def host(self) -> Host:
        return self._host

    @property
    def progress(self) -> tuple[int, int]:
        """The inner steps and tokens of all incarnations of the island.

        For steps since the last call, every rank with data is assumed to have had as
        many tokens as this one.
        """
        steps, tokens = self._host.progress
        since = self._tokens - self._noted
        return steps, tokens + since * sum(self._data_ranks)

    def count_tokens(self, tokens: int) -> None:
        self._tokens += tokens

    def metrics(self) -> Mapping[str, float]:
        return self.tally.metrics()

    def stepped(self) -> None:
        stops_here = self._stop_agreement.count_step()
        self._require_together()
        if stops_here or (self._wakes_in <= 1 and not self._is_over()):
            with self._collective_call("a step"):
                self._has_stepped = True
                self._host.stepped()
            return
        try:
            self._host.stepped()
        except Exception as exc:  # the others train: it is raised where all stop
            self._deferred_error = exc

    @property
    def _wakes_in(self) -> int:
        """Inner steps until the next call of all ranks, which the first step makes."""
        return self._host.wakes_in if self._has_stepped else 1

    def sync_now(self) -> None:
        with self._collective_call("sync_now()"):
            self._host.sync_now()

    def leave(self, *, depart: bool, is_alone: bool) -> None:
        if self.has_left:
            return
        self.has_left = True
        try:
            is_alone = is_alone and not self._is_interrupted
            if is_alone or self._failure is not None:
                # Rounds wait for the next incarnation if the island resumes exactly.
                self._host.pause() if self._returns else self._host.leave(depart=False)
                reason = "it has failed. Its log has the error."
                self._fail(
                    RemoteError(f"Rank {LEADER} of this island has left: {reason}")
                )
            else:
                self._leave_together(depart=depart)
        finally:
            self._end()

    def pause(self) -> None:
        self.has_left = True
        try:
            # A rank that has ended does not block the others.
            with (
                suppress(RemoteError),
                self._collective_call("pause()", within_s=LEAVE_S),
            ):
                pass
            self._host.pause()
        finally:
            self._end()

    @contextmanager
    def saving(self, *, is_exact: bool) -> Iterator[SavedIsland]:
        """Yield this rank's part of the island; no part changes meanwhile."""
        with ExitStack() as stack:
            with self._collective_call("saving()"):
                saved = stack.enter_context(self._host.saving(is_exact=is_exact))
            yield saved

    def before_seal(self, act: Callable[[int, int], None]) -> None:
        def before() -> None:
            steps, settled = self._host.progress[0], self._host.settled_steps
            order = {"do": "seals", "steps": steps, "settled": settled}
            self._calls.order(order)
            act(steps, settled)

        self._host.before_seal(before)

    def anchor(self) -> dict[str, torch.Tensor]:
        weights: dict[str, torch.Tensor] = {}
        with self._collective_call("anchor()"):
            for slot in self._host.slots:
                with slot.lock:
                    (flat,) = self.memory.gathered(slot, 1)
                weights |= by_name(slot.layout, flat)
        return weights

    def keep_local(self) -> list[F32]:
        return [self._view.read_held(i) for i in range(len(self._view.vectors))]

    def load_anchor(self) -> int:
        rounds = []
        with self._collective_call("evaluating()"):
            for slot in self._host.slots:
                with slot.lock:  # no rank may adopt an outcome before all have written
                    self._calls.order({"do": "show", "index": slot.index})
                    self._view.write(slot.index, slot.state.anchor)
                    rounds.append(slot.state.round)
        return min(rounds)

    def restore_local(self, vectors: Any) -> None:
        for index, values in enumerate(vectors):
            self._view.write_held(index, values)

    def _is_over(self) -> bool:
        return self._host.has_ended or self._host.has_left

    def _leave_together(self, *, depart: bool) -> None:
        try:
            with self._collective_call("leave()", within_s=LEAVE_S):
                self._host.leave(depart=depart)
        except RemoteError:
            self._host.leave(depart=False)
            raise

    @contextmanager
    def _collective_call(
        self, call: str, *, within_s: float | None = None
    ) -> Iterator[None]:
        self._require_together()
        steps = self._stop_agreement.steps
        try:
            with self._calls.collective_call(
                call, steps, within_s=within_s
            ) as messages:
                if self._deferred_error is not None:
                    raise self._deferred_error
                self._note(messages)
                yield
        except Exception as exc:
            self._failure = exc
            raise
        except BaseException:
            self._is_interrupted = True
            raise

    def _note(self, messages: list[Message]) -> None:
        """Add up the tokens of all ranks, and note a request to stop."""
        others = (message["tokens"] for message in messages)
        reported = [self._tokens, *others]
        is_counted = zip(reported, self._data_ranks, strict=True)
        total = sum(tokens for tokens, counts in is_counted if counts)
        is_asked = self.is_end_requested() or any(
            message["asked"] for message in messages
        )
        self._stops = self._stops or is_asked
        if self._host_ is not None:
            self._host_.tally.tokens += total - self._counted
        self._counted, self._noted = total, self._tokens

    def _conclusion(self) -> Message:
        host = self._host
        self._saves, self.last_common_round = host.position.saves, host.round
        self.clock, self.trained = (
            host.clock,
            (self.tally.inner_steps, self.tally.tokens),
        )
        return {
            "island": self.name,
            "slot": self.slot,
            "run": self.run,
            "wakes_in": self._wakes_in,
            "round": host.round,
            "run_steps": host.run_steps,
            "run_tokens": self.run_tokens,
            "clock": self.clock.to_dict(),
            "made": list(self.trained),
            "saves": self._saves,
            "digest": host.digest,
            "ended": host.has_ended,
            "stops": self._stops,
            "metrics": dict(self.metrics()),
        }

    def _require_together(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _beat(self) -> None:
        """Send keepalives, and poll the ranks for requests to stop."""
        while not self._ends.wait(self._pulse_s):
            try:
                self._calls.send_keepalive()
                self._check(
                    self._background.request_if_idle({"do": "ping", "after": 0})
                )
            except AtollError as exc:
                if not self._ends.is_set():
                    self._fail(exc)
                return

    def _check(self, answers: list[Message] | None) -> None:
        if answers is None:
            return
        for rank, answer in zip(self._background.channel.others, answers, strict=True):
            if answer["gone"]:
                raise RemoteError(
                    f"Rank {rank} of this island has left: {answer['gone']}"
                )
        is_asked = self.is_end_requested() or any(answer["asked"] for answer in answers)
        if (
            (is_asked or self._deferred_error)
            and not self._stops
            and not self._stop_agreement.is_agreed
        ):
            self._agree()

    def _agree(self) -> None:
        """Agree with all ranks on the step of their next call."""
        own_steps = self._stop_agreement.hold()
        try:
            answers = self._background.request({"do": "halt", "after": 0})
            step = 1 + max(own_steps, *(answer["steps"] for answer in answers))
            self._background.request({"do": "meet", "at": step, "after": 0})
        except AtollError:
            self._stop_agreement.release()
            raise
        self._stop_agreement.agree(step)

    def _fail(self, error: Exception) -> None:
        self._failure = self._failure or error
        self._stop_agreement.release()
        self._background.notify({"do": "fail", **to_message(error, LEADER)})

    def _end(self) -> None:
        self._ends.set()
        self._pulse.join()
        self._background.notify({"do": "bye"})


def data_share_of(rank: int, data_ranks: list[bool]) -> tuple[int, int]:
    """Return the index of a rank's share of the island's data, and their number.

    A rank without its own data has the share of the last rank before it with data.
    """
    number = sum(data_ranks[: rank + 1])
    return max(number - 1, 0), max(1, sum(data_ranks))


class StopAgreement:
    """One rank's side of the agreement."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._steps = 0
        self._is_held = False
        self._agreed_step: int | None = None

    @property
    def steps(self) -> int:
        """Inner steps that this rank has made."""
        return self._steps

    @property
    def is_agreed(self) -> bool:
        """Whether the step is being agreed on, or agreed and not made yet."""
        return self._is_held

    def hold(self) -> int:
        """Block further steps until `agree`, and return the number made."""
        with self._changed:
            self._is_held, self._agreed_step = True, None
            return self._steps

    def agree(self, step: int) -> None:
        """Unblock steps up to the agreed one."""
        with self._changed:
            self._agreed_step = step
            self._changed.notify_all()

    def release(self) -> None:
        """Unblock all steps: the other ranks no longer answer."""
        with self._changed:
            self._is_held = False
            self._changed.notify_all()

    def count_step(self) -> bool:
        """Count an inner step, and return whether all ranks stop here."""
        with self._changed:
            self._steps += 1
            if not self._is_held:
                return False
            is_known = self._changed.wait_for(
                lambda: self._agreed_step is not None or not self._is_held,
                self._timeout_s,
            )
            if not is_known:
                raise RemoteError(
                    "The ranks of this island do not agree on where to stop: one of "
                    f"them did not answer for {self._timeout_s:g} s."
                )
            step = self._agreed_step
            stops_here = self._is_held and step is not None and self._steps >= step
            if stops_here:
                self._is_held = False
            return stops_here
