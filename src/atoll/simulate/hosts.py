"""The real island and the real coordinator, as processes in virtual time.

No part of the protocol is implemented here: islands run `island.Host` over
`exchange.CoordinatorExchange`, and the coordinator runs `coordinator.Service` on a
journal. Only time, threads, the network and the disk are simulated.

`CoordinatorTrace` writes the coordinator's actions into the timeline.
Rule 1: it only reads states: it sends no message, makes no disk call and adds no event.
Rule 2: a round that was committed in the instant of a coordinator's death is written by
    its next incarnation, which finds it in the journal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar, cast

from atoll.coordinator import LongPolls, Service
from atoll.errors import DiskError, Unreachable, UsageError
from atoll.exchange.calls import Call, OutcomeCall, Reply, size_of
from atoll.island.saved_state import AppliedOutcome
from atoll.journal import Journal
from atoll.protocol import WorkDecision
from atoll.protocol.coordinator_state import CoordinatorState
from atoll.protocol.events import Leave
from atoll.protocol.rounds import Phase
from atoll.settings import RunSettings
from atoll.simulate.network import ReplyFunction
from atoll.simulate.process import SimProcess
from atoll.simulate.scheduler import GreenletFuture, Scheduler
from atoll.simulate.storms import COORDINATOR
from atoll.simulate.story import CommitTrace
from atoll.simulate.world import SimWorld
from atoll.wire import Header, Roster

TIMEOUT_S = 4.0
"""Timeout of a call, without the time of a long poll."""

LONGEST_NAP_S = 1.0


T = TypeVar("T")


class SimRuntime:
    """The clock and the greenlets of one process. Implements `Runtime`.

    Sleeps take true time, independent of the clock of the process.
    """

    def __init__(self, world: SimWorld, process: SimProcess) -> None:
        self._scheduler, self._process = world.scheduler, process
        self.now_s = world.clocks[process.name].now_s
        self._is_closed = False

    def sleep(self, seconds: float) -> None:
        self._scheduler.sleep(seconds)
        if self._is_closed:
            raise Unreachable(f"{self._process.name!r} has given up asking its run.")

    def every(self, seconds: float, act: Callable[[], None]) -> None:
        def repeat() -> None:
            self._scheduler.sleep(seconds)
            while not self._is_closed:
                act()
                self._scheduler.sleep(seconds)

        self._process.spawn(repeat)

    def spawn(self, act: Callable[[], object], *, name: str) -> None:
        self._process.spawn(act)

    def future(self) -> GreenletFuture[Any]:
        if self._scheduler.trace is None:
            return GreenletFuture(self._scheduler)
        return GreenletFuture(self._scheduler, partial(trace_arrival, self._process))

    def gather(self, acts: Sequence[Callable[[], T]]) -> list[T]:
        if len(acts) == 1:
            return [acts[0]()]
        futures = [GreenletFuture[T](self._scheduler) for _ in acts]
        for act, future in zip(acts, futures, strict=True):
            self._process.spawn(partial(_complete, act, future))
        errors: list[Exception] = []
        for future in futures:
            try:
                future.result()
            except Exception as exc:  # all must end before the first error is raised
                errors.append(exc)
        if errors:
            raise errors[0]
        return [future.result() for future in futures]

    def close(self) -> None:
        """End all sleeps and periodic calls. Safe to repeat."""
        self._is_closed = True


def _complete(act: Callable[[], T], future: GreenletFuture[T]) -> None:
    try:
        future.set_result(act())
    except Exception as exc:  # raised in the waiting greenlet
        future.set_exception(exc)


class SimLine:
    """Calls over the simulated network. Implements `CoordinatorTransport`."""

    def __init__(self, world: SimWorld, process: SimProcess) -> None:
        self._world, self._process = world, process
        self.runtime = SimRuntime(world, process)

    def call(self, call: Call) -> Reply:
        wait_s = call.wait_s if isinstance(call, OutcomeCall) else 0.0
        answer = self._world.network.call(
            self._process,
            COORDINATOR,
            call,
            size_bytes=size_of(call),
            timeout_s=TIMEOUT_S + wait_s,
        )
        return cast(Reply, answer)


class CoordinatorHost:
    """Runs the coordinator's incarnations, one after another, on one disk."""

    def __init__(
        self,
        world: SimWorld,
        settings: RunSettings,
        *,
        evicted_after_s: float = 0.0,
    ) -> None:
        """An operator evicts islands that have been dead for longer; 0: never."""
        self._world, self._settings = world, settings
        self._evicted_after_s = evicted_after_s
        self._dead_since_s: dict[str, float] = {}
        self._process = world.add(COORDINATOR)
        self._clock = world.clocks[COORDINATOR]
        self._long_polls: LongPolls | None = None
        self._trace = CoordinatorTrace(world.scheduler)
        self.service: Service | None = None

    def start(self) -> None:
        self._process.start(self._live)

    def now_s(self) -> float:
        """Return the time of its clock."""
        return self._clock.now_s()

    def _live(self) -> None:
        self.service = service = self._open()
        self._long_polls = long_polls = LongPolls(service)
        self._trace.opened(service, self._clock.now_s())
        self._world.network.listen(self._process, self._listen)
        while True:
            now_s = self._clock.now_s()
            nap_s = service.tick(now_s) - now_s
            self._evict_dead(service, now_s)
            long_polls.settle(now_s)
            self._trace.look(service.state, now_s)
            self._world.scheduler.sleep(min(max(nap_s, 0.01), LONGEST_NAP_S))

    def _evict_dead(self, service: Service, now_s: float) -> None:
        """Evict islands that have been dead for long; retry while the disk fails."""
        for island, member in service.state.members.known.items():
            if self._world.processes[island].is_alive or member.has_left:
                self._dead_since_s.pop(island, None)
                continue
            since_s = self._dead_since_s.setdefault(island, now_s)
            if self._evicted_after_s and now_s > since_s + self._evicted_after_s:
                leave = Leave(island, member.incarnation, reason="evicted")
                with suppress(DiskError):
                    service.change(leave, now_s)

    def _open(self) -> Service:
        """Return the run on the disk, or a new one; retry while the disk fails."""
        while True:
            try:
                return self._open_or_create()
            except DiskError:
                self._world.scheduler.sleep(LONGEST_NAP_S)

    def _open_or_create(self) -> Service:
        disk, now_s = self._world.disks[COORDINATOR], self._clock.now_s()
        try:
            return Service.open(disk, now_s=now_s)
        except UsageError:
            return Service.create(disk, self._settings, run="run", now_s=now_s)

    def _listen(self, request: object, answer: ReplyFunction) -> None:
        assert self.service is not None
        assert self._long_polls is not None

        def send(reply: Reply | Exception) -> None:
            answer(reply, size_bytes=size_of(reply))

        now_s = self._clock.now_s()
        self._long_polls.put(cast(Call, request), send, now_s)
        self._long_polls.settle(now_s)
        self._trace.look(self.service.state, now_s)


