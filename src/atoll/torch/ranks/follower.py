"""A rank that executes the orders of its island's leader. Implements `Life`.

Its training thread comes to every gathering and executes orders there; a background
thread executes the orders that run beside the training.
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
from atoll.torch.ranks.channel import LEADER, Line, Message, from_message, to_message
from atoll.torch.ranks.leader import Halt, place_of
from atoll.torch.ranks.parts import Parts, filled, part_of_island
from atoll.torch.ranks.sharded_memory import MakeParts
from atoll.torch.ranks.view import RankView
from atoll.weights.layout import F32
from atoll.wire import OuterValues, Verdict

END_S = 10.0
"""How long a rank that is done waits for the leader's farewell."""


class Follower:
    """An island's life at any rank but its leader."""

    def __init__(
        self,
        orders: Line,
        works: Line,
        view: RankView,
        parts_of: MakeParts,
        give_constant: GiveConstant,
        *,
        timeout_s: float,
        data_ranks: list[bool],
        saved: Sequence[SavedFragment] = (),
    ) -> None:
        self._orders, self._works, self._view = orders, works, view
        self.asks: Callable[[], bool] = lambda: False
        self.place = place_of(orders.rank, data_ranks)
        self.tally = IslandCounters()
        self._obedience = Obedience(orders, works, view, parts_of, give_constant, saved)
        self._halt = Halt(timeout_s)
        self._told: Message = {}
        self._wakes_in = 0
        self._gone = ""
        self._failure: BaseException | None = None
        self.has_left = False
        self._thread = threading.Thread(
            target=self._work, name="atoll-ranks-work", daemon=True
        )
        self._thread.start()

    def join(self) -> None:
        """Come to the joining, and obey until the island is a member."""
        try:
            self._attend("join")
        except BaseException:
            self._thread.join(END_S)
            raise

    @property
    def name(self) -> str:
        return str(self._told["island"])

    @property
    def slot(self) -> int:
        return int(self._told["slot"])

    @property
    def run(self) -> str:
        return str(self._told["run"])

    @property
    def settings(self) -> RunSettings:
        return self._obedience.settings

    @property
    def round(self) -> int:
        return int(self._told["round"])

    @property
    def round_told(self) -> int:
        return self.round

    @property
    def run_steps(self) -> int:
        made = int(self._told["wakes_in"]) - self._wakes_in
        return int(self._told["run_steps"]) + made

    @property
    def run_tokens(self) -> int:
        return int(self._told["run_tokens"])

    @property
    def clock(self) -> RunClock:
        return RunClock.from_dict(self._told["clock"])

    @property
    def made(self) -> tuple[int, int]:
        steps, tokens = self._told["made"]
        return int(steps), int(tokens)

    @property
    def saves(self) -> int:
        return int(self._told["saves"])

    @property
    def digest(self) -> str:
        return str(self._told["digest"])

    @property
    def has_ended(self) -> bool:
        return bool(self._told["ended"])

    @property
    def is_asked(self) -> bool:
        return bool(self._told["stops"])

    @property
    def host(self) -> Host:
        raise UsageError("Only the leader of an island of several ranks has a host.")

    def count_tokens(self, tokens: int) -> None:
        self.tally.tokens += tokens

    def metrics(self) -> Mapping[str, float]:
        metrics: dict[str, float] = self._told["metrics"]
        return metrics

    def stepped(self) -> None:
        stops_here = self._halt.passed()
        self._require_together()
        if self.has_ended or self.has_left:
            if stops_here:
                self._attend("a step")
            return
        self.tally.inner_steps += 1
        self._wakes_in -= 1
        if stops_here or self._wakes_in <= 0:
            self._attend("a step")

    def sync_now(self) -> None:
        self._attend("sync_now()")

    def leave(self, *, depart: bool, is_alone: bool) -> None:
        if self.has_left:
            return
        self.has_left = True
        try:
            if is_alone:
                self._gone = "it has met an error of its own. Its log says which."
            elif self._failure is None:
                self._attend("leave()")
        finally:
            self._thread.join(END_S)

    def pause(self) -> None:
        self.has_left = True
        try:
            self._attend("pause()")
        finally:
            self._thread.join(END_S)

    @contextmanager
    def saving(self, *, is_exact: bool) -> Iterator[SavedIsland]:
        """Give this rank's part of the island; the leader keeps it still meanwhile."""
        self._attend("saving()")
        yield self._obedience.island()

    def before_seal(self, act: Callable[[int, int], None]) -> None:
        self._obedience.before_seal = act

    def anchor(self) -> dict[str, torch.Tensor]:
        self._attend("anchor()")
        return {}

    def keep_local(self) -> list[F32]:
        return [self._view.read_held(i) for i in range(len(self._view.held))]

    def load_anchor(self) -> int:
        self._attend("evaluating()")
        return self.round

    def restore_local(self, kept: Any) -> None:
        for index, values in enumerate(kept):
            self._view.write_held(index, values)

    def _attend(self, call: str) -> None:
        """Come to a gathering, and do there what the leader says."""
        self._require_together()
        try:
            self._told = self._gather(call)
            self._wakes_in = self._told["wakes_in"]
        except RunEnded:  # the leader was interrupted: all ranks leave together
            raise
        except BaseException as exc:
            self._failure = exc
            self._obedience.release()
            raise

    def _gather(self, call: str) -> Message:
        self._orders.say(
            LEADER,
            {
                "call": call,
                "steps": self._halt.steps,
                "tokens": self.tally.tokens,
                "asked": self.asks(),
            },
        )
        while True:
            order = self._orders.hear(LEADER)
            match order["do"]:
                case "wait":
                    continue
                case "close":
                    self._orders.say(LEADER, self._obedience.account())
                case "resume":
                    return order
                case "fail":
                    raise from_message(order)
                case _:
                    self._obedience.obey(order)

    def _require_together(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _work(self) -> None:
        """Obey what is done behind the training, until the leader says farewell."""
        try:
            while True:
                order = self._works.hear(LEADER)
                if order["do"] == "bye":
                    return
                if order["do"] == "fail":
                    self._end(from_message(order))
                    continue
                self._works.say(LEADER, self._answer(order))
                if order["do"] == "ping" and self._gone:
                    return
        except AtollError as exc:
            self._end(exc)

    def _answer(self, order: Message) -> Message:
        match order["do"]:
            case "ping":
                return {"asked": self.asks(), "gone": self._gone}
            case "halt":
                return {"steps": self._halt.hold()}
            case "meet":
                self._halt.meet(order["at"])
                return {}
        try:
            return self._obedience.work(order)
        except RemoteError:
            raise
        except Exception as exc:  # the leader tells everybody
            return to_message(exc, self._works.rank)

    def _end(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._halt.release()


GiveConstant = Callable[[str], None]
"""Gives the leader what this rank has of a constant."""


class Obedience:
    """A rank's parts, and the updates in flight that it has a part of."""

    def __init__(
        self,
        orders: Line,
        works: Line,
        view: RankView,
        parts_of: MakeParts,
        give_constant: GiveConstant,
        saved: Sequence[SavedFragment] = (),
    ) -> None:
        self._saved = list(saved)
        self._taken: list[SavedFragment] = []
        self.before_seal: Callable[[int, int], None] = _nothing
        """Called before updates are sealed, with the island's inner steps, and those
        that are settled."""

        self._give_constant = give_constant
        self._orders, self._works, self._view = orders, works, view
        self._parts_of = parts_of
        self._parts: Parts | None = None
        self._settings: RunSettings | None = None
        self._sealed: dict[int, UpdateInFlight] = {}
        self._obeyed, self._changed = 0, threading.Condition()
        self._is_over = False
        self._error: Exception | None = None

    @property
    def settings(self) -> RunSettings:
        """The run's settings, as the leader has told them."""
        assert self._settings is not None, "nothing has been laid out"
        return self._settings

    @property
    def parts(self) -> Parts:
        assert self._parts is not None, "nothing has been laid out"
        return self._parts

    def account(self) -> Message:
        """Return what went wrong since the last time, if anything did."""
        error, self._error = self._error, None
        return {} if error is None else to_message(error, self._orders.rank)

    def obey(self, order: Message) -> None:
        """Do to the live weights what the leader does, on the thread that trains."""
        try:
            if self._error is None:
                self._obey(order)
        except Exception as exc:  # told when the gathering closes
            self._error = exc
        with self._changed:
            self._obeyed += 1
            self._changed.notify_all()

    def release(self) -> None:
        """Let nothing wait any more for orders that will not come."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def _obey(self, order: Message) -> None:
        match order["do"]:
            case "constant":
                self._give_constant(order["name"])
            case "lay_out":
                self._settings = RunSettings.from_dict(order["settings"])
                self._parts = self._parts_of(self._settings)
            case "begin":
                index, founds = order["index"], order["founds"]
                self.parts.begin(self._orders, index, None, founds=founds)
            case "hold":
                self._hold(self.parts.slots[order["index"]], order["number"])
            case "take":
                self.parts.memory.take(
                    self.parts.slots[order["index"]],
                    self._sealed[order["number"]],
                    order["way"],
                    keep_local=order["keep_local"],
                )
            case "forget":
                self.parts.memory.forget(self._sealed.pop(order["number"]))
            case "seals":
                self.before_seal(order["steps"], order["settled"])
            case "show":
                index = order["index"]
                self._view.write(index, self.parts.slots[index].state.anchor)
            case _:
                self._resume(order)

    def _resume(self, order: Message) -> None:
        """Do with what a checkpoint holds, or is to hold, what the leader does."""
        parts = self.parts
        match order["do"]:
            case "save":
                self._taken = self._save(order)
            case "as_work":
                sync, layout = self.settings.sync, parts.layout
                made = tuple(order["made"])
                self._saved = as_work(
                    self._saved, layout, self._view, sync, trained=made
                )
            case "stand":
                index = order["index"]
                sealed = parts.resume(index, self._saved[index]).sealed
                if sealed is not None:
                    self._sealed[sealed.number] = sealed
            case "give":
                index, left = order["index"], RemainingWork(order["left"])
                parts.memory.give(parts.slots[index], self._saved[index], left)

    def _save(self, order: Message) -> list[SavedFragment]:
        saved: list[SavedFragment | None] = [*self._saved]
        saved += [None] * (len(order["slots"]) - len(saved))
        slots = [
            filled(
                self.parts.slots[index], said, self._sealed.__getitem__, saved[index]
            )
            for index, said in enumerate(order["slots"])
        ]
        made, is_exact = tuple(order["made"]), order["is_exact"]
        memory, sync = self.parts.memory, self.settings.sync
        return memory.saving(slots, sync, trained=made, is_exact=is_exact)

    def island(self) -> SavedIsland:
        """Return what was last taken of this rank's parts for a checkpoint."""
        return part_of_island(self._taken)

    def _hold(self, slot: IslandFragment, number: int) -> None:
        self._sealed[number] = UpdateInFlight(
            number=number,
            round=0,
            base=self.parts.memory.hold(slot, number),
            inner_steps=0,
            tokens=0,
            weight=1,
            arrival=Future(),
        )

    def work(self, order: Message) -> Message:
        """Do what the leader does behind the training, and return the answer."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_over or self._obeyed >= order["after"]
            )
        line, parts = self._works, self.parts
        if order["do"] == "fit":
            require_sizes([each.elements for each in parts.layout], self._saved)
            return {}
        index = order["index"]
        slot = parts.slots[index]
        match order["do"]:
            case "measure":
                parts.measure(line, index, count=order["count"])
            case "seal":
                parts.seal(
                    line,
                    index,
                    self._sealed[order["number"]],
                    seed=order["seed"],
                    decay=order["decay"],
                    is_difference=order["is_difference"],
                    body=None,
                )
            case "step":
                parts.step(
                    line,
                    index,
                    down=order["down"],
                    outer=OuterValues(**order["outer"]),
                    count=order["count"],
                    body=None,
                )
            case "replace":
                slot.state = parts.scatter(line, index, None)
            case "remake":
                how = {"seed": order["seed"], "decay": order["decay"]}
                parts.remake(line, index, self._saved[index], **how, body=None)
            case "gather":
                own = slot.state.vectors[: order["count"]]
                parts.gather(line, index, own, whole=None)
            case _:
                return self._settle(order, slot)
        return {}

    def _settle(self, order: Message, slot: IslandFragment) -> Message:
        memory = self.parts.memory
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
                left = RemainingWork(order["left"])
                memory.leave_over(slot, self._saved[slot.index], left)
            case "left_over":
                over = slot.residual
                if order["number"] is not None:
                    over = self._sealed[order["number"]].residual_after
                return {"has": over is not None and bool(over.any())}
        return {}


def _nothing(steps: int, settled: int) -> None:
    """Nobody wants anything done."""
