"""A rank that executes its leader's calls. Implements `IslandHandle`.

Its training thread takes part in every collective call; a background thread executes
the calls that run beside the training.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from atoll.data import DataSpec
from atoll.errors import AtollError, RemoteError, RunEnded, UsageError
from atoll.island import Host, IslandCounters
from atoll.island.base import Membership
from atoll.island.deal import DealtRows, DealtTurns, Tape, require_same_data
from atoll.island.saved_state import SavedIsland
from atoll.torch.ranks.channel import LEADER, Message, from_message
from atoll.torch.ranks.dispatcher import RankDispatcher
from atoll.torch.ranks.leader import RankSignals, RankStatus, data_share_of
from atoll.torch.ranks.sharded_memory import ShardedMemory
from atoll.torch.ranks.view import RankView

END_S = 10.0
"""Time that a rank that has finished waits for the leader's last order."""


class FollowerRank:
    """An island's handle at other ranks. Implements `CheckpointSubject` as well."""

    def __init__(
        self,
        ranks: RankDispatcher,
        view: RankView,
        memory: ShardedMemory,
        signals: RankSignals,
        *,
        data_ranks: list[bool],
    ) -> None:
        self._ranks, self._memory, self._data_ranks = ranks, memory, data_ranks
        self._signals, self._stop_agreement = signals, signals.stop_agreement
        self.keep_local, self.restore_local = view.keep_local, view.restore_local
        self.counters = IslandCounters()
        self._wakes_in = self._before_steps = 0
        self._failure: BaseException | None = None
        self._tape: Tape | None = None
        self._rows: DealtRows | None = None
        self._data: DataSpec | None = None
        """The rows that the run has dealt to the island, once the loop has sharded."""

        self.has_left = False
        self._thread = threading.Thread(
            target=self._work, name="atoll-ranks-work", daemon=True
        )
        self._thread.start()

    def join(self) -> None:
        """Take part in the join, and execute calls until the island is a member."""
        try:
            self._take_part("join")
        except BaseException:
            self._thread.join(END_S)
            raise
        self.membership = Membership(
            island=self.concluded.island,
            slot=self.concluded.slot,
            run=self.concluded.run,
            settings=self._memory.settings,
            data_share=data_share_of(self._ranks.orders.rank, self._data_ranks),
        )

    def end_when(self, is_asked: Callable[[], bool]) -> None:
        self._signals.is_end_requested = is_asked

    @property
    def status(self) -> RankStatus:
        new_steps = self.concluded.wakes_in - self._wakes_in
        return replace(self.concluded, stride=self.concluded.stride.stepped(new_steps))

    @property
    def trained(self) -> tuple[int, int]:
        return self.concluded.trained

    @property
    def saves(self) -> int:
        return self.concluded.saves

    @property
    def must_stop(self) -> bool:
        return self.concluded.must_stop

    @property
    def host(self) -> Host:
        raise UsageError("Only the leader of an island of several ranks has a host.")

    @property
    def round(self) -> int:
        """The round at the last call, the same on all ranks."""
        return self.concluded.round

    @property
    def progress(self) -> tuple[int, int]:
        """The inner steps of all incarnations of the island, and this rank's tokens."""
        return self._before_steps + self.counters.inner_steps, self.counters.tokens

    @property
    def settled_steps(self) -> int:
        return 0  # only the leader knows them: this rank removes no cursor by them

    def count_from(self, progress: int) -> None:
        """Count inner steps like the leader, with `progress` in all incarnations."""
        self.counters.inner_steps = self.concluded.trained[0]
        self._before_steps = progress - self.counters.inner_steps

    def open_data(self, data: DataSpec, *, may_sync: bool) -> DealtRows:
        """Describe the data to the run; all ranks call this together.

        Raises:
            UsageError: this rank has another dataset than the leader.
        """
        self._take_part("shard()")
        if self._tape is None or self._rows is None:
            raise RemoteError("The leader of this island has no rows of the run.")
        if self._rows.data is None:
            assert self._data is not None
            require_same_data(self._data, data)
            self._rows.begin(self._data, self.membership.settings)
            self._rows.share(*self.membership.data_share)
        return self._rows

    def _refill_together(self) -> bool:
        assert self._tape is not None
        end = self._tape.end
        self._take_part("deal()")
        return self._tape.end > end

    def _note_dealt(self, message: Message) -> None:
        """Append the turns that the run has dealt to the island."""
        dealt = DealtTurns.from_message(message)
        if self._tape is None:
            self._tape = Tape(start=dealt.start)
            self._rows = DealtRows(self._tape, dealt.start, self._refill_together)
        self._data = dealt.data
        self._tape.extend(dealt.intervals)
        assert self._rows is not None
        self._tape.trim(self._rows.position)

    def count_tokens(self, tokens: int) -> None:
        self.counters.tokens += tokens

    def stepped(self) -> None:
        stops_here = self._stop_agreement.count_step()
        self._require_together()
        if self.concluded.has_ended or self.has_left:
            if stops_here:
                self._take_part("a step")
            return
        self.counters.inner_steps += 1
        self._wakes_in -= 1
        if stops_here or self._wakes_in <= 0:
            self._take_part("a step")

    def sync_now(self) -> None:
        self._take_part("sync_now()")

    def leave(self, *, depart: bool, is_alone: bool) -> None:
        if self.has_left:
            return
        self.has_left = True
        try:
            if is_alone:
                self._signals.leave_reason = "it has failed. Its log has the error."
            elif self._failure is None:
                self._take_part("leave()")
        finally:
            self._thread.join(END_S)

    def pause(self) -> None:
        self.has_left = True
        try:
            self._take_part("pause()")
        finally:
            self._thread.join(END_S)

    @contextmanager
    def saving(self, *, is_exact: bool) -> Iterator[SavedIsland]:
        """Yield this rank's part of the island; no part changes meanwhile."""
        self._take_part("saving()")
        yield SavedIsland.of_rank(self._memory.snapshot)

    def before_seal(self, act: Callable[[int, int], None]) -> None:
        self._memory.before_seal = act

    def anchor(self) -> dict[str, torch.Tensor]:
        self._take_part("anchor()")
        return {}

    def load_anchor(self) -> int:
        self._take_part("evaluating()")
        return self.concluded.round

    def _take_part(self, call: str) -> None:
        """Enter a collective call, and execute the leader's calls in it."""
        self._require_together()
        entry = {
            "call": call,
            "steps": self._stop_agreement.steps,
            "tokens": self.counters.tokens,
            "asked": self._signals.is_end_requested(),
        }
        try:
            conclusion = self._ranks.take_part(entry)
            self.concluded = RankStatus.of(conclusion["status"])
            self._wakes_in = self.concluded.wakes_in
            if conclusion["dealt"] is not None:
                self._note_dealt(conclusion["dealt"])
        except RunEnded:  # the leader was interrupted: all ranks leave together
            raise
        except BaseException as exc:
            self._failure = exc
            self._ranks.release()
            raise

    def _require_together(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _work(self) -> None:
        """Execute background calls, until the leader sends the last order."""
        works = self._ranks.works
        try:
            while not self._signals.is_last_read:
                order = works.receive_message(LEADER)
                match order.get("do"):
                    case None:
                        works.send_message(LEADER, self._ranks.answer(order))
                    case "fail":
                        self._end(from_message(order))
                    case "bye":
                        return
        except AtollError as exc:
            self._end(exc)

    def _end(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._stop_agreement.release()
