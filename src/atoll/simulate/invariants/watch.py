"""Checks a run after every event, and reports each invariant that does not hold.

A referee reads the decisions: at a coordinator, or in a bucket. `RoundCheck` has the
invariants of rounds: their order, their roster, their mean and their bits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from atoll.exchange import Frame, Outcome
from atoll.exchange.bucket import view as bucket
from atoll.exchange.bucket.exchange import LONGEST_S, TRIES
from atoll.exchange.bucket.outcomes import GRACE_S
from atoll.exchange.calls import SMALL_BYTES
from atoll.exchange.coordinator import LONGEST_PAUSE_S
from atoll.island import Host
from atoll.island.fragment import IslandFragment
from atoll.island.numpy_model import VectorView
from atoll.protocol.membership import HEARTBEAT_S, LEASE_S
from atoll.settings import RunSettings
from atoll.simulate.invariants.claims import (
    BOUNDED,
    EVERYONE_COUNTS,
    PROGRESS,
    CommittedRound,
    History,
    Invariant,
    Report,
    RoundCheck,
    Violation,
)
from atoll.simulate.invariants.incarnation import (
    ObservedIncarnation,
    WatchedView,
    total,
)
from atoll.simulate.network import Network
from atoll.simulate.store import REQUEST_S
from atoll.simulate.world import (
    SimWorld,
)
from atoll.weights import (
    Layout,
)


class Referee(Protocol):
    """Reads the decisions of a run: from a journal, or from rosters in a bucket."""

    @property
    def opened(self) -> tuple[int, ...]:
        """The open round of each fragment; nothing before the run is founded."""
        ...

    @property
    def has_started(self) -> bool:
        """Whether enough islands have come, as far as can be said now."""
        ...

    @property
    def has_ended(self) -> bool:
        """Whether every fragment has committed the run's last round."""
        ...

    @property
    def digests(self) -> list[bytes]:
        """Of the state of each fragment after its last committed round."""
        ...

    def look(self) -> None:
        """Take note of what the event that just ran has changed."""
        ...

    def judge(self) -> None:
        """Judge what must hold whenever rounds were committed."""
        ...

    def conclude(self) -> None:
        """Judge the record of the run at its end."""
        ...


LONGEST_FLIGHT_S = 120.0
"""Beyond what a plan's delays and throttles together make of one message."""


@dataclass
class FragmentSeen:
    """A fragment as an island held it when it was last looked at."""

    who: str
    slot: IslandFragment
    round: int = -1


@dataclass(frozen=True)
class WatchedPorts:
    """What one life of an island is given instead of its weights, and who learns."""

    view: WatchedView
    life: ObservedIncarnation
    learn: Callable[[Outcome | Frame], None]


class InvariantWatch:
    """The invariants of one run. `after_event` is the scheduler's hook."""

    def __init__(
        self,
        world: SimWorld,
        settings: RunSettings,
        layout: Layout,
        *,
        islands: int,
        silence_s: float,
        lease_s: float,
    ) -> None:
        self._scheduler, self._network = world.scheduler, world.network
        self.violations: list[Violation] = []
        self.truth = History()
        self.rounds = RoundCheck(self.truth, settings, layout, self.report)
        self.progress = ProgressCheck(silence_s, self.report)
        self._everyone = EveryoneCounts(self.report, lease_s=lease_s)
        self._most_bytes = most_bytes_in_flight(
            layout, islands=islands, flight_s=LONGEST_FLIGHT_S
        )
        self.referee: Referee
        """Who decides rounds; given before the first event."""

        self._held: dict[str, list[FragmentSeen]] = {}
        self._touched: set[str] = set()
        """Islands that were told something in the event that runs."""

        self._lives: list[ObservedIncarnation] = []
        self._present: dict[str, tuple[ObservedIncarnation, float]] = {}
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

    def begin(self, island: str, view: VectorView) -> WatchedPorts:
        """Return the ports of a new life."""
        life = ObservedIncarnation(view, self.truth, self.report)
        self._lives.append(life)
        return WatchedPorts(WatchedView(view, life), life, partial(self._learn, island))

    def joined(self, life: ObservedIncarnation, host: Host) -> None:
        """Look at an island that has entered the run."""
        life.joined(host)
        island = host.joined.island
        now_s = self._scheduler.now_s
        self._present[island] = (life, now_s)
        self._everyone.disturbed(now_s)
        self._held[island] = [FragmentSeen(island, slot) for slot in host.slots]
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

    def committed(self, outcome: CommittedRound) -> None:
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

    def _look(self, held: FragmentSeen) -> None:
        state = held.slot.state
        if state.round != held.round:
            held.round = state.round
            self.rounds.holds(held.who, held.slot.index, state)

    def _judge_roster(self, outcome: CommittedRound) -> None:
        opened_s = self.opened_s.get(outcome.header.fragment, 0.0)
        present = [
            island
            for island, (_, since_s) in self._present.items()
            if since_s <= opened_s
        ]
        self._everyone.committed(outcome, opened_s, present)


STRANDS = 3
"""An island has at most so many calls under way: sending, receiving, a heartbeat."""

FRAME_BYTES = 4096
"""More than a frame's header with its roster takes."""


