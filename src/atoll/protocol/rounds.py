"""One fragment's open round: missing islands, staged updates, and when it closes.

Rule 1: a fragment has one open round. It goes open -> closing -> committed, and the
        next one opens; `tables.TRANSITIONS` has every way from phase to phase.
Rule 2: closing freezes the staged set; nothing staged later can change the roster.
Rule 3: one update per island and round: the first one staged stands.
Rule 4: a departing update may be staged for the round after the open one.
Rule 5: `judge_updates` decides which staged updates count; its answer is the same for
        every exchange.

An asynchronous run has four more rules:
Rule 6: an update stands until a roster lists it. It counts in a later round than the
        one that it was sealed for, which is its label; the difference is its age.
Rule 7: a round waits at most `grace_s` from its first update, and then takes the
        updates that have arrived; no island is late.
Rule 8: an update that arrives while its fragment is closing is staged for the next
        round, and so is one that departs while another of its island stands.
Rule 9: the last round of a fragment waits for every live island, as the last round of a
        synchronous run does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from statistics import median
from typing import NamedTuple

from atoll.algorithm.outer import LARGEST_NORM
from atoll.algorithm.pace import aged_weight, deadline_s
from atoll.data import RowLedger
from atoll.data.spans import is_packed
from atoll.errors import Refused
from atoll.protocol.membership import Members, progress_fault
from atoll.protocol.messages import CountedWork, HeldRound
from atoll.protocol.tables import RECEPTION, changed
from atoll.settings import RunSettings, SyncSection
from atoll.wire import (
    FrameKind,
    Header,
    OuterValues,
    Roster,
    RosterEntry,
    Verdict,
    update_digest,
)

KNOWN_BASES = 1024
"""How many earlier states of a fragment a departing update may name."""


class Phase(StrEnum):
    """The phase of a round."""

    WAITING = "waiting"
    """Before the first round: fewer than start_islands have joined."""

    OPEN = "open"
    CLOSING = "closing"
    ENDED = "ended"
    """The fragment has committed the run's last round."""


class Reception(StrEnum):
    """The run's answer to the header of an update, before it reads the body."""

    WANTED = "wanted"
    STAGED = "staged"
    """This very update is staged."""

    OTHER_STAGED = "spoken for"
    """An update of an earlier incarnation is staged; this one changes nothing."""

    COMMITTED = "committed"
    """The round is over, with an outcome, or it will never open."""

    CLOSING = "closing"
    """The round is about to be over: ask again for its outcome."""

    EARLY = "early"
    """The run has lost the rounds before: it will ask for a state. Then ask again."""


@dataclass(frozen=True, kw_only=True)
class ListedUpdate:
    """The last update of an island, counted or refused, that a fragment's rosters list.

    Only asynchronous runs have it: there an update stands until a roster lists it.
    """

    round: int
    """The round of that roster."""

    label: int
    """The round that the update was sealed for."""

    incarnation: int

    def covers(self, header: Header) -> bool:
        """Return whether an update of the island is this one, or came before it.

        An incarnation publishes its updates in the order of their labels. The last
        update of an earlier one says nothing about those of a later one.
        """
        return self.incarnation >= header.incarnation and self.label >= header.round


def listed_updates(
    roster: Roster, *, fragment: int, round: int
) -> dict[tuple[int, str], ListedUpdate]:
    """Return the updates that the roster of a round lists, by fragment and island."""
    return {
        (fragment, entry.island): ListedUpdate(
            round=round, label=round - entry.age, incarnation=entry.incarnation
        )
        for entry in roster.entries
        if entry.digest
    }


