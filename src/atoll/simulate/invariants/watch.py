"""Checks a run after every event, and reports each invariant that does not hold.

A referee reads the decisions: at a coordinator, or in a bucket. Bounds are checked
here: bytes in flight, time without progress, and that every island counts again once
nothing fails.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from atoll.data import RowCounts
from atoll.exchange import Frame, Outcome
from atoll.exchange.bucket import view as bucket
from atoll.exchange.bucket.exchange import LONGEST_S
from atoll.exchange.bucket.outcomes import GRACE_S
from atoll.exchange.calls import SMALL_BYTES
from atoll.island import Host
from atoll.island.fragment import IslandFragment
from atoll.island.numpy_model import VectorView
from atoll.protocol.membership import HEARTBEAT_S, LEASE_S
from atoll.retry import COORDINATOR_CALL, STORE_OUTAGE
from atoll.settings import RunSettings
from atoll.simulate.invariants import claims
from atoll.simulate.invariants.incarnation import (
    ObservedIncarnation,
    WatchedView,
    total,
)
from atoll.simulate.invariants.listings import EveryoneListed
from atoll.simulate.invariants.rows import RowCheck
from atoll.simulate.network import Network
from atoll.simulate.store import REQUEST_S
from atoll.simulate.world import SimWorld
from atoll.weights import Layout
from atoll.wire import Header, Roster, Verdict


class Referee(Protocol):
    """Reads the decisions of a run: from a journal, or from rosters in a bucket."""

    @property
    def opened(self) -> tuple[int, ...]:
        """The open round of each fragment; empty before the run is founded."""
        ...

    @property
    def has_started(self) -> bool:
        """Whether enough islands have joined, as far as is known now."""
        ...

    @property
    def is_ending(self) -> bool:
        """Whether the last round of a fragment is open, and is not committed."""
        ...

    @property
    def has_ended(self) -> bool:
        """Whether every fragment has committed the run's last round."""
        ...

    @property
    def digests(self) -> list[bytes]:
        """The digest of each fragment's state after its last committed round."""
        ...

    @property
    def rows(self) -> RowCounts | None:
        """The rows in each state; None in a run that deals out none."""
        ...

    def look(self) -> None:
        """Note the changes of the event that just ran."""
        ...

    def judge(self) -> None:
        """Check the invariants that hold after every commit."""
        ...

    def conclude(self) -> None:
        """Check the record of the run at its end."""
        ...


LONGEST_FLIGHT_S = 120.0
"""Longer than a message takes under a plan's delays and throttles together."""


@dataclass
class FragmentSeen:
    """A fragment of an island, and its round at the last check."""

    island: str
    slot: IslandFragment
    round: int = -1