def most_bytes_in_flight(layout: Layout, *, islands: int, flight_s: float) -> int:
    """Return how many bytes can be under way at once.

    Each of an island's strands has one call or its answer under way, as large as the
    largest frame, a state: three fp32 vectors at most. It asks again after a timeout
    of at least 4 s, while what it sent before may be under way for `flight_s`; and
    any message may be there twice.
    """
    largest = SMALL_BYTES + FRAME_BYTES + 12 * sum(each.elements for each in layout)
    attempts = 2 + int(flight_s / 4.0)
    return 2 * islands * STRANDS * attempts * 2 * largest


def check_bytes(network: Network, most: int, report: Report) -> None:
    """Report more bytes under way than `most`."""
    if network.counts.bytes_in_flight > most:
        report(
            BOUNDED,
            "network",
            f"{network.counts.bytes_in_flight} bytes are under way, above {most}",
        )


CALL_S = 6.0
"""The longest that a call waits for its answer: a long poll of 2 s, and 4 s more."""

FIRST_ROUNDS = 2
"""After a storm, an island that missed a round is back in step in the one after."""


def longest_silence_s(settings: RunSettings, *, step_s: float) -> float:
    """Return how long a fragment with a connected quorum may go without a commit.

    In the worst case the open round waits for an island that has just died: its lease
    runs out after `LEASE_S`, or it is late after `deadline_max_s`, whichever the
    coordinator's clock (up to a tenth slow) sees last. The others may each have to
    notice that the coordinator is back (`LONGEST_PAUSE_S` and one call), learn of an
    outcome they missed (one call), and then train a whole window before they seal,
    which the slowest clock does not lengthen since steps take true time. An update
    that was lost goes again with the next long poll: one more call and pause.
    """
    window_s = settings.sync.sync_every * step_s
    waits_s = 1.1 * (LEASE_S + HEARTBEAT_S + settings.limits.deadline_max_s)
    return waits_s + 2 * window_s + 3 * (CALL_S + LONGEST_PAUSE_S)


def longest_wait_s(settings: RunSettings, *, step_s: float, islands: int) -> float:
    """Return how long a fragment of a run in a bucket may go without a roster.

    As with a coordinator, but a lease is longer, what a member says is read with the
    next heartbeat (twice, when islands wait for each other), a look at a round may be
    `LONGEST_S` away, an island's own request may be the last of its tries, and each
    owner of a shard may have gone before it made it.
    """
    window_s = settings.sync.sync_every * step_s
    beat_s = bucket.BEAT_S + REQUEST_S
    waits_s = 1.1 * (bucket.LEASE_S + 3 * beat_s + settings.limits.deadline_max_s)
    looks_s = 3 * (LONGEST_S + TRIES.longest_s + REQUEST_S)
    return waits_s + 2 * window_s + looks_s + islands * (GRACE_S + REQUEST_S)


class ProgressCheck:
    """Watches that rounds are committed while nothing is wrong."""

    def __init__(self, bound_s: float, report: Report) -> None:
        self._bound_s, self._report = bound_s, report
        self._last_s = 0.0
        self.due_s = float("inf")
        """When the next commit must have happened."""

    def committed(self, now_s: float) -> None:
        self._last_s = now_s
        if self.due_s < float("inf"):
            self.due_s = now_s + self._bound_s

    def calm(self, since_s: float) -> None:
        """From now on a quorum is connected, and nothing fails."""
        self.due_s = max(since_s, self._last_s) + self._bound_s

    def overdue(self, now_s: float) -> None:
        """Report that nothing was committed by `due_s`."""
        self._report(
            PROGRESS,
            "run",
            f"no round was committed between {self._last_s:.3f} s and {now_s:.3f} s, "
            f"although a quorum was connected: longer than {self._bound_s:.3f} s",
        )
        self.due_s = float("inf")


class EveryoneCounts:
    """Watches the rounds that open after the storm and a lease."""

    def __init__(self, report: Report, *, lease_s: float = LEASE_S) -> None:
        self._report, self._lease_s = report, lease_s
        self._calm_s = float("inf")
        self._seen: dict[int, int] = {}

    def calm(self, since_s: float) -> None:
        """Nothing has failed since; a lease later nobody is presumed alive in error."""
        self._calm_s = since_s + self._lease_s

    def disturbed(self, now_s: float) -> None:
        """Somebody came or went: two rounds pass until everyone is in step again."""
        if now_s > self._calm_s:
            self._calm_s = now_s
        self._seen.clear()

    def committed(
        self, commit: CommittedRound, opened_s: float, islands: Collection[str]
    ) -> None:
        """Judge a commit; `islands` were live members all along."""
        header = commit.header
        if opened_s < self._calm_s:
            return
        self._seen[header.fragment] = self._seen.get(header.fragment, 0) + 1
        if self._seen[header.fragment] <= FIRST_ROUNDS:
            return
        assert header.roster is not None
        missing = sorted({*islands} - {each.island for each in header.roster.counted})
        if missing:
            self._report(
                EVERYONE_COUNTS,
                ", ".join(missing),
                f"missed round {header.round} of fragment {header.fragment}, the "
                f"{self._seen[header.fragment]}th to open since {self._calm_s:.3f} s, "
                "when nothing had failed for a lease and nobody came or went",
            )
