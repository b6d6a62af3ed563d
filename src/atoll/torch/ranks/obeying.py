"""What the orders of a leader mean at another rank: `Spread` gives each of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from atoll.island.resumed_updates import require_sizes
from atoll.island.saved import SavedFragment, SavedIsland
from atoll.island.saving import as_work
from atoll.island.slot import Sealed, Slot
from atoll.protocol.island_rejoin import Left
from atoll.settings import RunSettings
from atoll.torch.ranks.faults import to_message
from atoll.torch.ranks.line import Line, Message
from atoll.torch.ranks.outlines import filled, part_of_island
from atoll.torch.ranks.parts import Parts
from atoll.torch.ranks.spread import MakeParts
from atoll.torch.ranks.view import RankView
from atoll.wire import OuterValues, Verdict

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
        self._sealed: dict[int, Sealed] = {}
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
                self._saved = as_work(self._saved, layout, self._view, sync, made=made)
            case "stand":
                index = order["index"]
                sealed = parts.resume(index, self._saved[index]).sealed
                if sealed is not None:
                    self._sealed[sealed.number] = sealed
            case "give":
                index, left = order["index"], Left(order["left"])
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
        return memory.saving(slots, sync, made=made, is_exact=is_exact)

    def island(self) -> SavedIsland:
        """Return what was last taken of this rank's parts for a checkpoint."""
        return part_of_island(self._taken)

    def _hold(self, slot: Slot, number: int) -> None:
        self._sealed[number] = Sealed(
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

    def _settle(self, order: Message, slot: Slot) -> Message:
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
                left = Left(order["left"])
                memory.leave_over(slot, self._saved[slot.index], left)
            case "left_over":
                over = slot.residual
                if order["number"] is not None:
                    over = self._sealed[order["number"]].residual_after
                return {"has": over is not None and bool(over.any())}
        return {}


def _nothing(steps: int, settled: int) -> None:
    """Nobody wants anything done."""
