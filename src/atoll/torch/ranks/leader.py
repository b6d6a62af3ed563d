"""The rank that talks to the run, for all ranks of its island. Implements `Life`.

`Halt` agrees on a step at which all ranks stop, though no rank waits for another
between steps.
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
    Background,
    Gatherings,
    Line,
    Message,
    to_message,
)
from atoll.torch.ranks.sharded_memory import MakeParts, Spread
from atoll.torch.ranks.view import RankView
from atoll.weights.layout import F32

LEAVE_S = 20.0
"""How long a leader that leaves waits for the others to come to it as well."""

PULSE_S = 1.0
"""Between two signs of life, unless the line's timeout asks for more of them."""


class Leader:
    """An island's life at its leader.

    Joining is a gathering: `join` returns the host, and whatever it raises is raised on
    all ranks.
    """

    def __init__(
        self,
        orders: Line,
        works: Line,
        view: RankView,
        parts_of: MakeParts,
        *,
        timeout_s: float,
        data_ranks: list[bool],
        returns: bool = False,
    ) -> None:
        self._view, self._data_ranks, self._returns = view, data_ranks, returns
        self.asks: Callable[[], bool] = lambda: False
        self.place = place_of(LEADER, data_ranks)
        self._halt = Halt(timeout_s)
        self._gatherings = Gatherings(orders, self._conclusion)
        self._background = Background(works, lambda: self._gatherings.given)
        self.memory = Spread(self._gatherings, self._background, parts_of)
        self._host_: Host | None = None
        self._tokens = self._counted = self._noted = 0
        self._stops = False
        self.has_left = False
        self._later: BaseException | None = None
        """What this rank met between two gatherings: raised on all at the next."""

        self._saves, self.round_told = 0, 0
        self.clock, self.made = RunClock(), (0, 0)
        self._has_stepped = False
        """Whether the ranks have met after an inner step, and know its tokens."""

        self._is_interrupted = False
        """Whether this rank was interrupted in a gathering: then all ranks leave."""

        self._failure: Exception | None = None
        """Why the ranks cannot come together any more."""

        self._ends = threading.Event()
        self._pulse_s = min(PULSE_S, timeout_s / 4)
        self._pulse = threading.Thread(
            target=self._beat, name="atoll-ranks-pulse", daemon=True
        )
        self._pulse.start()

    def join(self, enter: Callable[[], Host]) -> None:
        """Enter the run, while the other ranks do what that takes."""
        try:
            self._join(enter)
        except BaseException:
            self._end()
            raise

    def order(self, order: Message) -> None:
        """Let every other rank do something, while all are at a gathering."""
        self._gatherings.order(order)

    def _join(self, enter: Callable[[], Host]) -> None:
        with self._gathering("join"):
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
    def is_asked(self) -> bool:
        return self._stops

    @property
    def host(self) -> Host:
        return self._host

    @property
    def progress(self) -> tuple[int, int]:
        """The inner steps and tokens of all lives of the island.

        Of steps since the ranks last met, every rank with data is taken to have had as
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
        stops_here = self._halt.passed()
        self._require_together()
        if stops_here or (self._wakes_in <= 1 and not self._is_over()):
            with self._gathering("a step"):
                self._has_stepped = True
                self._host.stepped()
            return
        try:
            self._host.stepped()
        except Exception as exc:  # the others train: they learn of it where all stop
            self._later = exc

    @property
    def _wakes_in(self) -> int:
        """In how many steps all ranks meet: first of all after the first one."""
        return self._host.wakes_in if self._has_stepped else 1

    def sync_now(self) -> None:
        with self._gathering("sync_now()"):
            self._host.sync_now()

    def leave(self, *, depart: bool, is_alone: bool) -> None:
        if self.has_left:
            return
        self.has_left = True
        try:
            is_alone = is_alone and not self._is_interrupted
            if is_alone or self._failure is not None:
                # Rounds wait for the next life of an island that goes on exactly.
                self._host.pause() if self._returns else self._host.leave(depart=False)
                why = "it has met an error of its own. Its log says which."
                self._fail(RemoteError(f"Rank {LEADER} of this island has left: {why}"))
            else:
                self._leave_together(depart=depart)
        finally:
            self._end()

    def pause(self) -> None:
        self.has_left = True
        try:
            # Whoever is gone already keeps nobody from it.
            with suppress(RemoteError), self._gathering("pause()", within_s=LEAVE_S):
                pass
            self._host.pause()
        finally:
            self._end()

    @contextmanager
    def saving(self, *, is_exact: bool) -> Iterator[SavedIsland]:
        """Give this rank's part of the island; no part changes meanwhile."""
        with ExitStack() as held:
            with self._gathering("saving()"):
                saved = held.enter_context(self._host.saving(is_exact=is_exact))
            yield saved

    def before_seal(self, act: Callable[[int, int], None]) -> None:
        def seals() -> None:
            steps, settled = self._host.progress[0], self._host.settled_steps
            order = {"do": "seals", "steps": steps, "settled": settled}
            self._gatherings.order(order)
            act(steps, settled)

        self._host.before_seal(seals)

    def anchor(self) -> dict[str, torch.Tensor]:
        weights: dict[str, torch.Tensor] = {}
        with self._gathering("anchor()"):
            for slot in self._host.slots:
                with slot.lock:
                    (flat,) = self.memory.gathered(slot, 1)
                weights |= by_name(slot.layout, flat)
        return weights

    def keep_local(self) -> list[F32]:
        return [self._view.read_held(i) for i in range(len(self._view.held))]

    def load_anchor(self) -> int:
        rounds = []
        with self._gathering("evaluating()"):
            for slot in self._host.slots:
                with slot.lock:  # no rank may take an outcome before another has shown
                    self._gatherings.order({"do": "show", "index": slot.index})
                    self._view.write(slot.index, slot.state.anchor)
                    rounds.append(slot.state.round)
        return min(rounds)

    def restore_local(self, kept: Any) -> None:
        for index, values in enumerate(kept):
            self._view.write_held(index, values)

    def _is_over(self) -> bool:
        return self._host.has_ended or self._host.has_left

    def _leave_together(self, *, depart: bool) -> None:
        try:
            with self._gathering("leave()", within_s=LEAVE_S):
                self._host.leave(depart=depart)
        except RemoteError:
            self._host.leave(depart=False)
            raise

    @contextmanager
    def _gathering(self, call: str, *, within_s: float | None = None) -> Iterator[None]:
        self._require_together()
        steps = self._halt.steps
        try:
            with self._gatherings.gathering(call, steps, within_s=within_s) as came:
                if self._later is not None:
                    raise self._later
                self._note(came)
                yield
        except Exception as exc:
            self._failure = exc
            raise
        except BaseException:
            self._is_interrupted = True
            raise

    def _note(self, came: list[Message]) -> None:
        """Take in what the others say of themselves."""
        others = (said["tokens"] for said in came)
        reported = [self._tokens, *others]
        is_counted = zip(reported, self._data_ranks, strict=True)
        total = sum(tokens for tokens, counts in is_counted if counts)
        asked = self.asks() or any(said["asked"] for said in came)
        self._stops = self._stops or asked
        if self._host_ is not None:
            self._host_.tally.tokens += total - self._counted
        self._counted, self._noted = total, self._tokens

    def _conclusion(self) -> Message:
        host = self._host
        self._saves, self.round_told = host.position.saves, host.round
        self.clock, self.made = host.clock, (self.tally.inner_steps, self.tally.tokens)
        return {
            "island": self.name,
            "slot": self.slot,
            "run": self.run,
            "wakes_in": self._wakes_in,
            "round": host.round,
            "run_steps": host.run_steps,
            "run_tokens": self.run_tokens,
            "clock": self.clock.to_dict(),
            "made": list(self.made),
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
        """Say that the leader lives, and learn whether anybody asks to stop."""
        while not self._ends.wait(self._pulse_s):
            try:
                self._gatherings.say_alive()
                self._look(self._background.ask_if_idle({"do": "ping", "after": 0}))
            except AtollError as exc:
                if not self._ends.is_set():
                    self._fail(exc)
                return

    def _look(self, answers: list[Message] | None) -> None:
        if answers is None:
            return
        for rank, said in zip(self._background.line.others, answers, strict=True):
            if said["gone"]:
                raise RemoteError(
                    f"Rank {rank} of this island has left: {said['gone']}"
                )
        asked = self.asks() or self._later or any(said["asked"] for said in answers)
        if asked and not self._stops and not self._halt.is_agreed:
            self._agree()

    def _agree(self) -> None:
        """Agree with all ranks on the step at which they meet next."""
        mine = self._halt.hold()
        try:
            answers = self._background.ask({"do": "halt", "after": 0})
            at = 1 + max(mine, *(said["steps"] for said in answers))
            self._background.ask({"do": "meet", "at": at, "after": 0})
        except AtollError:
            self._halt.release()
            raise
        self._halt.meet(at)

    def _fail(self, error: Exception) -> None:
        self._failure = self._failure or error
        self._halt.release()
        self._background.dismiss({"do": "fail", **to_message(error, LEADER)})

    def _end(self) -> None:
        self._ends.set()
        self._pulse.join()
        self._background.dismiss({"do": "bye"})


def place_of(rank: int, data_ranks: list[bool]) -> tuple[int, int]:
    """Return which part of the island's data a rank trains on, and of how many.

    A rank without data of its own has that of the last one before it that has some.
    """
    number = sum(data_ranks[: rank + 1])
    return max(number - 1, 0), max(1, sum(data_ranks))


class Halt:
    """One rank's side of the agreement."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._steps = 0
        self._is_held = False
        self._at: int | None = None

    @property
    def steps(self) -> int:
        """Inner steps that this rank has made."""
        return self._steps

    @property
    def is_agreed(self) -> bool:
        """Whether the step is known, and has not come yet."""
        return self._is_held

    def hold(self) -> int:
        """Let no further step pass for now, and return how many have."""
        with self._changed:
            self._is_held, self._at = True, None
            return self._steps

    def meet(self, at: int) -> None:
        """Let steps pass up to the agreed one."""
        with self._changed:
            self._at = at
            self._changed.notify_all()

    def release(self) -> None:
        """Let steps pass: there is nobody any more to agree with."""
        with self._changed:
            self._is_held = False
            self._changed.notify_all()

    def passed(self) -> bool:
        """Count an inner step, and return whether all ranks stop here."""
        with self._changed:
            self._steps += 1
            if not self._is_held:
                return False
            known = self._changed.wait_for(
                lambda: self._at is not None or not self._is_held, self._timeout_s
            )
            if not known:
                raise RemoteError(
                    "The ranks of this island do not agree on where to stop: one of "
                    f"them did not answer for {self._timeout_s:g} s."
                )
            is_here = self._is_held and self._at is not None and self._steps >= self._at
            if is_here:
                self._is_held = False
            return is_here