@dataclass(frozen=True, kw_only=True)
class Round:
    """The open round of one fragment."""

    fragment: int
    number: int
    phase: Phase
    base: bytes
    bases: tuple[bytes, ...]
    """The fragment's latest states, this round's base last."""

    outer: OuterValues
    """Fixed when the round opens."""

    opened_s: float = 0.0
    candidates: frozenset[str] = frozenset()
    staged: Mapping[str, Header] = field(default_factory=dict)
    ahead: Mapping[str, Header] = field(default_factory=dict)
    """Departing updates for the round after this one."""

    first_s: float | None = None
    """When the first update came of an island that stays: others wait from then on."""

    awaited: frozenset[str] = frozenset()
    """Islands that missed the last round: waited for up to the upper bound."""

    norms: Norms = field(default_factory=dict)
    """Of each island's last updates, since the coordinator started."""

    roster: Roster | None = None
    """While closing: what the frozen staged set came to."""

    is_async: bool = False
    """Whether updates of earlier rounds may be staged."""

    last_since_s: float | None = None
    """When this became its fragment's last round; None: it is not."""

    lost_through: int = 0
    """The last round of an asynchronous run whose roster is lost: an update with this
    label or a lower one may have counted there, so it is not staged again."""

    def receive(
        self, header: Header, *, its_island: str, listed: ListedUpdate | None = None
    ) -> Reception:
        """Judge an update by its header, as `tables.RECEPTION` says.

        `listed` is the last update of its island that a roster of this fragment lists.

        Raises:
            Refused: another update stands for this island, or its round cannot be open.
        """
        if self._never_counts(header, listed):
            return Reception.COMMITTED
        answer = RECEPTION[
            self._which_round(header, listed),
            self.phase,
            "departing" if header.kind is FrameKind.DEPARTING else "update",
            self._standing(header),
            its_island,
        ]
        if answer != "refused":
            return Reception(answer)
        is_ahead = (
            header.round == self.number + 1 and header.kind is FrameKind.DEPARTING
        )
        if header.round <= self.number or is_ahead:
            raise another_stands(header)
        raise Refused(
            f"Round {header.round} of fragment {self.fragment} cannot be published "
            f"yet: round {self.number} is open. Wait for its outcome."
        )

    def _which_round(self, header: Header, listed: ListedUpdate | None) -> str:
        distance = header.round - self.number
        if not self.is_async:
            return _WHICH_ROUND[min(max(distance, -1), 2)]
        if not self.stands(header, listed):
            return "over"
        is_next = distance == 1 and header.kind is FrameKind.DEPARTING
        if distance <= 0 or (is_next and self.phase is Phase.CLOSING):
            return "not listed yet"
        return _WHICH_ROUND[min(distance, 2)]

    def _never_counts(self, header: Header, listed: ListedUpdate | None) -> bool:
        """Return whether an asynchronous update is for a round after the last.

        It would be staged beside the last one, which is frozen or has another update
        of its island.
        """
        if not (self.is_async and self.is_last) or not self._goes_ahead(header):
            return False
        return self._standing(header) == "nothing" and self.stands(header, listed)

    def stands(self, header: Header, listed: ListedUpdate | None) -> bool:
        """Return whether no roster lists an update, in an asynchronous run."""
        is_listed = listed is not None and listed.covers(header)
        return header.round > self.lost_through and not is_listed

    @property
    def updates(self) -> list[Header]:
        """The updates of this round and of the one after it."""
        return [*self.staged.values(), *self.ahead.values()]

    def updates_beside(self, header: Header) -> Mapping[str, Header]:
        """Return the updates among which an update is staged."""
        return self.ahead if self._goes_ahead(header) else self.staged

    def _standing(self, header: Header) -> str:
        standing = self.updates_beside(header).get(header.island)
        if standing is None:
            return "nothing"
        if standing.incarnation < header.incarnation:
            return "an earlier incarnation's"
        return "the same" if _is_same(standing, header) else "another"

    def _goes_ahead(self, header: Header) -> bool:
        """Return whether an update is staged for the round after this one."""
        if not self.is_async:
            return header.round != self.number
        standing = self.staged.get(header.island)
        if standing is not None and _is_same(standing, header):
            return False
        is_second = standing is not None and header.kind is FrameKind.DEPARTING
        return is_second or header.round > self.number or self.phase is Phase.CLOSING

    def opening(self, members: Members, now_s: float) -> Round:
        """Return the round when it opens for the islands that have joined."""
        candidates = members.joined_before(self.number, self.fragment, now_s)
        return changed(self, phase=Phase.OPEN, opened_s=now_s, candidates=candidates)

    def stage(self, header: Header, now_s: float) -> Round:
        """Return the round with a wanted update, whose body is verified."""
        if self._goes_ahead(header):
            return changed(self, ahead={**self.ahead, header.island: header})
        is_first = self.first_s is None and header.kind is not FrameKind.DEPARTING
        return changed(
            self,
            staged={**self.staged, header.island: header},
            first_s=now_s if is_first else self.first_s,
        )

    def without(self, island: str) -> Round:
        """Return the round that does not wait for a new incarnation of an island."""
        if island in self.staged:
            return self
        return changed(self, candidates=self.candidates - {island})

    def missing(self, members: Members, now_s: float) -> frozenset[str]:
        """Return the candidates that have not published and are live, or will be."""
        if self.is_async:  # no island resumes exactly there
            live = members.live(now_s)
            waits_for = live if self.is_last else live & self.candidates
            return waits_for - self.staged.keys()
        live = self.candidates & members.live(now_s)
        absent = self.candidates - live - self.staged.keys()
        returning = {name for name in absent if members.known[name].is_expected}
        return (live | returning) - self.staged.keys()

    @property
    def is_last(self) -> bool:
        """Whether no round of the fragment opens after this one."""
        return self.last_since_s is not None

    @property
    def waits_from_s(self) -> float:
        """When the longest wait began: with the first update, or with the opening.

        The first rounds open when enough islands have joined, which may be long after
        the first of them has published.
        """
        if self.first_s is None or self.first_s < self.opened_s:
            return self.opened_s
        return self.first_s

    def late_at_s(self, island: str, members: Members, settings: RunSettings) -> float:
        """Return when an island that has not published is late, by these settings."""
        if self.is_async and self.last_since_s is not None:
            since_s = max(self.waits_from_s, self.last_since_s)
            return since_s + settings.limits.deadline_max_s
        if self.is_async:
            return self.waits_from_s + self.grace_s(members, settings)
        latest_s = self.waits_from_s + settings.limits.deadline_max_s
        if island in self.awaited:
            return latest_s
        slack = _slack(settings.sync)
        learned_s = slack * deadline_s(
            members.known[island].arrivals_of(self.fragment),
            patience=settings.run.patience,
            lower_s=settings.limits.deadline_min_s / slack,
            upper_s=math.inf,
        )
        return min(self.opened_s + learned_s, latest_s)

    def grace_s(self, members: Members, settings: RunSettings) -> float:
        """Return how long an asynchronous round stays open after its first update.

        By default half of the time in which the fastest island makes the steps that
        overlap: the other half is for the transfer of the outcome.
        """
        if settings.asynchronous.grace_s is not None:
            return settings.asynchronous.grace_s
        paces_s = [members.known[name].step_s for name in self.candidates]
        fastest_s = min([pace_s for pace_s in paces_s if pace_s], default=0.0)
        return settings.sync.overlap_steps * fastest_s / 2

    def can_close(self, members: Members, settings: RunSettings, now_s: float) -> bool:
        """Return whether no island is worth waiting for, and a quorum has published.

        The quorum of a last round is not needed when no live island is missing: there
        is none that could still publish.
        """
        if self.phase is not Phase.OPEN or not self.staged:
            return False
        missing = self.missing(members, now_s)
        if len(self.staged) < settings.run.quorum and (missing or not self.is_last):
            return False
        for island in missing:
            if now_s < self.late_at_s(island, members, settings):
                return False
        return True

    def is_abandoned(self, members: Members) -> bool:
        """Return whether the round has an update that no island will send again.

        It departed, its island has left, or a later incarnation waits for its outcome.
        """
        return bool(self.ahead) or any(
            header.kind is FrameKind.DEPARTING
            or members.known[island].has_left
            or header.incarnation < members.known[island].incarnation
            for island, header in self.staged.items()
        )

    def close(self, roster: Roster) -> Round:
        """Freeze the staged set: from here on the round can only be committed."""
        assert self.phase is Phase.OPEN
        return changed(self, phase=Phase.CLOSING, roster=roster)

    def commit(
        self,
        *,
        base: bytes,
        roster: Roster,
        outer: OuterValues,
        candidates: frozenset[str],
        now_s: float,
        last_round: int | None,
        window_of: WindowOf,
    ) -> Round:
        """Return the next round, opened for the islands that are live now.

        `roster` is the one that was committed: all refused if the round is void.
        `window_of` has the windows that were in force until then.
        """
        assert self.phase is Phase.CLOSING
        assert self.roster is not None
        published = {
            entry.island
            for entry in self.roster.entries
            if entry.verdict is not Verdict.LATE
        }
        is_last = last_round is not None and self.number >= last_round
        return Round(
            fragment=self.fragment,
            number=self.number + 1,
            phase=Phase.ENDED if is_last else Phase.OPEN,
            base=base,
            bases=(*self.bases, base)[-KNOWN_BASES:],
            outer=outer,
            opened_s=now_s,
            candidates=candidates,
            staged=self.ahead,
            awaited=(
                frozenset()
                if self.is_async
                else (self.candidates & candidates) - published
            ),
            norms=norms_after(
                self.norms, self.staged.values(), roster, window_of=window_of
            ),
            is_async=self.is_async,
            lost_through=self.lost_through,
        )

    def recover(
        self,
        state: HeldRound,
        *,
        outer: OuterValues,
        candidates: frozenset[str],
        now_s: float,
        last_round: int | None,
    ) -> Round:
        """Return the round after a state that the run had lost."""
        is_last = last_round is not None and state.round >= last_round
        return Round(
            fragment=self.fragment,
            number=state.round + 1,
            phase=Phase.ENDED if is_last else Phase.OPEN,
            base=state.digest,
            bases=(*self.bases, state.digest)[-KNOWN_BASES:],
            outer=outer,
            opened_s=now_s,
            candidates=candidates,
            staged=self._after_recovery(state.round),
            ahead=self.ahead if self.is_async else {},
            norms=self.norms,
            is_async=self.is_async,
            lost_through=self.lost_through,
        )

    def _after_recovery(self, round: int) -> Mapping[str, Header]:
        """Return the updates that are staged after a recovery of a round."""
        if self.is_async:
            return self.staged
        return self.ahead if round == self.number else {}


