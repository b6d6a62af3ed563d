"""The ledger of a run's rows: the holder of each, and the fragments that counted it.

Rule 1: a turn is never dealt, free, held by one island, or settled by a roster.
Rule 2: a ledger is never changed: every method of an event returns the next one.
Rule 3: the ledger decides which units a claim gets (`chosen`); every other event is a
        fact, so that a journal or a store repeats it without a decision.
Rule 4: an update names the turns that are in it, and its roster repeats them. A roster
        settles them for its fragment; a turn that every fragment has settled leaves
        the hand of its island.

The state of a turn is the first of these that is true:

    trained   every fragment has counted it
    partly    some fragment has, and another has refused it or its island has gone
    refused   some fragment has refused it
    in hand   an island holds it
    free      all others, dealt before or not

Memory: 16 bytes per interval in each set, one set per fragment and island beside three
others. Turns are dealt in ascending order, so that the sets of counted turns are whole
up to the units that are in hand: about as many intervals as islands. At worst every
second unit is refused: 8 MB per set for 10**9 rows in units of 1024.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from atoll.data.spans import EMPTY, MAX_TURN, Spans, intersection, is_packed, union
from atoll.errors import CorruptError, Refused, UsageError
from atoll.wire import Roster, RosterEntry, Verdict

KEPT_CLAIMS = 64
"""Answers to an island's last claims that are kept for a repeat."""

MAX_WANT = 4096
"""Units that one claim can ask for."""


@dataclass(frozen=True, kw_only=True)
class DataSpec:
    """The dataset of a run: every island must have the same."""

    rows: int | None
    """Its length; None: a stream whose end no island has reached."""

    fingerprint: str = ""
    """Of its content, if its library knows one. Only two that are known must agree."""


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A claim of an island: the same number again gets the same turns again."""

    island: str
    incarnation: int
    number: int
    """1, 2, ... per name of an island, not per incarnation."""

    want: int = 1
    """Units; the answer may have fewer, and none when no unit is free."""

    start: int = 0
    """Where the reader of a stream stands: turns before it only if no other is left."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """The answer to a claim."""

    spans: Spans
    is_over: bool = False
    """No row is free, and none can return: the island's loop ends."""


@dataclass(frozen=True, kw_only=True)
class RowCounts:
    """How many rows are in each state."""

    trained: int
    partly: int
    refused: int
    in_hand: int
    free: int | None
    """None: the data has no end."""


