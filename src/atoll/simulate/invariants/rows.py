"""The rows of a run that deals them out, as the simulator sees them.

`RowCheck` has its own account of the turns that claims were answered with, that rosters
list and that releases return. It is never copied from the run's ledger, which is
compared with it.

Rule 1: an island holds the turns of its answered claims until the run releases them.
Rule 2: a release needs an island that has left or is silent, and no update of it in an
        open round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from atoll.data import RowLedger, RunOrder, Spans
from atoll.data.order import I64
from atoll.data.spans import EMPTY, intersection, is_packed, union
from atoll.protocol.coordinator_state import CoordinatorState
from atoll.settings import RunSettings
from atoll.simulate.invariants.claims import (
    ROWS_ADD_UP,
    ROWS_HELD,
    ROWS_NAMED,
    ROWS_ONCE,
    CommittedRound,
    History,
    Report,
)
from atoll.simulate.storms import COORDINATOR
from atoll.wire import Roster, RosterEntry, Verdict

REFUSED_DATA = "data: "
"""Begins the reason of an update that is refused for its rows."""


class RowCheck:
    """Checks claims, releases, rosters and the ledger of one run."""

    def __init__(
        self,
        history: History,
        settings: RunSettings,
        report: Report,
        *,
        num_fragments: int,
    ) -> None:
        self._history, self._settings, self._report = history, settings, report
        self._rosters: list[list[Roster]] = [[] for _ in range(num_fragments)]
        """By fragment, in the order of rounds."""

        self._counted = [EMPTY] * num_fragments
        self._refused = [EMPTY] * num_fragments
        self._holdings: dict[str, Spans] = {}
        """By island: answered, and not released."""

        self._returned: dict[str, Spans] = {}
        """By island: released."""

        self._answers: dict[tuple[str, int], Spans] = {}
        """By island and number of the claim."""

        self._excused: set[str] = set()
        """Islands that have died, or were silent when the run ended with its data."""

        self._has_ended = False

    def answered(
        self, island: str, number: int, spans: Spans, state: CoordinatorState
    ) -> None:
        """Check the turns that a claim is answered with."""
        if not spans or self._history.has_gaps:
            return
        before = self._answers.get((island, number))
        if before is not None:
            if before != spans:
                detail = f"claim {number} has {_text(spans)} after {_text(before)}"
                self._report(ROWS_HELD, island, detail)
            return
        self._answers[island, number] = spans
        self._require_uncounted(island, spans)
        self._require_unheld(island, spans, state)
        self._holdings[island] = self._holdings.get(island, EMPTY) | spans

    def released(self, state: CoordinatorState, now_s: float) -> None:
        """Check the releases since the last call: of whom, and when."""
        if state.ledger is None or self._history.has_gaps:
            return
        for island in self._holdings.keys() - state.ledger.holdings.keys():
            stands = standing_turns(state).get(island, EMPTY)
            is_live = island in state.members.live(now_s)
            if stands or is_live:
                cause = f"its updates of {_text(stands)} stand" if stands else "is live"
                self._report(ROWS_HELD, island, f"its rows are released, and {cause}")
            self._returned[island] = self._returned.get(island, EMPTY) | (
                self._holdings.pop(island)
            )

    def opened(self, state: CoordinatorState, now_s: float) -> None:
        """Check the ledger of a coordinator that has started."""
        self.committed()
        self.released(state, now_s)
        if state.ledger is None or self._history.has_gaps:
            return
        settled = self._settled
        for island, spans in self._holdings.items():
            missing = spans - state.ledger.holdings.get(island, EMPTY) - settled
            if missing:
                self._report(
                    ROWS_HELD,
                    COORDINATOR,
                    f"has started without {_text(missing)}, which claims of {island} "
                    "were answered with",
                )
        self.judge(state.ledger)

    def committed(self) -> None:
        """Check the rosters of rounds that were committed since the last call."""
        for fragment, rosters in enumerate(self._rosters):
            last = self._history.last.get(fragment, 0)
            if self._history.has_gaps and len(rosters) >= last > 0:
                self._forget(fragment, last - 1)
            while len(rosters) < last:
                commit = self._history.commits[fragment, len(rosters) + 1]
                self._settle(commit)

    def hold(self, holdings: Mapping[str, Spans]) -> None:
        """Take the rows of each island by the log of claims, as a closer has read it.

        In a bucket islands are not answered by one process: the log is the account.
        """
        self._holdings = dict(holdings)

    def ended_in_bucket(self) -> None:
        """Note that its data has ended a run in a bucket; rows in hand are named."""
        self._has_ended = ends_with_data(self._settings)
        self._excused |= self._holdings.keys()

    def judge(self, ledger: RowLedger | None) -> None:
        """Compare the run's ledger with this account after a commit."""
        if ledger is None or self._history.has_gaps:
            return
        for fragment, counted in enumerate(ledger.counted):
            if counted != self._counted[fragment]:
                self._report(
                    ROWS_ADD_UP,
                    COORDINATOR,
                    f"its ledger has {_text(counted)} as counted in fragment "
                    f"{fragment}, and rosters have {_text(self._counted[fragment])}",
                )
        self._require_sum(ledger)

    def died(self, island: str) -> None:
        """Note that an island has died: its rows may be left at the end."""
        self._excused.add(island)

    def ending(self, state: CoordinatorState, now_s: float) -> None:
        """Note the islands that are not live when the run ends with its data."""
        if not self._has_ended and ends_with_data(self._settings):
            self._has_ended = True
            self._excused |= self._holdings.keys() - state.members.live(now_s)

    def conclude(self, ledger: RowLedger | None) -> None:
        """Check that every row is trained or named, if the run ended with its data."""
        if ledger is None or ledger.total is None or self._history.has_gaps:
            return
        self._require_sum(ledger)
        if not self._has_ended or not self._has_committed_all:
            return
        states = ledger.states
        rest = Spans([(0, ledger.total)]) - states.trained - states.refused
        rest = rest - states.partly
        rest = rest - union(self._last_held(island) for island in self._excused)
        if rest:
            in_hand = {
                name: _text(spans & rest) for name, spans in self._holdings.items()
            }
            self._report(
                ROWS_NAMED,
                COORDINATOR,
                f"{_text(rest)} are not trained at the end of the data, nor held by an "
                f"island that died: in hand {in_hand}, dead {sorted(self._excused)}",
            )

    @property
    def _has_committed_all(self) -> bool:
        """Whether every fragment has committed its last round, as far as is known."""
        fragments = range(len(self._rosters))
        return all(self._history.has_ended(fragment) for fragment in fragments)

    @property
    def _settled(self) -> Spans:
        """The turns that every fragment has counted or refused."""
        return intersection(
            counted | refused
            for counted, refused in zip(self._counted, self._refused, strict=True)
        )

    def _last_held(self, island: str) -> Spans:
        holding = self._holdings.get(island, EMPTY)
        return holding | self._returned.get(island, EMPTY)

    def _require_uncounted(self, island: str, spans: Spans) -> None:
        again = spans & union((*self._counted, *self._refused))
        if again:
            detail = f"is dealt {_text(again)}, which a roster has listed already"
            self._report(ROWS_ONCE, island, detail)

    def _require_unheld(
        self, island: str, spans: Spans, state: CoordinatorState
    ) -> None:
        for other, turns in self._holdings.items():
            if other != island and turns & spans:
                detail = f"is dealt {_text(turns & spans)}, which {other} holds"
                self._report(ROWS_HELD, island, detail)
        for other, turns in standing_turns(state).items():
            if turns & spans:
                detail = f"is dealt {_text(turns & spans)}, staged for {other}"
                self._report(ROWS_HELD, island, detail)

    def _require_sum(self, ledger: RowLedger) -> None:
        counts, total = ledger.counts, ledger.total
        trained = len(intersection(self._counted))
        in_states = counts.trained + counts.partly + counts.refused + counts.in_hand
        is_sum = total is None or in_states + (counts.free or 0) == total
        if not is_sum or counts.trained != trained:
            self._report(
                ROWS_ADD_UP,
                COORDINATOR,
                f"{counts} of {total} rows, of which rosters have trained {trained}",
            )

    def _settle(self, commit: CommittedRound) -> None:
        fragment, roster = commit.header.fragment, commit.header.roster
        assert roster is not None
        self._rosters[fragment].append(roster)
        for entry in roster.entries:
            if entry.spans and is_packed(entry.spans):
                self._settle_entry(commit, entry, Spans.unpack(entry.spans))

    def _settle_entry(
        self, commit: CommittedRound, entry: RosterEntry, spans: Spans
    ) -> None:
        fragment, round = commit.header.fragment, commit.header.round
        is_held = spans <= self._holdings.get(entry.island, EMPTY)
        again = spans & self._counted[fragment]
        if entry.verdict is Verdict.COUNTED:
            if again:
                detail = f"round {round} of fragment {fragment} counts {_text(again)} "
                self._report(ROWS_ONCE, entry.island, f"{detail}again")
            if not is_held and not self._history.has_gaps:
                detail = f"round {round} of fragment {fragment} counts {_text(spans)}"
                self._report(ROWS_HELD, entry.island, f"{detail}, not held by it")
            self._counted[fragment] |= spans
        elif entry.verdict is Verdict.REFUSED:
            own_spans = spans & self._holdings.get(entry.island, EMPTY)
            self._refused[fragment] |= own_spans - self._counted[fragment]
            if entry.reason.startswith(REFUSED_DATA) and is_held and not again:
                detail = f"round {round} refuses {_text(spans)}, which it holds: "
                self._report(ROWS_HELD, entry.island, detail + entry.reason)

    def _forget(self, fragment: int, last: int) -> None:
        """Forget rounds that an old copy of the journal has lost."""
        del self._rosters[fragment][last:]
        counted = [
            Spans.unpack(entry.spans)
            for roster in self._rosters[fragment]
            for entry in roster.counted
            if entry.spans
        ]
        self._counted[fragment], self._refused[fragment] = union(counted), EMPTY


