"""What an island holds of the training, and how it keeps up with the others.

The state of the training (weights, optimizers, the step) is torchft's and its user's;
all islands that *hold* it hold the same. One that does not hold it asks for it, and
contributes nothing until it has it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch

from atoll.errors import Unreachable
from atoll.exchange import Exchange
from atoll.integrations.torchft.entrance import Applicant, enter, way_to
from atoll.integrations.torchft.given import GivenState
from atoll.integrations.torchft.handover import Passage
from atoll.integrations.torchft.lane import Lane, Taken
from atoll.integrations.torchft.reduced import spec_of
from atoll.integrations.torchft.registered import Registered
from atoll.integrations.torchft.voice import Voice
from atoll.integrations.torchft.wants import (
    ABSTAINS,
    WANTS,
    Handover,
    Life,
    Served,
    elects,
    handover_of,
    roster_of,
    serve,
    unserved,
)
from atoll.settings import RunSettings
from atoll.weights.layout import F32

log = logging.getLogger("atoll")


class Holder:
    """One life of an island that trains with torchft.

    `keep_up`, `took` and `leave` belong to the thread that trains; `exchange` may run
    behind it, between the two.
    """

    def __init__(
        self,
        run: Exchange | str | None,
        modules: Sequence[torch.nn.Module],
        registered: Registered,
        *,
        island: str | None,
        init_sync: bool,
    ) -> None:
        self._model = spec_of(modules)
        self._num_fragments = len(modules)
        self._registered, self._init_sync = registered, init_sync
        self._exchange, self._island, self._leaving = way_to(run, island)
        self._voice: Voice | None = None
        self._lanes: list[Lane] = []
        self._passage: Passage | None = None
        self._has_state = self._has_held = False
        self._wants = 0
        self._served: Served = {}
        self._pending: Handover | None = None
        self._kept: Taken | None = None
        self.step = self.batches_committed = 0
        self.counted: tuple[str, ...] = ()
        """The islands whose updates are in the last mean, by name."""

    @property
    def voice(self) -> Voice:
        assert self._voice is not None
        return self._voice

    @property
    def passage(self) -> Passage:
        assert self._passage is not None
        return self._passage

    @property
    def has_joined(self) -> bool:
        return self._voice is not None

    @property
    def name(self) -> str:
        return self.voice.joined.island

    @property
    def settings(self) -> RunSettings:
        return self.voice.joined.settings

    @property
    def lane(self) -> Lane:
        """The fragment that the present step reduces."""
        return self._lanes[self.step % self._num_fragments]

    def restore(self, *, step: int, batches_committed: int) -> None:
        """Begin where a checkpoint ended, whose state its user has loaded."""
        self.step, self.batches_committed = step, batches_committed
        self._has_held = True

    def keep_up(self) -> None:
        """Hold the state that the next round is about, however long that takes.

        The state may be given to others here, or loaded, or both.
        """
        if self._voice is None:
            self._join()
        if self._pending is not None:
            handover, self._pending = self._pending, None
            self._hand_over(handover)
        if self._has_state:
            self._look_around()
        while not self._has_state:
            self._ask_for_state()
        self._has_held = True

    def exchange(self, values: F32, gives_up: Callable[[], bool]) -> Taken:
        """Contribute to the round of this step, and return what it came to."""
        if self._kept is not None:
            kept, self._kept = self._kept, None
            return kept
        lane = self.lane
        lane.publish(values, step=self.step)
        outcome = self.voice.outcome(lane.index, lane.round, gives_up=gives_up)
        return lane.take(outcome)

    def refuse(self, reason: str) -> None:
        """Let nobody wait for a contribution to this step's round."""
        lane = self.lane
        if lane.standing < lane.round:
            self.voice.refuse(lane.index, lane.round, reason, inner_steps=self.step + 1)
            lane.standing = lane.round

    def took(self, taken: Taken) -> bool:
        """Go on after an outcome; return whether there is a mean to step by."""
        agreed = taken.agreed
        handover = handover_of(agreed, num_fragments=self._num_fragments)
        if elects(agreed):
            self._has_state = False  # those who took part go on from another state
        elif handover is not None and unserved(handover, self._served):
            serve(handover, self._served)
            self._pending = handover
        if not taken.has_counted:
            self._tell_missed(taken)
        if taken.mean is None:
            return False
        self.counted = tuple(entry.island for entry in roster_of(agreed).counted)
        self.step += 1
        self.batches_committed += len(self.counted)
        period = self.settings.sync.sync_every
        self.voice.schedule_step = self.step * period // self._num_fragments
        return True

    def keep(self, taken: Taken | None) -> None:
        """Have the next step take an outcome that this one did not.

        The others have made their outer step by it, and so must this island; what it
        trains meanwhile is nowhere.
        """
        self._kept = taken

    def lose(self) -> None:
        """Hold the state no more: a mean was agreed that training cannot take."""
        self._has_state = False

    def leave(self) -> None:
        """End the membership. Safe to repeat."""
        voice, self._voice = self._voice, None
        if voice is None:
            return
        voice.stops.set()
        with suppress(Unreachable), self._leaving:
            self._exchange.leave(voice.joined.island, voice.joined.incarnation)

    def _join(self) -> None:
        voice, lanes, passage = enter(
            self._exchange,
            self._model,
            self._island,
            num_fragments=self._num_fragments,
        )
        self._voice, self._lanes, self._passage = voice, lanes, passage
        is_fresh = set(voice.joined.position.rounds[: self._num_fragments]) <= {1}
        if voice.joined.is_founder or (is_fresh and not self._init_sync):
            for lane in lanes:
                lane.round = 1  # the state may be a round ahead already
            self._has_state = True

    def _hand_over(self, handover: Handover) -> None:
        if handover.donor == self._life:
            self.passage.give(self._given().packed(), handover=handover.number)
        else:
            self.passage.attend(handover=handover.number)

    @property
    def _life(self) -> Life:
        return self.voice.joined.island, self.voice.joined.incarnation

    def _look_around(self) -> None:
        """Find out whether rounds went by without this island."""
        rounds = self.voice.position().rounds
        if not rounds:
            return  # it has founded the run, and heard nothing of it since
        for lane in self._lanes:
            # The outcome of one round can be taken in the place of this step's own.
            may_pass = 1 if lane is self.lane else 0
            while rounds[lane.index] > lane.round + may_pass:
                outcome = self.voice.look(lane.index, lane.round)
                agreed = outcome.agreed.header if outcome else None
                if agreed is None or agreed.elements or elects(agreed):
                    self._has_state = False
                    return
                lane.pass_void(agreed)

    def _ask_for_state(self) -> None:
        """Ask once; whoever was to give the state may go before it is given."""
        self._wants += 1
        held = self.step if self._has_held else None
        applicant = Applicant(self.voice, self._lanes, held_step=held)
        handover = applicant.ask(self._wants)
        if handover.donor == self._life:
            self._lead(handover)
            return
        data = self.passage.take(handover=handover.number)
        if data is not None:
            self._load(GivenState.of(data, num_fragments=self._num_fragments))

    def _lead(self, handover: Handover) -> None:
        """Go on from the own state: nobody who is left has come further."""
        for lane in self._lanes:
            lane.start_over()
            lane.round = lane.state.round + 1
        serve(handover, self._served)
        self._has_state = True
        if len(handover.wanting) > 1:
            self._hand_over(handover)

    def _tell_missed(self, taken: Taken) -> None:
        log.log(
            logging.INFO if taken.reason in (ABSTAINS, WANTS) else logging.WARNING,
            "round %d of fragment %d has no work of island %s in it: %s",
            taken.agreed.round,
            taken.agreed.fragment,
            self.name,
            taken.reason or "an earlier life's stands",
        )

    def _given(self) -> GivenState:
        return GivenState(
            registered=self._registered.read(),
            step=self.step,
            batches_committed=self.batches_committed,
            rounds=[lane.round - 1 for lane in self._lanes],
            served=self._served,
        )

    def _load(self, given: GivenState) -> None:
        self._registered.load(given.registered)
        self.step, self.batches_committed = given.step, given.batches_committed
        self._served = given.served
        for lane, committed in zip(self._lanes, given.rounds, strict=True):
            lane.start_over()
            lane.round = lane.abstains_through = committed + 1
        self._has_state, self._kept = True, None
