"""A rank that executes the orders of its island's leader. Implements `IslandHandle`.

Its training thread takes part in every collective call and executes orders there; a
background thread executes the orders that run beside the training.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import torch

from atoll.errors import AtollError, RemoteError, RunEnded, UsageError
from atoll.island import Host, IslandCounters
from atoll.island.fragment import IslandFragment, UpdateInFlight
from atoll.island.memory import require_sizes
from atoll.island.progress import RunClock
from atoll.island.saved_state import SavedFragment, SavedIsland
from atoll.island.snapshot import as_work
from atoll.protocol.island import RemainingWork
from atoll.settings import RunSettings
from atoll.torch.ranks.channel import (
    LEADER,
    Message,
    RankChannel,
    from_message,
    to_message,
)
from atoll.torch.ranks.fragments import RankFragments, filled, rank_part_of_island
from atoll.torch.ranks.leader import StopAgreement, data_share_of
from atoll.torch.ranks.sharded_memory import MakeFragments
from atoll.torch.ranks.view import RankView
from atoll.weights.layout import F32
from atoll.wire import OuterValues, Verdict

END_S = 10.0
"""Time that a rank that has finished waits for the leader's last order."""


class FollowerRank:
    """An island's handle at any rank except its leader."""

    def __init__(
        self,
        orders: RankChannel,
        works: RankChannel,
        view: RankView,
        make_fragments: MakeFragments,
        give_constant: GiveConstant,
        *,
        timeout_s: float,
        data_ranks: list[bool],
        saved: Sequence[SavedFragment] = (),
    ) -> None:
        self._orders, self._works, self._view = orders, works, view
        self.is_end_requested: Callable[[], bool] = lambda: False
        self.data_share = data_share_of(orders.rank, data_ranks)
        self.tally = IslandCounters()
        self._executor = OrderExecutor(
            orders, works, view, make_fragments, give_constant, saved
        )
        self._stop_agreement = StopAgreement(timeout_s)
        self._result: Message = {}
        self._wakes_in = 0
        self._leave_reason = ""
        self._failure: BaseException | None = None
        self.has_left = False
        self._thread = threading.Thread(
            target=self._work, name="atoll-ranks-work", daemon=True
        )
        self._thread.start()

    def join(self) -> None:
        """Take part in the join, and execute orders until the island is a member."""
        try:
            self._take_part("join")
        except BaseException:
            self._thread.join(END_S)
            raise

    @property
    def name(self) -> str:
        return str(self._result["island"])

    @property
    def slot(self) -> int:
        return int(self._result["slot"])

    @property
    def run(self) -> str:
        return str(self._result["run"])

    @property
    def settings(self) -> RunSettings:
        return self._executor.settings

    @property
    def round(self) -> int:
        return int(self._result["round"])

    @property
    def last_common_round(self) -> int:
        return self.round

    @property
    def run_steps(self) -> int:
        new_steps = int(self._result["wakes_in"]) - self._wakes_in
        return int(self._result["run_steps"]) + new_steps

    @property
    def run_tokens(self) -> int:
        return int(self._result["run_tokens"])

    @property
    def clock(self) -> RunClock:
        return RunClock.from_dict(self._result["clock"])

    @property
    def trained(self) -> tuple[int, int]:
        steps, tokens = self._result["made"]
        return int(steps), int(tokens)

    @property
    def saves(self) -> int:
        return int(self._result["saves"])

    @property
    def digest(self) -> str:
        return str(self._result["digest"])

    @property
    def has_ended(self) -> bool:
        return bool(self._result["ended"])

    @property
    def must_stop(self) -> bool:
        return bool(self._result["stops"])

    @property
    def host(self) -> Host:
        raise UsageError("Only the leader of an island of several ranks has a host.")

    def count_tokens(self, tokens: int) -> None:
        self.tally.tokens += tokens

    def metrics(self) -> Mapping[str, float]:
        metrics: dict[str, float] = self._result["metrics"]
        return metrics

    def stepped(self) -> None:
        stops_here = self._stop_agreement.count_step()
        self._require_together()
        if self.has_ended or self.has_left:
            if stops_here:
                self._take_part("a step")
            return
        self.tally.inner_steps += 1
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
                self._leave_reason = "it has failed. Its log has the error."
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
        yield self._executor.island()

    def before_seal(self, act: Callable[[int, int], None]) -> None:
        self._executor.before_seal = act

    def anchor(self) -> dict[str, torch.Tensor]:
        self._take_part("anchor()")
        return {}

    def keep_local(self) -> list[F32]:
        return [self._view.read_held(i) for i in range(len(self._view.vectors))]

    def load_anchor(self) -> int:
        self._take_part("evaluating()")
        return self.round

    def restore_local(self, vectors: Any) -> None:
        for index, values in enumerate(vectors):
            self._view.write_held(index, values)

    def _take_part(self, call: str) -> None:
        """Enter a collective call, and execute the leader's orders in it."""
        self._require_together()
        try:
            self._result = self._execute_orders(call)
            self._wakes_in = self._result["wakes_in"]
        except RunEnded:  # the leader was interrupted: all ranks leave together
            raise
        except BaseException as exc:
            self._failure = exc
            self._executor.release()
            raise

    def _execute_orders(self, call: str) -> Message:
        self._orders.send_message(
            LEADER,
            {
                "call": call,
                "steps": self._stop_agreement.steps,
                "tokens": self.tally.tokens,
                "asked": self.is_end_requested(),
            },
        )
        while True:
            order = self._orders.receive_message(LEADER)
            match order["do"]:
                case "wait":
                    continue
                case "close":
                    self._orders.send_message(LEADER, self._executor.take_error())
                case "resume":
                    return order
                case "fail":
                    raise from_message(order)
                case _:
                    self._executor.execute(order)

    def _require_together(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _work(self) -> None:
        """Execute background orders, until the leader sends the last one."""
        try:
            while True:
                order = self._works.receive_message(LEADER)
                if order["do"] == "bye":
                    return
                if order["do"] == "fail":
                    self._end(from_message(order))
                    continue
                self._works.send_message(LEADER, self._answer(order))
                if order["do"] == "ping" and self._leave_reason:
                    return
        except AtollError as exc:
            self._end(exc)

    def _answer(self, order: Message) -> Message:
        match order["do"]:
            case "ping":
                return {"asked": self.is_end_requested(), "gone": self._leave_reason}
            case "halt":
                return {"steps": self._stop_agreement.hold()}
            case "meet":
                self._stop_agreement.agree(order["at"])
                return {}
        try:
            return self._executor.execute_in_background(order)
        except RemoteError:
            raise
        except Exception as exc:  # the leader sends it to all ranks
            return to_message(exc, self._works.rank)

    def _end(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._stop_agreement.release()


GiveConstant = Callable[[str], None]
"""Sends the leader this rank's part of a constant."""


class OrderExecutor:
    """Executes the leader's orders on a rank's parts of fragments and updates."""

    def __init__(
        self,
        orders: RankChannel,
        works: RankChannel,
        view: RankView,
        make_fragments: MakeFragments,
        give_constant: GiveConstant,
        saved: Sequence[SavedFragment] = (),
    ) -> None:
        self._saved = list(saved)
        self._snapshot: list[SavedFragment] = []
        self.before_seal: Callable[[int, int], None] = _ignore
        """Called before updates are sealed, with the island's inner steps, and those
        that are settled."""

        self._give_constant = give_constant
        self._orders, self._works, self._view = orders, works, view
        self._make_fragments = make_fragments
        self._fragments: RankFragments | None = None
        self._settings: RunSettings | None = None
        self._sealed: dict[int, UpdateInFlight] = {}
        self._num_executed, self._changed = 0, threading.Condition()
        self._is_over = False
        self._error: Exception | None = None

    @property
    def settings(self) -> RunSettings:
        """The run's settings, which the leader has sent."""
        assert self._settings is not None, "nothing has been laid out"
        return self._settings

    @property
    def fragments(self) -> RankFragments:
        assert self._fragments is not None, "nothing has been laid out"
        return self._fragments

    def take_error(self) -> Message:
        """Return the error since the last call as a message, or an empty one."""
        error, self._error = self._error, None
        return {} if error is None else to_message(error, self._orders.rank)

    def execute(self, order: Message) -> None:
        """Execute an order on the live weights, in the training thread."""
        try:
            if self._error is None:
                self._execute(order)
        except Exception as exc:  # sent to the leader at the end of the call
            self._error = exc
        with self._changed:
            self._num_executed += 1
            self._changed.notify_all()

    def release(self) -> None:
        """Unblock background orders that wait for orders that will not come."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def _execute(self, order: Message) -> None:
        match order["do"]:
            case "constant":
                self._give_constant(order["name"])
            case "lay_out":
                self._settings = RunSettings.from_dict(order["settings"])
                self._fragments = self._make_fragments(self._settings)
            case "begin":
                index, founds = order["index"], order["founds"]
                self.fragments.begin(self._orders, index, None, founds=founds)
            case "hold":
                self._hold(self.fragments.slots[order["index"]], order["number"])
            case "take":
                self.fragments.memory.take(
                    self.fragments.slots[order["index"]],
                    self._sealed[order["number"]],
                    order["way"],
                    keep_local=order["keep_local"],
                )
            case "forget":
                self.fragments.memory.forget(self._sealed.pop(order["number"]))
            case "seals":
                self.before_seal(order["steps"], order["settled"])
            case "show":
                index = order["index"]
                self._view.write(index, self.fragments.slots[index].state.anchor)
            case _:
                self._resume(order)

    def _resume(self, order: Message) -> None:
        """Execute an order on a checkpoint to save or to resume."""
        fragments = self.fragments
        match order["do"]:
            case "save":
                self._snapshot = self._save(order)
            case "as_work":
                sync, layout = self.settings.sync, fragments.layout
                trained = tuple(order["made"])
                self._saved = as_work(
                    self._saved, layout, self._view, sync, trained=trained
                )
            case "stand":
                index = order["index"]
                sealed = fragments.resume(index, self._saved[index]).sealed
                if sealed is not None:
                    self._sealed[sealed.number] = sealed
            case "give":
                index, remaining = order["index"], RemainingWork(order["left"])
                fragments.memory.give(
                    fragments.slots[index], self._saved[index], remaining
                )

    def _save(self, order: Message) -> list[SavedFragment]:
        saved: list[SavedFragment | None] = [*self._saved]
        saved += [None] * (len(order["slots"]) - len(saved))
        slots = [
            filled(
                self.fragments.slots[index],
                summary,
                self._sealed.__getitem__,
                saved[index],
            )
            for index, summary in enumerate(order["slots"])
        ]
        trained, is_exact = tuple(order["made"]), order["is_exact"]
        memory, sync = self.fragments.memory, self.settings.sync
        return memory.saving(slots, sync, trained=trained, is_exact=is_exact)

    def island(self) -> SavedIsland:
        """Return the last snapshot of this rank's parts, for a checkpoint."""
        return rank_part_of_island(self._snapshot)

    def _hold(self, slot: IslandFragment, number: int) -> None:
        self._sealed[number] = UpdateInFlight(
            number=number,
            round=0,
            base=self.fragments.memory.hold(slot, number),
            inner_steps=0,
            tokens=0,
            weight=1,
            arrival=Future(),
        )

    def execute_in_background(self, order: Message) -> Message:
        """Execute a background order, and return the answer."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_over or self._num_executed >= order["after"]
            )
        channel, fragments = self._works, self.fragments
        if order["do"] == "fit":
            require_sizes([part.elements for part in fragments.layout], self._saved)
            return {}
        index = order["index"]
        slot = fragments.slots[index]
        match order["do"]:
            case "measure":
                fragments.measure(channel, index, count=order["count"])
            case "seal":
                fragments.seal(
                    channel,
                    index,
                    self._sealed[order["number"]],
                    seed=order["seed"],
                    decay=order["decay"],
                    is_difference=order["is_difference"],
                    body=None,
                )
            case "step":
                fragments.step(
                    channel,
                    index,
                    down=order["down"],
                    outer=OuterValues(**order["outer"]),
                    count=order["count"],
                    body=None,
                )
            case "replace":
                slot.state = fragments.scatter(channel, index, None)
            case "remake":
                options = {"seed": order["seed"], "decay": order["decay"]}
                fragments.remake(
                    channel, index, self._saved[index], **options, body=None
                )
            case "gather":
                vectors = slot.state.vectors[: order["count"]]
                fragments.gather(channel, index, vectors, out=None)
            case _:
                return self._settle(order, slot)
        return {}

    def _settle(self, order: Message, slot: IslandFragment) -> Message:
        memory = self.fragments.memory
        match order["do"]:
            case "keep_loaded":
                memory.keep_loaded(slot, self._sealed[order["number"]])
            case "settle":
                sealed = self._sealed[order["number"]]
                memory.settle_residual(slot, sealed, Verdict[order["verdict"]])
            case "since":
                flying = self._sealed[order["flying"]]
                rest = self._sealed[order["rest"]]
                memory.since(slot, flying, rest, is_settled=order["is_settled"])
            case "leave_over":
                remaining = RemainingWork(order["left"])
                memory.leave_over(slot, self._saved[slot.index], remaining)
            case "left_over":
                residual = slot.residual
                if order["number"] is not None:
                    residual = self._sealed[order["number"]].residual_after
                return {"has": residual is not None and bool(residual.any())}
        return {}


def _ignore(steps: int, settled: int) -> None:
    """Do nothing before updates are sealed."""
