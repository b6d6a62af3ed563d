"""Looks at a run after every event, and says what did not hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from atoll.coordinator import Service
from atoll.exchange import (
    Call,
    CoordinatorExchange,
    FoundCall,
    Frame,
    HeartbeatCall,
    LeaveCall,
    OfferCall,
    Outcome,
    PublishCall,
    Reply,
)
from atoll.exchange.coordinator import Line
from atoll.island import Host
from atoll.island.slot import Slot
from atoll.island.vectors import Vectors
from atoll.protocol.run_state import CoordinatorState
from atoll.settings import RunSettings
from atoll.simulate.hosts import CoordinatorHost
from atoll.simulate.invariants.bounds import (
    check_bytes,
    check_deadlines,
    check_staged,
    most_bytes_in_flight,
)
from atoll.simulate.invariants.claims import (
    ZOMBIES_CHANGE_NOTHING,
    Invariant,
    Violation,
)
from atoll.simulate.invariants.conservation import total
from atoll.simulate.invariants.life import Life, WatchedLine, WatchedView
from atoll.simulate.invariants.liveness import EveryoneCounts, Progress
from atoll.simulate.invariants.rounds import Rounds
from atoll.simulate.invariants.truth import Commit, Truth
from atoll.simulate.storms import COORDINATOR
from atoll.simulate.world import World
from atoll.weights import Layout
from atoll.wire import Header

LONGEST_FLIGHT_S = 120.0
"""Beyond what a plan's delays and throttles together make of one message."""


@dataclass
class Held:
    """A fragment as an island held it when it was last looked at."""

    who: str
    slot: Slot
    round: int = -1


@dataclass(frozen=True)
class Ports:
    """What one life of an island is given instead of its line and its weights."""

    line: WatchedLine
    view: WatchedView
    life: Life