def another_stands(header: Header, *, suffix: str = "") -> Refused:
    """Return the error for an update of an island that has published another one."""
    return Refused(
        f"Another update of island {header.island!r} stands for round "
        f"{header.round} of fragment {header.fragment}{suffix}. Wait for its outcome."
    )


def _slack(sync: SyncSection) -> float:
    """Return how much longer a whole window takes than one that began with a stall.

    An island that stood still for the last outcome has made its overlapping steps
    before the round opens, and publishes earlier by them. Arrivals of such rounds must
    not make it late in a round for which it need not wait.
    """
    return sync.sync_every / (sync.sync_every - sync.overlap_steps)


_WHICH_ROUND = {-1: "over", 0: "the open one", 1: "the next", 2: "a later one"}


def _is_same(standing: Header, header: Header) -> bool:
    return update_digest(standing) == update_digest(header)


NORMS_FOR_MEDIAN = 3
"""From this many updates on, a norm is judged against the round's median."""

OWN_NORMS = 5
"""Counted norms that are kept per island, and needed to judge a smaller round."""

WindowOf = Callable[[str], int]
"""Gives the inner steps per window of an island."""


class CountedNorm(NamedTuple):
    """The norm of a counted update."""

    value: float
    window: int
    """Inner steps per window of its island at that time."""

    def in_window(self, window: int) -> float:
        """Return the largest norm to expect of a window that may be longer.

        A norm grows at most in proportion to the inner steps, and often slower: that
        of a shorter window is not expected to be smaller.
        """
        return self.value * max(1.0, window / self.window)


