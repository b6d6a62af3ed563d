"""Tells the timeline what a coordinator does, from its states and its commits.

Rule 1: it looks, and changes nothing: no message, no disk call, no event more.
Rule 2: a round that was committed in the instant of a coordinator's death is told by
        its next life, whose journal has it.
"""

from __future__ import annotations

from typing import Any

from atoll.coordinator import Service
from atoll.island.arrivals import Arrival
from atoll.journal import Journal
from atoll.protocol import How
from atoll.protocol.rounds import Phase
from atoll.protocol.run_state import CoordinatorState
from atoll.simulate.process import Process
from atoll.simulate.scheduler import Scheduler
from atoll.simulate.storms import COORDINATOR
from atoll.simulate.trace import Commit
from atoll.wire import Header, Roster


class Herald:
    """Looks at a coordinator after every event, and tells what is new."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._seen: CoordinatorState | None = None
        self._silent: set[str] = set()
        """Members whose lease ran out."""

        self._is_paused = False
        self._rosters: dict[tuple[int, int], Roster] = {}
        """Of rounds that are being committed, by fragment and round."""

    def opened(self, service: Service, now_s: float) -> None:
        """Tell that a life of the coordinator has its journal open."""
        if self._scheduler.trace is None:
            return
        self._overhear(service.journal)
        state = service.state
        rounds = " ".join(str(round.number - 1) for round in state.rounds)
        self._tell(COORDINATOR, "open", f"rounds {rounds}" if rounds else "no weights")
        if self._seen is not None:
            self._tell_joins(self._seen, state)
            self._tell_rounds(self._seen, state)
        # Every journalled member has a new lease now, which says nothing of it.
        self._seen = state
        self.look(state, now_s)

    def look(self, state: CoordinatorState, now_s: float) -> None:
        """Tell what has changed since the last look."""
        if self._scheduler.trace is None:
            return
        seen = self._seen or state
        self._tell_joins(seen, state)
        self._tell_leases(seen, state, now_s)
        self._tell_rounds(seen, state)
        self._tell_pause(state, now_s)
        self._seen = state

    def _overhear(self, journal: Journal) -> None:
        """Note every roster on its way into the journal: no state keeps it."""
        commit = journal.commit

        def noted(agreed: Header, *arguments: Any, **keywords: Any) -> None:
            assert agreed.roster is not None
            self._rosters[agreed.fragment, agreed.round] = agreed.roster
            commit(agreed, *arguments, **keywords)

        journal.commit = noted  # type: ignore[method-assign]  # one run's own journal

    def _tell_joins(self, seen: CoordinatorState, state: CoordinatorState) -> None:
        if state.members is seen.members:
            return
        for island, member in sorted(state.members.known.items()):
            before = seen.members.known.get(island)
            if before is None or before.incarnation != member.incarnation:
                self._silent.discard(island)
                self._tell(island, "join", f"incarnation {member.incarnation}")

    def _tell_leases(
        self, seen: CoordinatorState, state: CoordinatorState, now_s: float
    ) -> None:
        for island, member in sorted(state.members.known.items()):
            before = seen.members.known.get(island, member)
            if member.has_left:
                if not before.has_left:
                    self._tell(island, "leave", f"incarnation {member.incarnation}")
            elif island not in self._silent and not member.is_live(now_s):
                self._silent.add(island)
                self._tell(island, "lapse", f"incarnation {member.incarnation}")
            elif island in self._silent and member.lease_until_s > before.lease_until_s:
                self._silent.discard(island)
                self._tell(island, "revive", f"incarnation {member.incarnation}")

    def _tell_rounds(self, seen: CoordinatorState, state: CoordinatorState) -> None:
        self._tell_beginning(seen, state)
        for before, after in zip(seen.rounds, state.rounds, strict=False):
            for number in range(before.number, after.number):
                self._tell_round(before.fragment, number)

    def _tell_round(self, fragment: int, number: int) -> None:
        roster = self._rosters.pop((fragment, number), None)
        if roster is None:
            about = f"round {number} of fragment {fragment}"
            self._tell(COORDINATOR, "recover", about)
            return
        verdicts = {each.island: str(each.verdict) for each in roster.entries}
        self._tell(COORDINATOR, "commit", str(Commit(fragment, number, verdicts)))

    def _tell_beginning(self, seen: CoordinatorState, state: CoordinatorState) -> None:
        if state.rounds and not seen.rounds:
            founder = seen.founding.island if seen.founding else COORDINATOR
            count = len(state.rounds)
            self._tell(founder, "found", f"{count} fragment{'s' * (count != 1)}")
        waited = not seen.rounds or seen.rounds[0].phase is Phase.WAITING
        if waited and state.rounds and state.rounds[0].phase is Phase.OPEN:
            here = len(state.rounds[0].candidates)
            self._tell(COORDINATOR, "begin", f"{here} island{'s' * (here != 1)}")

    def _tell_pause(self, state: CoordinatorState, now_s: float) -> None:
        live, quorum = state.members.live(now_s), state.settings.run.quorum
        opened = [round for round in state.rounds if round.phase is Phase.OPEN]
        is_paused = bool(opened) and all(
            len(live | round.staged.keys()) < quorum for round in opened
        )
        if is_paused != self._is_paused:
            self._is_paused = is_paused
            what = "pause" if is_paused else "resume"
            self._tell(COORDINATOR, what, f"{len(live)} live, quorum {quorum}")

    def _tell(self, who: str, what: str, about: str) -> None:
        self._scheduler.tell(who, what, about)


def tell_arrival(process: Process, arrival: Arrival) -> None:
    """Tell what an outcome makes an island do, unless all its work counted."""
    if arrival.how in (How.CARRY, How.DROP, How.REFUSE):
        reason = f": {arrival.reason}" if arrival.reason else ""
        about = f"at round {arrival.through}{reason}"
        process.scheduler.tell(process.name, str(arrival.how), about)
