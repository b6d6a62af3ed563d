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
from dataclasses import asdict, dataclass, replace

import torch

from atoll.algorithm.schedule import Stride
from atoll.data import DataSpec
from atoll.errors import AtollError, RemoteError
from atoll.island import Host
from atoll.island.deal import DealtRows
from atoll.island.host import require_deal
from atoll.island.progress import RunClock
from atoll.island.saved_state import SavedIsland
from atoll.torch.model import by_name
from atoll.torch.ranks.channel import LEADER, Message, to_message
from atoll.torch.ranks.dispatcher import RankDispatcher, Thread, on_all_ranks
from atoll.torch.ranks.sharded_memory import ShardedMemory
from atoll.torch.ranks.view import RankView

LEAVE_S = 20.0
"""Time that a leader that leaves waits for the others to leave as well."""

PULSE_S = 1.0
"""Interval of keepalives, unless a quarter of the timeout is shorter."""


class LeaderRank:
    """An island's handle at its leader. Implements `CheckpointSubject` as well.

    Joining is a collective call: an error of `join` is raised on all ranks.
    """

    def __init__(
        self,
        ranks: RankDispatcher,
        view: RankView,
        memory: ShardedMemory,
        signals: RankSignals,
        *,
        timeout_s: float,
        data_ranks: list[bool],
        returns: bool = False,
    ) -> None:
        self._data_ranks, self._returns = data_ranks, returns
        self.keep_local, self.restore_local = view.keep_local, view.restore_local
        self._calls, self._background = ranks.collective, ranks.background
        self._signals, self._stop_agreement = signals, signals.stop_agreement
        self.memory = memory
        self._host: Host | None = None
        self._tokens = self._counted = self._noted = 0
        self.has_left = self.must_stop = False
        self._deferred_error: BaseException | None = None
        """An error of this rank between two calls: the next call raises it on all."""

        self.concluded: RankStatus
        """The status at the end of the last call, the same on all ranks."""

        self._dealt_until: int | None = None
        """The position up to which the other ranks have the dealt turns; None: the loop
        has not sharded its data."""

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

    def _join(self, enter: Callable[[], Host]) -> None:
        with self._collective_call("join"):
            self._host = host = enter()
            self.counters = host.counters
            self.membership = replace(
                host.membership, data_share=data_share_of(LEADER, self._data_ranks)
            )

    def end_when(self, is_asked: Callable[[], bool]) -> None:
        self._signals.is_end_requested = is_asked

    @property
    def host(self) -> Host:
        assert self._host is not None, "the island has not joined"
        return self._host

    @property
    def status(self) -> Host:
        return self.host

    @property
    def trained(self) -> tuple[int, int]:
        return self.concluded.trained

    @property
    def saves(self) -> int:
        return self.concluded.saves

    @property
    def round(self) -> int:
        """The round at the last call, the same on all ranks."""
        return self.concluded.round

    @property
    def settled_steps(self) -> int:
        return self.host.settled_steps

    @property
    def progress(self) -> tuple[int, int]:
        """The inner steps and tokens of all incarnations of the island.

        For steps since the last call, every rank with data is assumed to have had as
        many tokens as this one.
        """
        steps, tokens = self.host.progress
        since = self._tokens - self._noted
        return steps, tokens + since * sum(self._data_ranks)

    def open_data(self, data: DataSpec, *, may_sync: bool) -> DealtRows:
        """Describe the data to the run; all ranks call this together."""
        with self._collective_call("shard()"):
            self.host.open_data(data, may_sync=may_sync)
            deal = require_deal(self.host.deal)
            rows = deal.rows
            rows.share(*self.membership.data_share)
            if self._dealt_until is None:
                self._dealt_until = deal.start
        rows.refill = self._refill_together
        return rows

    def _refill_together(self) -> bool:
        """Ask the run for rows, when no rank has any left: they draw alike."""
        with self._collective_call("deal()"):
            return require_deal(self.host.deal).refill()

    def _dealt(self) -> Message | None:
        """Return the turns that the other ranks do not have yet."""
        deal = self.host.deal
        if deal is None or self._dealt_until is None:
            return None
        dealt = deal.dealt_since(self._dealt_until)
        self._dealt_until = dealt.end
        return dealt.to_message()

    def count_tokens(self, tokens: int) -> None:
        self._tokens += tokens

    def stepped(self) -> None:
        stops_here = self._stop_agreement.count_step()
        self._require_together()
        if stops_here or (self._wakes_in <= 1 and not self._is_over()):
            with self._collective_call("a step"):
                self._has_stepped = True
                self.host.stepped()
            return
        try:
            self.host.stepped()
        except Exception as exc:  # the others train: it is raised where all stop
            self._deferred_error = exc

    @property
    def _wakes_in(self) -> int:
        """Inner steps until the next call of all ranks, which the first step makes."""
        return self.host.wakes_in if self._has_stepped else 1

    def sync_now(self) -> None:
        with self._collective_call("sync_now()"):
            self.host.sync_now()

    def leave(self, *, depart: bool, is_alone: bool) -> None:
        if self.has_left:
            return
        self.has_left = True
        try:
            is_alone = is_alone and not self._is_interrupted
            if is_alone or self._failure is not None:
                # Rounds wait for the next incarnation if the island resumes exactly.
                self.host.pause() if self._returns else self.host.leave(depart=False)
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
            self.host.pause()
        finally:
            self._end()

    @contextmanager
    def saving(self, *, is_exact: bool) -> Iterator[SavedIsland]:
        """Yield this rank's part of the island; no part changes meanwhile."""
        with ExitStack() as stack:
            with self._collective_call("saving()"):
                saved = stack.enter_context(self.host.saving(is_exact=is_exact))
            yield saved

    def before_seal(self, act: Callable[[int, int], None]) -> None:
        def before() -> None:
            self.memory.note_seal(self.host.progress[0], self.host.settled_steps)

        self.memory.before_seal = act
        self.host.before_seal(before)

    def anchor(self) -> dict[str, torch.Tensor]:
        weights: dict[str, torch.Tensor] = {}
        with self._collective_call("anchor()"):
            for slot in self.host.slots:
                with slot.lock:
                    (flat,) = self.memory.gathered(slot, 1)
                weights |= by_name(slot.layout, flat)
        return weights

    def load_anchor(self) -> int:
        rounds = []
        with self._collective_call("evaluating()"):
            for slot in self.host.slots:
                with slot.lock:  # no rank may adopt an outcome before all have written
                    self.memory.show_anchor(slot)
                    rounds.append(slot.state.round)
        return min(rounds)

    def _is_over(self) -> bool:
        return self.host.has_ended or self.host.has_left

    def _leave_together(self, *, depart: bool) -> None:
        try:
            with self._collective_call("leave()", within_s=LEAVE_S):
                self.host.leave(depart=depart)
        except RemoteError:
            self.host.leave(depart=False)
            raise

    @contextmanager
    def _collective_call(
        self, call: str, *, within_s: float | None = None
    ) -> Iterator[None]:
        self._require_together()
        steps = self._stop_agreement.steps
        try:
            with self._calls.collective_call(
                call, steps, self._conclusion, within_s=within_s
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
        is_asked = self._signals.is_end_requested() or any(
            message["asked"] for message in messages
        )
        self.must_stop = self.must_stop or is_asked
        if self._host is not None:
            self._host.counters.tokens += total - self._counted
        self._counted, self._noted = total, self._tokens

    def _conclusion(self) -> Message:
        host = self.host
        self.concluded = RankStatus(
            island=host.membership.island,
            slot=host.membership.slot,
            run=host.membership.run,
            wakes_in=self._wakes_in,
            round=host.round,
            stride=host.stride,
            run_tokens=host.run_tokens,
            clock=host.clock,
            trained=host.trained,
            saves=host.saves,
            digest=host.digest,
            has_ended=host.has_ended,
            must_stop=self.must_stop,
            metrics=host.metrics,
        )
        return {"status": asdict(self.concluded), "dealt": self._dealt()}

    def _require_together(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _beat(self) -> None:
        """Send keepalives, and poll the ranks for requests to stop."""
        while not self._ends.wait(self._pulse_s):
            try:
                self._calls.send_keepalive()
                with suppress(BlockingIOError):  # that shows that ranks live, too
                    self._check(self._signals.read())
            except AtollError as exc:
                if not self._ends.is_set():
                    self._fail(exc)
                return

    def _check(self, signals: list[Signal]) -> None:
        for rank, (_, leave_reason) in enumerate(signals):
            if leave_reason:
                raise RemoteError(
                    f"Rank {rank} of this island has left: {leave_reason}"
                )
        is_asked = any(is_asked for is_asked, _ in signals)
        if (
            (is_asked or self._deferred_error)
            and not self.must_stop
            and not self._stop_agreement.is_agreed
        ):
            self._agree()

    def _agree(self) -> None:
        """Agree with all ranks on the step of their next call."""
        try:
            self._signals.agree(1 + self._signals.hold())
        except AtollError:
            self._stop_agreement.release()
            raise

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


Signal = tuple[bool, str]
"""Whether a rank has a request to end, and why it has left, if it has."""


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """An island at the end of a call of all its ranks. Implements `IslandStatus`."""

    island: str
    slot: int
    run: str
    wakes_in: int
    """Inner steps until the next call of all ranks."""

    round: int
    stride: Stride
    run_tokens: int
    clock: RunClock
    trained: tuple[int, int]
    """Inner steps of the island, and their tokens."""

    saves: int
    digest: str
    has_ended: bool
    must_stop: bool
    metrics: Mapping[str, float]

    @property
    def run_steps(self) -> int:
        """The schedule step that the island has reached."""
        return self.stride.step

    @classmethod
    def of(cls, fields: Message) -> RankStatus:
        """Return the status that the leader has sent."""
        clock, (steps, tokens) = fields.pop("clock"), fields.pop("trained")
        return cls(
            clock=RunClock(**clock),
            trained=(steps, tokens),
            stride=Stride(**fields.pop("stride")),
            **fields,
        )


def _joined(signals: list[list[Signal]]) -> list[Signal]:
    return [signal for part in signals for signal in part]


class RankSignals:
    """The requests to end of all ranks, read by the leader between two calls."""

    def __init__(self, ranks: RankDispatcher, timeout_s: float) -> None:
        self.ranks, self.stop_agreement = ranks, StopAgreement(timeout_s)
        self.is_end_requested: Callable[[], bool] = lambda: False
        """Whether this process has a request to end."""

        self.leave_reason = ""
        """Why this rank has left alone: it ends once the leader has read this."""

        self.is_last_read = False
        ranks.register(self)

    @on_all_ranks(Thread.IF_IDLE, combine=_joined)
    def read(self) -> list[Signal]:
        """Return the signals of all ranks."""
        self.is_last_read = bool(self.leave_reason)
        return [(self.is_end_requested(), self.leave_reason)]

    @on_all_ranks(Thread.AT_ONCE, combine=max)
    def hold(self) -> int:
        """Block further steps on all ranks, and return the most that one has made."""
        return self.stop_agreement.hold()

    @on_all_ranks(Thread.AT_ONCE)
    def agree(self, step: int) -> None:
        """Unblock the steps of all ranks up to the agreed one."""
        self.stop_agreement.agree(step)


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