class CoordinatorTrace:
    """Compares states of a coordinator after every event, and traces the changes."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._seen: CoordinatorState | None = None
        self._silent: set[str] = set()
        """Members whose lease ran out."""

        self._is_paused = False
        self._rosters: dict[tuple[int, int], Roster] = {}
        """Rosters of rounds that are being committed, by fragment and round."""

    def opened(self, service: Service, now_s: float) -> None:
        """Trace that an incarnation of the coordinator has opened its journal."""
        if self._scheduler.trace is None:
            return
        self._note_rosters(service.journal)
        state = service.state
        rounds = " ".join(str(round.number - 1) for round in state.rounds)
        self._emit(COORDINATOR, "open", f"rounds {rounds}" if rounds else "no weights")
        if self._seen is not None:
            self._trace_joins(self._seen, state)
            self._trace_rounds(self._seen, state)
        # Every journalled member has a new lease now, whether it is alive or not.
        self._seen = state
        self.look(state, now_s)

    def look(self, state: CoordinatorState, now_s: float) -> None:
        """Trace the changes since the last call."""
        if self._scheduler.trace is None:
            return
        seen = self._seen or state
        self._trace_joins(seen, state)
        self._trace_leases(seen, state, now_s)
        self._trace_rounds(seen, state)
        self._trace_pause(state, now_s)
        self._seen = state

    def _note_rosters(self, journal: Journal) -> None:
        """Note every roster that is being committed: states do not contain it."""
        commit = journal.commit

        def noted(agreed: Header, *arguments: Any, **keywords: Any) -> None:
            assert agreed.roster is not None
            self._rosters[agreed.fragment, agreed.round] = agreed.roster
            commit(agreed, *arguments, **keywords)

        journal.commit = noted  # type: ignore[method-assign]  # one run's own journal

    def _trace_joins(self, seen: CoordinatorState, state: CoordinatorState) -> None:
        if state.members is seen.members:
            return
        for island, member in sorted(state.members.known.items()):
            before = seen.members.known.get(island)
            if before is None or before.incarnation != member.incarnation:
                self._silent.discard(island)
                self._emit(island, "join", f"incarnation {member.incarnation}")

    def _trace_leases(
        self, seen: CoordinatorState, state: CoordinatorState, now_s: float
    ) -> None:
        for island, member in sorted(state.members.known.items()):
            before = seen.members.known.get(island, member)
            if member.has_left:
                if not before.has_left:
                    self._emit(island, "leave", f"incarnation {member.incarnation}")
            elif island not in self._silent and not member.is_live(now_s):
                self._silent.add(island)
                self._emit(island, "lapse", f"incarnation {member.incarnation}")
            elif island in self._silent and member.lease_until_s > before.lease_until_s:
                self._silent.discard(island)
                self._emit(island, "revive", f"incarnation {member.incarnation}")

    def _trace_rounds(self, seen: CoordinatorState, state: CoordinatorState) -> None:
        self._trace_start(seen, state)
        for before, after in zip(seen.rounds, state.rounds, strict=False):
            for number in range(before.number, after.number):
                self._trace_round(before.fragment, number)

    def _trace_round(self, fragment: int, number: int) -> None:
        roster = self._rosters.pop((fragment, number), None)
        if roster is None:
            detail = f"round {number} of fragment {fragment}"
            self._emit(COORDINATOR, "recover", detail)
            return
        trace = CommitTrace.of(fragment, number, roster)
        self._emit(COORDINATOR, "commit", str(trace))

    def _trace_start(self, seen: CoordinatorState, state: CoordinatorState) -> None:
        if state.rounds and not seen.rounds:
            founder = seen.founding.island if seen.founding else COORDINATOR
            count = len(state.rounds)
            self._emit(founder, "found", f"{count} fragment{'s' * (count != 1)}")
        waited = not seen.rounds or seen.rounds[0].phase is Phase.WAITING
        if waited and state.rounds and state.rounds[0].phase is Phase.OPEN:
            num_islands = len(state.rounds[0].candidates)
            self._emit(
                COORDINATOR, "begin", f"{num_islands} island{'s' * (num_islands != 1)}"
            )

    def _trace_pause(self, state: CoordinatorState, now_s: float) -> None:
        live, quorum = state.members.live(now_s), state.settings.run.quorum
        opened = [round for round in state.rounds if round.phase is Phase.OPEN]
        is_paused = bool(opened) and all(
            len(live | round.staged.keys()) < quorum for round in opened
        )
        if is_paused != self._is_paused:
            self._is_paused = is_paused
            action = "pause" if is_paused else "resume"
            self._emit(COORDINATOR, action, f"{len(live)} live, quorum {quorum}")

    def _emit(self, subject: str, action: str, detail: str) -> None:
        self._scheduler.emit(subject, action, detail)


def trace_arrival(process: SimProcess, arrival: object) -> None:
    """Trace an island's decision about an outcome, unless all its work counted."""
    if not isinstance(arrival, AppliedOutcome):
        return
    if arrival.decision in (WorkDecision.CARRY, WorkDecision.DROP, WorkDecision.REFUSE):
        reason = f": {arrival.reason}" if arrival.reason else ""
        detail = f"at round {arrival.through}{reason}"
        process.scheduler.emit(process.name, str(arrival.decision), detail)
