"""Bounds: updates in memory, bytes in flight, deadlines, and time without progress.

Rounds must go on being committed, and every island must count once nothing fails.
"""

from __future__ import annotations

from collections.abc import Collection

from atoll.coordinator import Service
from atoll.exchange.bucket import view as bucket
from atoll.exchange.bucket.exchange import LONGEST_S, TRIES
from atoll.exchange.bucket.outcomes import GRACE_S
from atoll.exchange.calls import SMALL_BYTES
from atoll.exchange.coordinator import LONGEST_PAUSE_S
from atoll.protocol.membership import HEARTBEAT_S, LEASE_S
from atoll.protocol.rounds import Phase
from atoll.settings import RunSettings
from atoll.simulate.invariants.claims import (
    BOUNDED,
    DEADLINES_BOUNDED,
    EVERYONE_COUNTS,
    PROGRESS,
    Report,
)
from atoll.simulate.invariants.history import CommittedRound
from atoll.simulate.network import Network
from atoll.simulate.store import REQUEST_S
from atoll.weights import Layout
from atoll.wire import FrameKind

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


def check_staged(service: Service, report: Report) -> None:
    """Report an update that is held for no open round, or one island's second."""
    for round in service.state.rounds:
        known = service.state.members.known.keys()
        is_ahead = all(
            header.kind is FrameKind.DEPARTING and header.round == round.number + 1
            for header in round.ahead.values()
        )
        is_now = all(each.round == round.number for each in round.staged.values())
        if not (is_ahead and is_now and {*round.staged, *round.ahead} <= known):
            report(
                BOUNDED,
                "coordinator",
                f"round {round.number} of fragment {round.fragment} holds updates of "
                "other rounds, or of strangers",
            )
    held = sum(len(each.staged) + len(each.ahead) for each in service.state.rounds)
    if len(service._spool) > held:
        report(
            BOUNDED,
            "coordinator",
            f"its spool holds {len(service._spool)} updates, and {held} are staged",
        )


def check_unconfirmed(who: str, kept: int, fragments: int, report: Report) -> None:
    """Report an island that keeps more updates than are in flight or departing."""
    if kept > 2 * fragments:
        report(
            BOUNDED,
            who,
            f"keeps {kept} updates without an outcome, of {fragments} fragments",
        )


def check_deadlines(service: Service, report: Report) -> None:
    """Report a deadline outside its bounds."""
    state, limits = service.state, service.state.settings.limits
    for round in state.rounds:
        if round.phase is not Phase.OPEN:
            continue
        for island in round.candidates:
            late_at_s = round.late_at_s(island, state.members, state.settings)
            after_s = late_at_s - round.opened_s
            # The clock shows up to some millions of seconds: a difference of sums.
            if (
                after_s < limits.deadline_min_s - 1e-6
                or late_at_s > round.waits_from_s + limits.deadline_max_s + 1e-6
            ):
                report(
                    DEADLINES_BOUNDED,
                    "coordinator",
                    f"waits {after_s:.3f} s for {island} in round {round.number} of "
                    f"fragment {round.fragment}",
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