@dataclass(frozen=True, kw_only=True)
class RowLedger:
    """All that a run remembers of its rows."""

    unit_rows: int
    passes: int
    """0: without end."""

    num_fragments: int
    is_open: bool = False
    """Whether an island has described the data."""

    rows: int | None = None
    fingerprint: str = ""
    front: int = 0
    """Turns from here on were never dealt."""

    free: Spans = EMPTY
    """Turns before the front that no island holds, to be dealt again."""

    holdings: Mapping[str, Spans] = field(default_factory=dict)
    """By island."""

    claims: Mapping[str, tuple[tuple[int, Spans], ...]] = field(default_factory=dict)
    """By island: the numbers of its last claims with their turns, ascending."""

    counted: tuple[Spans, ...] = ()
    refused: tuple[Spans, ...] = ()
    """By fragment."""

    partly: Mapping[str, Spans] = field(default_factory=dict)
    """By island that has gone: turns that only some fragments had counted."""

    def __post_init__(self) -> None:
        for name in ("counted", "refused"):
            if not getattr(self, name):
                object.__setattr__(self, name, (EMPTY,) * self.num_fragments)

    @property
    def total(self) -> int | None:
        """All turns of the run; None if they have no end, or none that is known."""
        if self.rows is None or not self.passes:
            return None
        return self.rows * self.passes

    @property
    def data(self) -> DataSpec:
        """The dataset, as far as it is known."""
        return DataSpec(rows=self.rows, fingerprint=self.fingerprint)

    def opened(self, data: DataSpec) -> RowLedger:
        """Return the ledger of a dataset; a second island must have the same one.

        Raises:
            UsageError: it has another, with both.
        """
        self._require_rows(data)
        self._require_same(data)
        if self.is_open and self.rows is not None:
            return self
        if self.is_open and data.rows is not None:
            return self._ended(data.rows)
        fingerprint = self.fingerprint or data.fingerprint
        return replace(self, is_open=True, rows=data.rows, fingerprint=fingerprint)

    def _require_rows(self, data: DataSpec) -> None:
        if data.rows == 0:
            raise UsageError(
                "The dataset has no rows: there is nothing to deal out. "
                "Check its path or its filter."
            )
        max_rows = MAX_TURN // max(1, self.passes)
        if data.rows is not None and data.rows > max_rows:
            raise UsageError(
                f"{data.rows} rows in {self.passes} passes are more than {MAX_TURN} "
                "turns. Choose fewer passes."
            )

    def _require_same(self, data: DataSpec) -> None:
        if not self.is_open:
            return
        if None not in (self.rows, data.rows) and self.rows != data.rows:
            raise UsageError(
                f"This island's data has {data.rows:,} rows, and the run's has "
                f"{self.rows:,}. Give all islands the same data."
            )
        expected, actual = self.fingerprint, data.fingerprint
        if expected and actual and expected != actual:
            raise UsageError(
                f"This island's data has fingerprint {actual!r}, and the run's has "
                f"{expected!r}. Give all islands the same data, prepared alike."
            )

    def _ended(self, rows: int) -> RowLedger:
        """Return the ledger of a stream that has ended after `rows`."""
        settled = union((*self.counted, *self.refused)).last
        if settled > rows:
            raise UsageError(
                f"This island's stream ended after {rows:,} rows, and {settled:,} of "
                "the run's have been trained. Give all islands the same data."
            )
        remaining = Spans([(0, rows)])
        return replace(
            self,
            rows=rows,
            front=min(self.front, rows),
            free=self.free & remaining,
            holdings={
                island: spans & remaining for island, spans in self.holdings.items()
            },
        )

    def last_claim(self, island: str) -> int:
        """Return the number of an island's last claim; 0: it has made none."""
        claims = self.claims.get(island, ())
        return claims[-1][0] if claims else 0

    def answered(self, island: str, number: int) -> Spans | None:
        """Return the turns of a claim that is known, or None if it is a new one.

        Raises:
            Refused: it is so old that its answer is not kept.
        """
        claims = self.claims.get(island, ())
        if number > self.last_claim(island):
            return None
        for claimed, spans in claims:
            if claimed == number:
                return spans
        raise Refused(
            f"Claim {number} of island {island!r} is not kept: its last is "
            f"{claims[-1][0]}, and the run keeps {KEPT_CLAIMS}. Join again."
        )

    def chosen(self, want: int, *, start: int = 0, num_live: int = 1) -> Spans:
        """Return the turns that a claim gets now: whole units, the lowest first.

        Near the end of the data fewer units, so that no island keeps the last ones
        while others have none.
        """
        want = min(want, MAX_WANT)
        if self.total is not None:
            want = min(want, max(1, self._units_left(want, num_live) // (2 * num_live)))
        units: list[list[tuple[int, int]]] = []
        for unit in self._units(min(start, self.front)):
            if len(units) >= want:
                break
            units.append(unit)
        return Spans(span for unit in units for span in unit)

    def _units(self, start: int) -> Iterator[list[tuple[int, int]]]:
        """Yield the units that can be dealt, in the order in which they are."""
        before = Spans([(0, start)]) if start else EMPTY
        yield from self._returned(self.free - before)
        first, end = self.front, MAX_TURN if self.total is None else self.total
        while first < end:
            last = self._unit_end(first)
            yield [(first, last)]
            first = last
        yield from self._returned(self.free & before)

    def _returned(self, turns: Spans) -> Iterator[list[tuple[int, int]]]:
        unit: list[tuple[int, int]] = []
        unit_end = 0
        for first, last in turns:
            while first < last:
                if first >= unit_end:
                    if unit:
                        yield unit
                    unit, unit_end = [], self._unit_end(first)
                unit.append((first, min(last, unit_end)))
                first = unit[-1][1]
        if unit:
            yield unit

    def _unit_end(self, turn: int) -> int:
        """Return the turn after the unit of a turn. No unit is in two passes."""
        if self.rows is None:
            return turn - turn % self.unit_rows + self.unit_rows
        row = turn % self.rows
        end = min(row - row % self.unit_rows + self.unit_rows, self.rows)
        return turn - row + end

    def _units_left(self, want: int, num_live: int) -> int:
        """Return the units that can be dealt, or enough of them for `want`."""
        assert self.rows is not None
        assert self.total is not None
        per_pass = -(-self.rows // self.unit_rows)
        number, row = divmod(self.front, self.rows)
        num_units = per_pass * (self.passes - number) - row // self.unit_rows
        if num_units >= want * 2 * num_live:
            return num_units
        return num_units + sum(1 for _ in self._returned(self.free))

    @property
    def has_free(self) -> bool:
        """Whether a claim would get turns."""
        return bool(self.free) or self.total is None or self.front < self.total

    def claimed(self, island: str, number: int, spans: Spans) -> RowLedger:
        """Return the ledger after a claim has got turns, wherever they were."""
        claims = (*self.claims.get(island, ()), (number, spans))[-KEPT_CLAIMS:]
        return replace(
            self._dealt(island, spans), claims={**self.claims, island: claims}
        )

    def _dealt(self, island: str, spans: Spans) -> RowLedger:
        if not spans:
            return self
        free, front = self.free, max(self.front, spans.last)
        if front > self.front:
            free = free | Spans([(self.front, front)])
        changed = {
            name: other - spans
            for name, other in self.holdings.items()
            if name != island and (other & spans)
        }
        changed[island] = self.holdings.get(island, EMPTY) | spans
        return replace(
            self, free=free - spans, front=front, holdings={**self.holdings, **changed}
        )

    def fault(self, island: str, fragment: int, packed: bytes) -> str:
        """Return why an update cannot hold the turns that it names, or ""."""
        try:
            spans = Spans.unpack(packed)
        except CorruptError as exc:
            return f"data: {exc}"
        if not spans <= self.holdings.get(island, EMPTY):
            return "data: rows that were dealt to another island"
        if spans & self.counted[fragment]:
            return "data: rows that have counted before"
        return ""

    def settled(self, fragment: int, roster: Roster) -> RowLedger:
        """Return the ledger after a round: its roster names turns by island."""
        ledger = self
        for entry in roster.entries:
            if entry.spans and entry.verdict is not Verdict.LATE:
                ledger = ledger._with_entry(fragment, entry)
        return ledger

    def _with_entry(self, fragment: int, entry: RosterEntry) -> RowLedger:
        if not is_packed(entry.spans):
            return self  # no judge writes that: the island can only harm its own rows
        spans, ledger = Spans.unpack(entry.spans), self
        own_spans = self.holdings.get(entry.island, EMPTY)
        if entry.verdict is Verdict.COUNTED:
            # A run that has lost its claims learns them from the roster.
            unknown = spans - own_spans - union(self.counted)
            ledger = self._dealt(entry.island, unknown)
            counted = _replaced(self.counted, fragment, self.counted[fragment] | spans)
            ledger = replace(ledger, counted=counted)
        else:
            spans = (spans & own_spans) - self.counted[fragment]
            refused = _replaced(self.refused, fragment, self.refused[fragment] | spans)
            ledger = replace(ledger, refused=refused)
        return ledger._let_go(entry.island, spans)

    def _let_go(self, island: str, spans: Spans) -> RowLedger:
        """Take turns that every fragment has settled from the hand of an island."""
        for counted, refused in zip(self.counted, self.refused, strict=True):
            spans = (spans & counted) | (spans & refused)
        own_spans = self.holdings.get(island, EMPTY)
        return replace(self, holdings={**self.holdings, island: own_spans - spans})

    def released(self, island: str) -> RowLedger:
        """Return the ledger after the turns of an island have become free.

        Those that a fragment has counted or refused are not dealt again.
        """
        own_spans = self.holdings.get(island, EMPTY)
        counted = own_spans & union(self.counted)
        settled = counted | (own_spans & union(self.refused))
        partly = dict(self.partly)
        if counted:
            partly[island] = partly.get(island, EMPTY) | counted
        claims = tuple((number, EMPTY) for number, _ in self.claims.get(island, ()))
        return replace(
            self,
            free=self.free | (own_spans - settled),
            holdings={
                name: spans for name, spans in self.holdings.items() if name != island
            },
            claims={**self.claims, island: claims} if claims else self.claims,
            partly=partly,
        )

    def unsettled(self, island: str, standing: Sequence[Spans] = ()) -> Spans:
        """Return the held turns that some fragment has yet to see in an update.

        `standing` has, by fragment, the turns in the island's updates of open rounds.
        """
        own_spans = self.holdings.get(island, EMPTY)
        if not own_spans:
            return own_spans
        return union(
            own_spans - counted - refused - (standing[index] if standing else EMPTY)
            for index, (counted, refused) in enumerate(
                zip(self.counted, self.refused, strict=True)
            )
        )

    def to_train(self, island: str, standing: Sequence[Spans] = ()) -> Spans:
        """Return the turns that the next incarnation of an island trains on.

        Those that some fragment has counted, refused or staged are not among them.
        """
        own_spans = self.holdings.get(island, EMPTY)
        for settled in (*self.counted, *self.refused, *standing):
            own_spans = own_spans - settled
        return own_spans

    @cached_property
    def states(self) -> RowStates:
        """The turns in each state that is not free."""
        trained = intersection(self.counted)
        some = union(self.counted) - trained
        in_hand, refused = union(self.holdings.values()), union(self.refused)
        partly = (some - in_hand) | (some & refused)
        partly_of = {island: spans & partly for island, spans in self.partly.items()}
        refused = refused - trained - some
        settled = trained | partly | refused
        by_island = {island: spans - settled for island, spans in self.holdings.items()}
        return RowStates(
            trained=trained,
            partly=partly,
            partly_of={island: spans for island, spans in partly_of.items() if spans},
            refused=refused,
            in_hand={island: spans for island, spans in by_island.items() if spans},
        )

    @property
    def counts(self) -> RowCounts:
        """How many rows are in each state; they add up to all turns of the run."""
        states, total = self.states, self.total
        trained, partly = len(states.trained), len(states.partly)
        refused = len(states.refused)
        in_hand = sum(len(spans) for spans in states.in_hand.values())
        free = None if total is None else len(self.free) + total - self.front
        return RowCounts(
            trained=trained, partly=partly, refused=refused, in_hand=in_hand, free=free
        )


@dataclass(frozen=True, kw_only=True)
class RowStates:
    """The turns in each state that is not free."""

    trained: Spans
    partly: Spans
    partly_of: Mapping[str, Spans]
    """By island that has gone."""

    refused: Spans
    in_hand: Mapping[str, Spans]
    """By island."""


def _replaced(sets: tuple[Spans, ...], index: int, spans: Spans) -> tuple[Spans, ...]:
    return (*sets[:index], spans, *sets[index + 1 :])
