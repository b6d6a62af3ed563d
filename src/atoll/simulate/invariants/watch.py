"""Checks a run after every event, and reports each invariant that does not hold.

A referee reads the decisions: at a coordinator, or in a bucket. `RoundCheck` has the
invariants of rounds: their order, their roster, their mean and their bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from atoll.coordinator import Service
from atoll.errors import NonFinite
from atoll.exchange import Frame, Outcome
from atoll.island import Host
from atoll.island.fragment import IslandFragment
from atoll.island.numpy_model import VectorView
from atoll.settings import RunSettings
from atoll.simulate.invariants.bounds import (
    EveryoneCounts,
    ProgressCheck,
    check_bytes,
    most_bytes_in_flight,
)
from atoll.simulate.invariants.claims import (
    COUNTED_ONCE,
    DURABLE_FIRST,
    ROUNDS_IN_ORDER,
    SAME_OUTCOME,
    SAME_STATE,
    TRUE_MEAN,
    Invariant,
    Report,
    Violation,
)
from atoll.simulate.invariants.conservation import total
from atoll.simulate.invariants.history import (
    CommittedRound,
    History,
    IncarnationKey,
    PublishedUpdate,
)
from atoll.simulate.invariants.incarnation import ObservedIncarnation, WatchedView
from atoll.simulate.world import (
    SimWorld,
)
from atoll.weights import (
    Contribution,
    FragmentLayout,
    FragmentState,
    Layout,
    reduce,
    terms_of,
)
from atoll.wire import codec


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


COORDINATOR = "coordinator"


class RoundCheck:
    """Judges every commit, every restart, and whatever islands come to hold."""

    def __init__(
        self, truth: History, settings: RunSettings, layout: Layout, report: Report
    ) -> None:
        self._truth, self._settings, self._layout = truth, settings, layout
        self._report = report
        self._attempts: dict[tuple[int, int], CommittedRound] = {}
        self._founded: dict[int, bytes] = {}
        self._counted: dict[bytes, int] = {}
        self._steps: dict[tuple[IncarnationKey, int], int] = {}

    def attempted(self, commit: CommittedRound) -> None:
        """Remember an outcome that the disk may yet refuse."""
        self._attempts[commit.header.fragment, commit.header.round] = commit

    def committed(self, commit: CommittedRound) -> None:
        """Judge an outcome that the journal calls durable."""
        self._require_next(commit)
        self._abandon(commit)
        self._truth.commit(commit)
        for update in self._require_published(commit):
            self._require_once(commit, update)
        self._require_mean(commit)

    def opened(self, service: Service, *, was_put_back: bool = False) -> None:
        """Judge what a coordinator knows that has just begun to live.

        One whose disk was put back may know less than was committed, and its journal
        will have gaps; everything else holds all the same.
        """
        self._truth.has_gaps |= was_put_back
        for fragment, state in enumerate(service.weights):
            last = self._truth.last.get(fragment, 0)
            if state.round < last and not was_put_back:
                self._report(
                    DURABLE_FIRST,
                    COORDINATOR,
                    f"came back at round {state.round} of fragment {fragment}, and "
                    f"round {last} was committed",
                )
            attempt = self._attempts.get((fragment, last + 1))
            if state.round == last + 1 and attempt is not None:
                # The disk kept what it had refused: the record came back whole.
                self._truth.commit(attempt)
            self.holds(COORDINATOR, fragment, state)

    def founded(self, weights: Sequence[FragmentState]) -> None:
        """Take the run's first weights as everybody's."""
        for fragment, state in enumerate(weights):
            if state.round == 0:
                self._founded.setdefault(fragment, state.digest)

    def holds(self, who: str, fragment: int, state: FragmentState) -> None:
        """Judge the state that somebody holds of a fragment."""
        if state.round == 0:
            expected = self._founded.get(fragment, state.digest)
        else:
            commit = self._truth.commits.get((fragment, state.round))
            if commit is None:
                self._report(
                    DURABLE_FIRST,
                    who,
                    f"holds round {state.round} of fragment {fragment}, which was "
                    "never committed",
                )
                return
            expected = commit.digest_after
        if state.digest != expected:
            self._report(
                SAME_STATE,
                who,
                f"holds {state.digest.hex()[:12]} at round {state.round} of fragment "
                f"{fragment}, where others hold {expected.hex()[:12]}",
            )

    def learned(self, who: str, outcome: Outcome) -> None:
        """Judge an outcome that an island was told."""
        header = outcome.agreed.header
        commit = self._truth.commits.get((header.fragment, header.round))
        if commit is None:
            self._report(
                DURABLE_FIRST,
                who,
                f"was told of round {header.round} of fragment {header.fragment}, "
                "which was never committed",
            )
            return
        has_same_body = not outcome.has_body or (
            outcome.agreed.body.tobytes() == commit.body
        )
        has_same_header = header is commit.header or header == commit.header
        if not header.is_sealed:
            # The body is collected, and what was known of it: the rest stays.
            known = header.sealed(
                body_bytes=commit.header.body_bytes, pieces=commit.header.pieces
            )
            has_same_header = known == commit.header
        if not has_same_header or not has_same_body:
            self._report(
                SAME_OUTCOME,
                who,
                f"was told another outcome of round {header.round} of fragment "
                f"{header.fragment} than was committed",
            )

    def ended(self, service: Service) -> None:
        """Judge the journal at the end: all rounds, each once."""
        if self._truth.has_gaps:
            return
        for fragment, known in enumerate(service.journal.recorded.fragments):
            rounds = sorted(known.positions)
            if rounds != list(range(1, self._truth.last.get(fragment, 0) + 1)):
                self._report(
                    ROUNDS_IN_ORDER,
                    COORDINATOR,
                    f"its journal has rounds {rounds} of fragment {fragment}",
                )

    def _require_next(self, commit: CommittedRound) -> None:
        fragment, round = commit.header.fragment, commit.header.round
        last = self._truth.last.get(fragment, 0)
        last_round = self._settings.run.end_rounds
        is_beyond = last_round is not None and round > last_round
        is_next = round == last + 1 or self._truth.has_gaps
        if not is_next or is_beyond:
            self._report(
                ROUNDS_IN_ORDER,
                COORDINATOR,
                f"committed round {round} of fragment {fragment} after round {last}; "
                f"the last one is {last_round}",
            )

    def _abandon(self, commit: CommittedRound) -> None:
        """Forget what was counted in rounds that are lost and made anew.

        A journal was put back, and no island is left that has taken them.
        """
        fragment, round = commit.header.fragment, commit.header.round
        if round > self._truth.last.get(fragment, 0):
            return
        self._steps = {k: v for k, v in self._steps.items() if k[1] != fragment}
        for digest, update in self._truth.updates.items():
            header = update.header
            if header.fragment == fragment and header.round >= round:
                self._counted.pop(digest, None)

    def _require_published(self, commit: CommittedRound) -> list[PublishedUpdate]:
        """Return the counted updates, all of which islands did publish."""
        assert commit.header.roster is not None
        updates = []
        for entry in commit.header.roster.counted:
            update = self._truth.updates.get(entry.digest)
            key = (commit.header.fragment, commit.header.round, entry.island)
            if update is None or key != _key(update):
                self._report(
                    COUNTED_ONCE,
                    entry.island,
                    f"round {key[1]} of fragment {key[0]} counts an update that was "
                    "never published for it",
                )
            else:
                updates.append(update)
        return updates

    def _require_once(self, commit: CommittedRound, update: PublishedUpdate) -> None:
        header, key = update.header, (update.life, update.header.fragment)
        origin = self._truth.origins.get(update.digest, update.digest)
        before = self._counted.setdefault(origin, header.round)
        steps = header.progress.inner_steps
        # An update that departs may hold no steps, but what a codec had left over. And
        # a journal that was put back may give an incarnation to a second life. What is
        # brought along may be older than what the same island left after it.
        may_go_back = self._truth.has_gaps or origin != update.digest
        goes_back = steps < self._steps.get(key, 0) and not may_go_back
        if before != header.round or goes_back:
            self._report(
                COUNTED_ONCE,
                header.island,
                f"round {header.round} of fragment {header.fragment} counts inner "
                f"steps up to {steps}, and {self._steps.get(key, 0)} had counted in "
                f"round {before} or before",
            )
        if origin == update.digest:
            self._steps[key] = steps

    def _require_mean(self, commit: CommittedRound) -> None:
        header, layout = commit.header, self._layout[commit.header.fragment]
        assert header.roster is not None
        parts = [
            Contribution(
                codec(update.header.codec),
                np.frombuffer(update.body, np.uint8),
                update.header.weight,
            )
            for entry in header.roster.counted
            if (update := self._truth.updates.get(entry.digest)) is not None
        ]
        mean = self._mean(layout, parts)
        if mean != commit.body:
            self._report(
                TRUE_MEAN,
                COORDINATOR,
                f"the body of round {header.round} of fragment {header.fragment} is "
                f"not the mean of its {len(parts)} counted updates",
            )

    def _mean(self, layout: FragmentLayout, parts: list[Contribution]) -> bytes:
        """Return the agreed body of these updates; a void round has none."""
        if not parts:
            return b""
        terms = terms_of(layout, self._settings)
        try:
            return reduce(layout, parts, down=terms.down, merge=terms.merge).tobytes()
        except NonFinite:
            return b""


def _key(update: PublishedUpdate) -> tuple[int, int, str]:
    return update.header.fragment, update.header.round, update.header.island
