"""Looks at a run after every event, and says what did not hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from atoll.exchange import Frame, Outcome
from atoll.island import Host
from atoll.island.slot import Slot
from atoll.island.vectors import Vectors
from atoll.settings import RunSettings
from atoll.simulate.invariants.bounds import check_bytes, most_bytes_in_flight
from atoll.simulate.invariants.claims import Invariant, Violation
from atoll.simulate.invariants.conservation import total
from atoll.simulate.invariants.life import Life, WatchedView
from atoll.simulate.invariants.liveness import EveryoneCounts, Progress
from atoll.simulate.invariants.referee import Referee
from atoll.simulate.invariants.rounds import Rounds
from atoll.simulate.invariants.truth import Commit, Truth
from atoll.simulate.world import World
from atoll.weights import Layout

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
    """What one life of an island is given instead of its weights, and who learns."""

    view: WatchedView
    life: Life
    learn: Callable[[Outcome | Frame], None]


class Watch:
    """The invariants of one run. `after_event` is the scheduler's hook."""

    def __init__(
        self,
        world: World,
        settings: RunSettings,
        layout: Layout,
        *,
        islands: int,
        silence_s: float,
        lease_s: float,
    ) -> None:
        self._scheduler, self._network = world.scheduler, world.network
        self.violations: list[Violation] = []
        self.truth = Truth()
        self.rounds = Rounds(self.truth, settings, layout, self.report)
        self.progress = Progress(silence_s, self.report)
        self._everyone = EveryoneCounts(self.report, lease_s=lease_s)
        self._most_bytes = most_bytes_in_flight(
            layout, islands=islands, flight_s=LONGEST_FLIGHT_S
        )
        self.referee: Referee
        """Who decides rounds; given before the first event."""

        self._held: dict[str, list[Held]] = {}
        self._touched: set[str] = set()
        """Islands that were told something in the event that runs."""

        self._lives: list[Life] = []
        self._present: dict[str, tuple[Life, float]] = {}
        """The life of each island that takes part, and since when."""

        self.opened_s: dict[int, float] = {}
        self._has_committed = False
        self.on_commit: Callable[[int], None] = lambda lowest: None
        """Told the lowest open round."""

        self.on_look: Callable[[], None] = lambda: None
        self.look_s = 0.0
        """When `on_look` is to be called next."""

    def report(self, invariant: Invariant, who: str, what: str) -> None:
        """Note a violation, and end the run: what follows from it means nothing."""
        at_s = self._scheduler.now_s
        self.violations.append(Violation(at_s, who, invariant.name, what))
        self._scheduler.stop()

    def begin(self, island: str, view: Vectors) -> Ports:
        """Return the ports of a new life."""
        life = Life(view, self.truth, self.report)
        self._lives.append(life)
        return Ports(WatchedView(view, life), life, partial(self._learn, island))

    def joined(self, life: Life, host: Host) -> None:
        """Look at an island that has entered the run."""
        life.joined(host)
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
        self.referee.look()
        if self._touched:
            # A state changes in the event in which its island is told something.
            for island in self._touched:
                for held in self._held.get(island, ()):
                    self._look(held)
            self._touched.clear()
        if self._has_committed and self.referee.opened:
            self._has_committed = False
            self.referee.judge()
            self.on_commit(min(self.referee.opened))
        if self._network.counts.bytes_in_flight > self._most_bytes:
            check_bytes(self._network, self._most_bytes, self.report)
        if self._scheduler.now_s >= self.look_s:
            self.on_look()

    def calm(self, since_s: float) -> None:
        """Nothing fails from now on."""
        self._everyone.calm(since_s)

    def committed(self, outcome: Commit) -> None:
        """Judge an outcome that nothing can change any more."""
        now_s = self._scheduler.now_s
        self.rounds.committed(outcome)
        self._judge_roster(outcome)
        self.opened_s[outcome.header.fragment] = now_s
        self.progress.committed(now_s)
        self._has_committed = True

    def conclude(self) -> dict[str, int]:
        """Look at everything once more, and return what became of the tokens."""
        if not self.violations:
            self.referee.conclude()
        fates = [each for life in self._lives for each in life.conclude()]
        return total(fates)

    def _learn(self, island: str, told: Outcome | Frame) -> None:
        self._touched.add(island)
        if isinstance(told, Outcome):
            self.rounds.learned(island, told)

    def _look(self, held: Held) -> None:
        state = held.slot.state
        if state.round != held.round:
            held.round = state.round
            self.rounds.holds(held.who, held.slot.index, state)

    def _judge_roster(self, outcome: Commit) -> None:
        opened_s = self.opened_s.get(outcome.header.fragment, 0.0)
        present = [
            island
            for island, (_, since_s) in self._present.items()
            if since_s <= opened_s
        ]
        self._everyone.committed(outcome, opened_s, present)