@dataclass(frozen=True)
class WatchedPorts:
    """Watched weights of one incarnation, its record, and a callback for outcomes."""

    view: WatchedView
    incarnation: ObservedIncarnation
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
        self.violations: list[claims.Violation] = []
        self.history = claims.History()
        self.rounds = claims.RoundCheck(self.history, settings, layout, self.report)
        self.rows = RowCheck(
            self.history, settings, self.report, num_fragments=len(layout)
        )
        self.progress = ProgressCheck(silence_s, self.report)
        self._everyone: EveryoneCounts | EveryoneListed
        if settings.sync.is_async:
            self._everyone = EveryoneListed(
                self.history, self.report, lease_s=lease_s, longest_s=2 * silence_s
            )
        else:
            self._everyone = EveryoneCounts(
                self.report,
                lease_s=lease_s,
                may_miss_one=settings.sync.dynamic_local_updates,
            )
        self._max_bytes = max_bytes_in_flight(
            layout, islands=islands, flight_s=LONGEST_FLIGHT_S
        )
        self.referee: Referee
        """Reads the decisions; set before the first event."""

        self._fragments: dict[str, list[FragmentSeen]] = {}
        self._touched: set[str] = set()
        """Islands that received an outcome or a state in the event that runs."""

        self._incarnations: list[ObservedIncarnation] = []
        self._present: dict[str, tuple[ObservedIncarnation, float]] = {}
        """The incarnation of each island that takes part, and since when."""

        self.opened_s: dict[int, float] = {}
        self._has_committed = False
        self.on_commit: Callable[[int], None] = lambda lowest: None
        """Called with the lowest open round."""

        self.on_look: Callable[[], None] = lambda: None
        self.look_s = 0.0
        """Time of the next call of `on_look`."""

    def report(self, invariant: claims.Invariant, subject: str, detail: str) -> None:
        """Note a violation, and stop the run: later violations mean nothing."""
        at_s = self._scheduler.now_s
        self.violations.append(claims.Violation(at_s, subject, invariant.name, detail))
        self._scheduler.stop()

    def begin(self, island: str, view: VectorView) -> WatchedPorts:
        """Return the ports of a new incarnation."""
        incarnation = ObservedIncarnation(
            view, self.history, self.report, self._acknowledged
        )
        self._incarnations.append(incarnation)
        return WatchedPorts(
            WatchedView(view, incarnation), incarnation, partial(self._learn, island)
        )

    def joined(self, incarnation: ObservedIncarnation, host: Host) -> None:
        """Start to check an island that has joined."""
        incarnation.joined(host)
        island = host.joined.island
        now_s = self._scheduler.now_s
        self._present[island] = (incarnation, now_s)
        self._everyone.disturbed(now_s)
        self._fragments[island] = [FragmentSeen(island, slot) for slot in host.slots]
        self._touched.add(island)

    def withdraw(self, island: str, *, fate: str) -> None:
        """Stop checking an island that has left or died."""
        if island in self._present:
            incarnation, _ = self._present.pop(island)
            incarnation.fate = fate
            self._everyone.disturbed(self._scheduler.now_s)
            if fate.startswith("died"):
                self.rows.died(island)
        self._fragments.pop(island, None)

    @contextmanager
    def drawing(self, incarnation: ObservedIncarnation) -> Iterator[None]:
        """Expect no update from an island while it waits for rows."""
        began_s, incarnation.rows.is_waiting = self._scheduler.now_s, True
        yield
        incarnation.rows.is_waiting = False
        if self._scheduler.now_s > began_s:
            self._everyone.disturbed(self._scheduler.now_s)

    def after_event(self) -> None:
        self.referee.look()
        if self._touched:
            # A state changes only in an event in which its island receives a message.
            for island in self._touched:
                for fragment in self._fragments.get(island, ()):
                    self._look(fragment)
            self._touched.clear()
        if self._has_committed and self.referee.opened:
            self._has_committed = False
            self.referee.judge()
            self.on_commit(min(self.referee.opened))
        if self._network.counts.bytes_in_flight > self._max_bytes:
            check_bytes(self._network, self._max_bytes, self.report)
        if self._scheduler.now_s >= self.look_s:
            self.on_look()

    def calm(self, since_s: float) -> None:
        """Note that no fault acts from now on."""
        self._everyone.calm(since_s)

    def committed(self, outcome: claims.CommittedRound) -> None:
        """Check a committed outcome."""
        now_s = self._scheduler.now_s
        self.rounds.committed(outcome)
        self.rows.committed()
        self._judge_roster(outcome)
        self.opened_s[outcome.header.fragment] = now_s
        self.progress.committed(now_s)
        self._has_committed = True

    def conclude(self) -> dict[str, int]:
        """Check the run at its end, and return the sums of tokens by outcome."""
        if not self.violations:
            self.referee.conclude()
        fates = [
            fate
            for incarnation in self._incarnations
            for fate in incarnation.conclude()
        ]
        return total(fates)

    def _acknowledged(self, header: Header) -> None:
        """Note that an island knows its update as staged."""
        if isinstance(self._everyone, EveryoneListed):
            self._everyone.acknowledged(header, self._scheduler.now_s)

    def _learn(self, island: str, message: Outcome | Frame) -> None:
        self._touched.add(island)
        if isinstance(message, Outcome):
            self.rounds.learned(island, message)

    def _look(self, fragment: FragmentSeen) -> None:
        state = fragment.slot.state
        if state.round != fragment.round:
            fragment.round = state.round
            self.rounds.holds(fragment.island, fragment.slot.index, state)

    def _judge_roster(self, outcome: claims.CommittedRound) -> None:
        opened_s = self.opened_s.get(outcome.header.fragment, 0.0)
        present = [
            island
            for island, (incarnation, since_s) in self._present.items()
            if since_s <= opened_s and not incarnation.rows.is_waiting
        ]
        self._everyone.committed(outcome, opened_s, present)


STRANDS = 3
"""Calls that an island has in flight at most: sending, receiving, a heartbeat."""

FRAME_BYTES = 4096
"""Upper bound of the size of a frame's header with its roster."""


def max_bytes_in_flight(layout: Layout, *, islands: int, flight_s: float) -> int:
    """Return the upper bound of the bytes in flight.

    Each of an island's strands has one call or its answer in flight, as large as the
    largest frame, a state: three fp32 vectors at most. It repeats a call after a
    timeout of at least 4 s, while earlier messages may be in flight for `flight_s`; and
    any message may be duplicated.
    """
    largest = (
        SMALL_BYTES + FRAME_BYTES + 12 * sum(fragment.elements for fragment in layout)
    )
    attempts = 2 + int(flight_s / 4.0)
    return 2 * islands * STRANDS * attempts * 2 * largest


def check_bytes(network: Network, max_bytes: int, report: claims.Report) -> None:
    """Report more bytes in flight than `max_bytes`."""
    if network.counts.bytes_in_flight > max_bytes:
        report(
            claims.BOUNDED,
            "network",
            f"{network.counts.bytes_in_flight} bytes are in flight, above {max_bytes}",
        )


CALL_S = 6.0
"""Longest timeout of a call: a long poll of 2 s, and 4 s more."""

FIRST_ROUNDS = 2
"""An island that missed a round after a storm counts again in the next one."""