class Watch:
    """The invariants of one run. `after_event` is the scheduler's hook."""

    def __init__(
        self,
        world: World,
        coordinator: CoordinatorHost,
        settings: RunSettings,
        layout: Layout,
        *,
        islands: int,
        step_s: float,
    ) -> None:
        self._world, self._coordinator = world, coordinator
        self._scheduler, self._network = world.scheduler, world.network
        self.violations: list[Violation] = []
        self.truth = Truth()
        self._rounds = Rounds(self.truth, settings, layout, self.report)
        self.progress = Progress(settings, self.report, step_s=step_s)
        self._everyone = EveryoneCounts(self.report)
        self._most_bytes = most_bytes_in_flight(
            layout, islands=islands, flight_s=LONGEST_FLIGHT_S
        )
        self._service: Service | None = None
        self._held: dict[str, list[Held]] = {}
        self._touched: set[str] = set()
        """Islands that were told something in the event that runs."""

        self._lives: list[Life] = []
        self._present: dict[str, tuple[Life, float]] = {}
        """The life of each island that takes part, and since when."""

        self._opened_s: dict[int, float] = {}
        self._has_committed = False
        self.on_commit: Callable[[CoordinatorState], None] = lambda state: None
        self.on_look: Callable[[], None] = lambda: None
        self.look_s = 0.0
        """When `on_look` is to be called next."""

    def report(self, invariant: Invariant, who: str, what: str) -> None:
        """Note a violation, and end the run: what follows from it means nothing."""
        at_s = self._scheduler.now_s
        self.violations.append(Violation(at_s, who, invariant.name, what))
        self._scheduler.stop()

    def begin(self, island: str, line: Line, view: Vectors) -> Ports:
        """Return the ports of a new life."""
        life = Life(view, self.truth, self.report)
        self._lives.append(life)
        learn = partial(self._learn, island)
        return Ports(WatchedLine(line, life, learn), WatchedView(view, life), life)

    def joined(self, life: Life, host: Host, exchange: CoordinatorExchange) -> None:
        """Look at an island that has entered the run."""
        life.joined(host, exchange)
        island = host.joined.island
        now_s = self._scheduler.now_s
        self._present[island] = (life, now_s)
        self._everyone.disturbed(now_s)
        self._held[island] = [Held(island, slot) for slot in host.slots]
        self._touched.add(island)

    def gone(self, island: str, *, fate: str) -> None:
        """Look no more at an island that has left or died."""
        if island in self._present:
            life, _ = self._present.pop(island)
            life.fate = fate
            self._everyone.disturbed(self._scheduler.now_s)
        self._held.pop(island, None)

    def after_event(self) -> None:
        service = self._coordinator.service
        if service is not self._service and service is not None:
            self._meet(service)
        if self._touched:
            # A state changes in the event in which its island is told something.
            for island in self._touched:
                for held in self._held.get(island, ()):
                    self._look(held)
            self._touched.clear()
        if self._has_committed and service is not None:
            self._has_committed = False
            check_deadlines(service, self.report)
            self.on_commit(service.state)
        if self._network.counts.bytes_in_flight > self._most_bytes:
            check_bytes(self._network, self._most_bytes, self.report)
        if self._scheduler.now_s >= self.look_s:
            self.on_look()

    def calm(self, since_s: float) -> None:
        """Nothing fails from now on."""
        self._everyone.calm(since_s)

    def conclude(self) -> dict[str, int]:
        """Look at everything once more, and return what became of the tokens."""
        service = self._coordinator.service
        if service is not None and not self.violations:
            self._rounds.ended(service)
        fates = [each for life in self._lives for each in life.conclude()]
        return total(fates)

    def _meet(self, service: Service) -> None:
        """Judge a coordinator that has begun to live, and see all that it does."""
        self._service = service
        was_put_back = self._world.disks[COORDINATOR].was_put_back
        self._rounds.opened(service, was_put_back=was_put_back)
        now_s = self._scheduler.now_s
        self._opened_s = {index: now_s for index in range(len(service.weights))}
        handle, commit = service.handle, service.journal.commit
        # The world looks over the shoulder of this one coordinator; nothing changes.
        service.handle = partial(self._handle, service, handle)  # type: ignore[method-assign]
        service.journal.commit = partial(self._commit, service, commit)  # type: ignore[method-assign]

    def _learn(self, island: str, told: Outcome | Frame) -> None:
        self._touched.add(island)
        if isinstance(told, Outcome):
            self._rounds.learned(island, told)

    def _look(self, held: Held) -> None:
        state = held.slot.state
        if state.round != held.round:
            held.round = state.round
            self._rounds.holds(held.who, held.slot.index, state)

    def _handle(
        self,
        service: Service,
        handle: Callable[[Call, float], Reply],
        call: Call,
        now_s: float,
    ) -> Reply:
        before, who = service.state, _speaker(call)
        try:
            return handle(call, now_s)
        finally:
            if who is not None:
                self._check_zombie(before, service.state, *who)
            if isinstance(call, PublishCall):
                check_staged(service, self.report)
            elif isinstance(call, FoundCall):
                self._rounds.founded(service)

    def _check_zombie(
        self,
        before: CoordinatorState,
        after: CoordinatorState,
        island: str,
        incarnation: int,
    ) -> None:
        latest = before.members.known.get(island)
        if after is before or latest is None or incarnation >= latest.incarnation:
            return
        staged = [
            header
            for old, new in zip(before.rounds, after.rounds, strict=False)
            for header in (new.staged.get(island), new.ahead.get(island))
            if header not in (None, old.staged.get(island), old.ahead.get(island))
        ]
        if after.members.known[island] is not latest or staged:
            self.report(
                ZOMBIES_CHANGE_NOTHING,
                island,
                f"its incarnation {incarnation} changed what the coordinator knows, "
                f"after incarnation {latest.incarnation} had joined",
            )

    def _commit(
        self,
        service: Service,
        commit: Callable[..., None],
        agreed: Header,
        body: np.ndarray,
        *,
        digest_after: bytes,
        epoch: int,
    ) -> None:
        now_s = self._scheduler.now_s
        outcome = Commit(agreed, body.tobytes(), digest_after, now_s)
        self._rounds.attempted(outcome)
        commit(agreed, body, digest_after=digest_after, epoch=epoch)
        self._rounds.committed(outcome)
        self._judge_roster(outcome)
        self._opened_s[agreed.fragment] = now_s
        self.progress.committed(now_s)
        self._has_committed = True

    def _judge_roster(self, outcome: Commit) -> None:
        opened_s = self._opened_s.get(outcome.header.fragment, 0.0)
        present = [
            island
            for island, (_, since_s) in self._present.items()
            if since_s <= opened_s
        ]
        self._everyone.committed(outcome, opened_s, present)


def _speaker(call: Call) -> tuple[str, int] | None:
    """Return which life of which island speaks, if the call says so."""
    match call:
        case HeartbeatCall(beat):
            return beat.island, beat.incarnation
        case OfferCall(header):
            return header.island, header.incarnation
        case PublishCall(frame):
            return frame.header.island, frame.header.incarnation
        case LeaveCall(island, incarnation) | FoundCall(island, incarnation, _):
            return island, incarnation
    return None