Norms = Mapping[str, tuple[CountedNorm, ...]]
"""The last counted norms of each island, in one fragment, oldest first."""


def judge_updates(
    headers: Iterable[Header],
    *,
    round: int,
    base: bytes,
    known_bases: Collection[bytes],
    norms: Norms,
    counted: Callable[[str], CountedWork | None],
    window_of: WindowOf,
    settings: RunSettings,
    ledger: RowLedger | None = None,
) -> Roster:
    """Return the roster of a round whose frozen staged set is `headers`.

    Order of arrival does not matter. A departing update may name any base its
    fragment ever had, because its body does not depend on the anchor; in an
    asynchronous run any update may, and its age lowers its weight by the settings.
    `counted` gives the last counted update of an island in this fragment. With a
    ledger an update counts only if its island holds the rows that are in it.
    """
    staleness, is_async = (
        settings.asynchronous.staleness,
        settings.sync.mode == "async",
    )
    staged = sorted(headers, key=lambda header: header.island.encode())
    objections = {
        header.island: _objection(header, base, known_bases, is_async=is_async)
        or progress_fault(header, counted=counted(header.island), settings=settings)
        or _rows_fault(header, ledger)
        for header in staged
    }
    in_round = [header for header in staged if not objections[header.island]]
    for header in in_round:
        objections[header.island] = _norm_fault(
            header, in_round, norms, window_of, settings.limits.max_update_norm
        )
    return Roster(
        entries=tuple(
            _entry(
                header,
                objections[header.island],
                age=round - header.round,
                staleness=staleness,
                spans=_rows_of(header, ledger),
            )
            for header in staged
        )
    )