def longest_silence_s(settings: RunSettings, *, step_s: float) -> float:
    """Return the longest time without a commit of a fragment with a connected quorum.

    In the worst case the open round waits for an island that has just died: its lease
    runs out after `LEASE_S`, or it is late after `deadline_max_s`, whichever the
    coordinator's clock (up to a tenth slow) reaches last. The others may each have to
    notice that the coordinator has restarted (a pause and one call), fetch an outcome
    they missed (one call), and then train a full window before they seal,
    which the slowest clock does not lengthen since steps take true time. An update
    that was lost is sent again with the next long poll: one more call and pause.
    An asynchronous round waits a grace instead of a deadline, unless it is the last.
    """
    window_s = settings.sync.sync_every * step_s
    patience_s = settings.limits.deadline_max_s
    if settings.sync.is_async:
        patience_s = longest_grace_s(settings, step_s=step_s)
    waits_s = 1.1 * (LEASE_S + HEARTBEAT_S + patience_s)
    return waits_s + 2 * window_s + 3 * (CALL_S + COORDINATOR_CALL.longest_s)


def longest_grace_s(settings: RunSettings, *, step_s: float) -> float:
    """Return the longest time for which an asynchronous round waits for others."""
    grace_s = settings.asynchronous.grace_s
    if grace_s is None:
        grace_s = settings.sync.overlap_steps * step_s / 2
    return grace_s


def longest_wait_s(settings: RunSettings, *, step_s: float, islands: int) -> float:
    """Return the longest time without a roster of a fragment in a bucket.

    As with a coordinator, but a lease is longer, a member's document is read with the
    next heartbeat (twice, when islands wait for each other), the next poll of a round
    may be `LONGEST_S` away, an island's own request may be the last of its retries, and
    each owner of a shard may have died before it wrote it.
    """
    window_s = settings.sync.sync_every * step_s
    beat_s = bucket.BEAT_S + REQUEST_S
    waits_s = 1.1 * (bucket.LEASE_S + 3 * beat_s + settings.limits.deadline_max_s)
    looks_s = 3 * (LONGEST_S + STORE_OUTAGE.longest_s + REQUEST_S)
    return waits_s + 2 * window_s + looks_s + islands * (GRACE_S + REQUEST_S)


class ProgressCheck:
    """Checks that rounds are committed while no fault acts."""

    def __init__(self, bound_s: float, report: claims.Report) -> None:
        self._bound_s, self._report = bound_s, report
        self._last_s = 0.0
        self.due_s = float("inf")
        """Deadline of the next commit."""

    def committed(self, now_s: float) -> None:
        self._last_s = now_s
        if self.due_s < float("inf"):
            self.due_s = now_s + self._bound_s

    def calm(self, since_s: float) -> None:
        """Note that from now on a quorum is connected, and no fault acts."""
        self.due_s = max(since_s, self._last_s) + self._bound_s

    def overdue(self, now_s: float) -> None:
        """Report that no round was committed by `due_s`."""
        self._report(
            claims.PROGRESS,
            "run",
            f"no round was committed between {self._last_s:.3f} s and {now_s:.3f} s, "
            f"although a quorum was connected: longer than {self._bound_s:.3f} s",
        )
        self.due_s = float("inf")


class EveryoneCounts:
    """Checks the rounds that open a lease after the last fault."""

    def __init__(
        self,
        report: claims.Report,
        *,
        lease_s: float = LEASE_S,
        may_miss_one: bool = False,
    ) -> None:
        self._report, self._lease_s = report, lease_s
        self._may_miss_one = may_miss_one
        """Whether an island may be late once: a deadline is learned from arrivals, and
        these are less regular when windows change."""

        self._calm_s = float("inf")
        self._seen: dict[int, int] = {}
        self._missed: dict[int, set[str]] = {}
        """The islands that missed the last round of a fragment."""

    def calm(self, since_s: float) -> None:
        """Note the end of all faults; a lease later no dead island has a lease."""
        self._calm_s = since_s + self._lease_s

    def disturbed(self, now_s: float) -> None:
        """Note a join or an end: two rounds pass until every island counts again."""
        if now_s > self._calm_s:
            self._calm_s = now_s
        self._seen.clear()

    def committed(
        self, commit: claims.CommittedRound, opened_s: float, islands: Collection[str]
    ) -> None:
        """Check a commit; `islands` were live members since the round opened."""
        header = commit.header
        if opened_s < self._calm_s:
            return
        self._seen[header.fragment] = self._seen.get(header.fragment, 0) + 1
        if self._seen[header.fragment] <= FIRST_ROUNDS:
            return
        assert header.roster is not None
        missed = {*islands} - _judged(header.roster)
        again = missed & self._missed.get(header.fragment, set())
        self._missed[header.fragment] = missed
        missing = sorted(again if self._may_miss_one else missed)
        if missing:
            self._report(
                claims.EVERYONE_COUNTS,
                ", ".join(missing),
                f"missed round {header.round} of fragment {header.fragment}, the "
                f"{self._seen[header.fragment]}th to open since {self._calm_s:.3f} s, "
                "when no fault had acted for a lease and no island joined or left",
            )


def _judged(roster: Roster) -> set[str]:
    """Return the islands that count, or whose update was refused by its size."""
    return {
        entry.island
        for entry in roster.entries
        if entry.verdict is Verdict.COUNTED or entry.reason.startswith("norm: ")
    }
