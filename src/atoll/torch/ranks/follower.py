"""A rank that does what the leader of its island says. Implements `Life`.

Its thread that trains comes to every gathering and obeys there; another obeys what is
done behind the training.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from atoll.errors import AtollError, RemoteError, RunEnded, UsageError
from atoll.island import Host, Tally
from atoll.island.run_clock import RunClock
from atoll.island.saved import SavedFragment, SavedIsland
from atoll.settings import RunSettings
from atoll.torch.ranks.faults import from_message, to_message
from atoll.torch.ranks.halt import Halt
from atoll.torch.ranks.leader import place_of
from atoll.torch.ranks.line import LEADER, Line, Message
from atoll.torch.ranks.obeying import GiveConstant, Obedience
from atoll.torch.ranks.spread import MakeParts
from atoll.torch.ranks.view import RankView
from atoll.weights.layout import F32

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
        self.tally = Tally()
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