def norms_after(
    norms: Norms, headers: Iterable[Header], roster: Roster, *, window_of: WindowOf
) -> Norms:
    """Return the norms after a round: only updates that counted are learned.

    A refused norm must not become usual by being repeated. A norm of zero is no
    measure of a usual norm, and is not learned either.
    """
    counted = {entry.island for entry in roster.counted}
    new = {
        header.island: CountedNorm(header.norm, window_of(header.island))
        for header in headers
        if header.island in counted and header.norm > 0.0
    }
    return {
        island: (*norms.get(island, ()), *([new[island]] if island in new else []))[
            -OWN_NORMS:
        ]
        for island in norms.keys() | new.keys()
    }


def refuse_all(roster: Roster, reason: str) -> Roster:
    """Return the roster with every update refused: the round is void."""
    return Roster(
        tuple(
            replace(entry, verdict=Verdict.REFUSED, reason=entry.reason or reason)
            for entry in roster.entries
        )
    )


def _objection(
    header: Header, base: bytes, known_bases: Collection[bytes], *, is_async: bool
) -> str:
    if header.refused:
        return header.refused
    may_be_earlier = is_async or header.kind is FrameKind.DEPARTING
    if header.base != base and not (may_be_earlier and header.base in known_bases):
        return f"base: {header.base.hex()} is not the fragment's {base.hex()}"
    if header.norm > LARGEST_NORM:
        return (
            f"norm: {header.norm:.3g} is beyond {LARGEST_NORM:.3g}, above which the "
            "outer step could overflow"
        )
    return ""


def _rows_fault(header: Header, ledger: RowLedger | None) -> str:
    if ledger is None:
        return ""
    return ledger.fault(header.island, header.fragment, header.progress.cursor)


def _rows_of(header: Header, ledger: RowLedger | None) -> bytes:
    """Return the packed turns in an update; none if its cursor is no set of turns."""
    cursor = header.progress.cursor
    return cursor if ledger is not None and is_packed(cursor) else b""


def _norm_fault(
    header: Header,
    in_round: list[Header],
    norms: Norms,
    window_of: WindowOf,
    max_update_norm: float,
) -> str:
    """Return the reason if a norm exceeds its reference `max_update_norm` times.

    The reference is the round's median, if the round has enough updates. Otherwise it
    is the median of the island's own last norms or, for an island with too few of
    them, of the other islands' last norms. Without any reference nothing is refused.
    """
    window = window_of(header.island)
    positive = [
        CountedNorm(other.norm, window_of(other.island)).in_window(window)
        for other in in_round
        if other.norm > 0.0
    ]
    own_norms = [norm.in_window(window) for norm in norms.get(header.island, ())]
    others = [
        norm.in_window(window)
        for name in norms.keys() - {header.island}
        for norm in norms[name]
    ]
    if len(positive) >= NORMS_FOR_MEDIAN:
        reference, source = median(positive), "the round's median"
    elif len(own_norms) == OWN_NORMS:
        reference, source = (
            median(own_norms),
            f"the median of the island's last {OWN_NORMS}",
        )
    elif len(others) >= OWN_NORMS:
        reference, source = (
            median(others),
            "the median of the other islands' last norms",
        )
    else:
        return ""
    limit = max_update_norm * reference
    if header.norm <= limit:
        return ""
    return (
        f"norm: {header.norm:.3g} is beyond {limit:.3g}, "
        f"limits.max_update_norm={max_update_norm:g} times {source}"
    )


def _entry(
    header: Header, objection: str, *, age: int, staleness: str, spans: bytes
) -> RosterEntry:
    return RosterEntry(
        island=header.island,
        incarnation=header.incarnation,
        digest=update_digest(header),
        weight=aged_weight(header.weight, age, kind=staleness),
        verdict=Verdict.REFUSED if objection else Verdict.COUNTED,
        reason=objection,
        inner_steps=header.progress.inner_steps,
        tokens=header.progress.tokens,
        age=age,
        spans=spans,
    )