class GivenRows:
    """The rows that the loop of one incarnation was given, by inner step."""

    def __init__(self) -> None:
        self.steps: list[I64] = []
        self.is_waiting = False
        """Whether the loop waits for rows, so that it has nothing to publish."""

        self._order: RunOrder | None = None

    def begin(self, settings: RunSettings, rows: int) -> None:
        """Set the dataset of the loop."""
        section = settings.data
        self._order = RunOrder(
            rows=rows, seed=section.seed, is_shuffled=section.shuffle
        )

    def fault(self, packed: bytes, steps: slice) -> str:
        """Return what differs between the rows of an update and of its inner steps."""
        if self._order is None:
            return ""
        parts = [np.empty(0, np.int64), *self.steps[steps]]
        expected = np.sort(np.concatenate(parts))
        turns = [np.arange(*span, dtype=np.int64) for span in Spans.unpack(packed)]
        actual = np.sort(self._order.rows_at(np.concatenate([parts[0], *turns])))
        if np.array_equal(expected, actual):
            return ""
        return (
            f"has {len(actual)} rows in an update of inner steps {steps.start} to "
            f"{steps.stop}, in which its loop was given {len(expected)}"
        )


def ends_with_data(settings: RunSettings) -> bool:
    """Return whether nothing but its data ends a run."""
    run = settings.run
    return settings.data.is_dealt and run.end_rounds is None and run.end_tokens is None


def standing_turns(state: CoordinatorState) -> Mapping[str, Spans]:
    """Return by island the turns in updates that wait for a roster."""
    turns: dict[str, Spans] = {}
    for round in state.rounds:
        for updates in (round.staged, round.ahead):
            for island, header in updates.items():
                cursor = header.progress.cursor
                if is_packed(cursor):
                    spans = Spans.unpack(cursor)
                    turns[island] = turns.get(island, EMPTY) | spans
    return turns


def _text(spans: Spans) -> str:
    """Return the first intervals of a set, and its size."""
    intervals: Sequence[tuple[int, int]] = list(spans)[:4]
    listed = " ".join(f"[{first}, {last})" for first, last in intervals)
    ellipsis = " and more" if spans.num_spans > len(intervals) else ""
    return f"turns {listed}{ellipsis} ({len(spans)})"
