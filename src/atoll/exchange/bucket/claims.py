"""The ledger of rows of a run in a bucket, which has no owner.

Claims form one log: `claims/1`, `claims/2`, ..., and each entry is put once. An island
that claims rows reads the log to its end, decides by the ledger, and puts the next
entry; one that was overtaken reads on and decides again. Rosters settle rows.

Rule 1: an entry names the last round of each fragment whose roster its writer had read,
        and a roster names the last entry that its closer had read. Every reader takes
        both in an order that agrees with all of these names, so that all readers have
        the same ledger, whenever they read.
Rule 2: an entry is void, for every reader, if it cannot be read, if a later incarnation
        of its island has an earlier entry, or if it claims turns beyond the data. Turns
        that another island holds stay with that island.
Rule 3: an entry that gives up the rows of an island names its incarnation. It does
        nothing if a later incarnation has an earlier entry: an island that returns puts
        an entry before it trains on the rows that its name holds.
Rule 4: an entry with a nonce ends the log for the move of that nonce: islands wait for
        the move's end before they put another one, so that the move has read them all.
Rule 5: a row counts once regardless of the log: the island that closes a round refuses
        an update with rows that have counted, or that its island does not hold.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from atoll.data import DataSpec, RowLedger, Spans
from atoll.data.ledger import KEPT_CLAIMS
from atoll.data.spans import EMPTY, MAX_TURN, union
from atoll.errors import CorruptError, UsageError
from atoll.exchange.api import bodies as fields
from atoll.exchange.api.messages import DATA, MAX_FRAGMENTS, SPANS
from atoll.fields import JsonField
from atoll.wire import Roster

MAX_ISLANDS = 65_536


@dataclass(frozen=True, kw_only=True)
class DepartedIsland:
    """An island whose rows become free, or are partly trained."""

    island: str
    incarnation: int
    """That has left, or was evicted."""


@dataclass(frozen=True, kw_only=True)
class ClaimDocument:
    """An entry of the log of claims."""

    run: str
    island: str
    incarnation: int
    number: int
    """Of the claim; 0: the entry claims nothing."""

    spans: Spans
    released: tuple[DepartedIsland, ...]
    """Whose rows become free before the claim is answered."""

    rounds: tuple[int, ...]
    """By fragment, the last round whose roster the writer had read."""

    data: DataSpec | None = None
    """The dataset, in an entry that opens it or reports the end of a stream."""

    move: str | None = None
    """The nonce of a move, in an entry that does nothing else."""


@dataclass(frozen=True, kw_only=True)
class LedgerRow:
    """The rows of one island in a ledger."""

    island: str
    incarnation: int
    """Of its last entry; 0: it has none."""

    in_hand: Spans
    partly: Spans
    claims: tuple[NumberedClaim, ...]


class NumberedClaim(NamedTuple):
    """A claim that is kept for a repeat."""

    number: int
    spans: Spans


@dataclass(frozen=True, kw_only=True)
class LedgerDocument:
    """The whole ledger after an entry of the log: a reader begins with it."""

    run: str
    number: int
    """Of the entry; 0: the run was moved here with this ledger."""

    rounds: tuple[int, ...]
    """By fragment, the last round whose roster it has."""

    data: DataSpec | None
    """None: no island has opened it."""

    front: int
    free: Spans
    counted: tuple[Spans, ...]
    refused: tuple[Spans, ...]
    islands: tuple[LedgerRow, ...]


_ROUNDS = fields.listed(fields.integer(), max_items=MAX_FRAGMENTS)
_DEPARTED = fields.row(
    DepartedIsland, {"island": fields.NAME, "incarnation": fields.integer()}
)
CLAIM: JsonField[ClaimDocument] = fields.table(
    ClaimDocument,
    {
        "run": fields.NAME,
        "island": fields.NAME,
        "incarnation": fields.integer(1),
        "number": fields.integer(),
        "spans": SPANS,
        "released": fields.listed(_DEPARTED, max_items=MAX_ISLANDS),
        "rounds": _ROUNDS,
    },
    optional={"data": DATA, "move": fields.text(64)},
)
_NUMBERED = fields.row(NumberedClaim, {"number": fields.integer(1), "spans": SPANS})
_ISLAND = fields.row(
    LedgerRow,
    {
        "island": fields.NAME,
        "incarnation": fields.integer(),
        "in_hand": SPANS,
        "partly": SPANS,
        "claims": fields.listed(_NUMBERED, max_items=KEPT_CLAIMS),
    },
)
_BY_FRAGMENT = fields.listed(SPANS, max_items=MAX_FRAGMENTS)
LEDGER: JsonField[LedgerDocument] = fields.table(
    LedgerDocument,
    {
        "run": fields.NAME,
        "number": fields.integer(),
        "rounds": _ROUNDS,
        "data": fields.maybe(DATA),
        "front": fields.integer(0, MAX_TURN),
        "free": SPANS,
        "counted": _BY_FRAGMENT,
        "refused": _BY_FRAGMENT,
        "islands": fields.listed(_ISLAND, max_items=MAX_ISLANDS),
    },
)


def ledger_document(
    ledger: RowLedger,
    *,
    run: str,
    number: int,
    rounds: tuple[int, ...],
    incarnations: Mapping[str, int],
) -> LedgerDocument:
    """Return the document of a ledger."""
    names = {*ledger.holdings, *ledger.claims, *ledger.partly, *incarnations}
    return LedgerDocument(
        run=run,
        number=number,
        rounds=rounds,
        data=ledger.data if ledger.is_open else None,
        front=ledger.front,
        free=ledger.free,
        counted=ledger.counted,
        refused=ledger.refused,
        islands=tuple(
            LedgerRow(
                island=name,
                incarnation=incarnations.get(name, 0),
                in_hand=ledger.holdings.get(name, EMPTY),
                partly=ledger.partly.get(name, EMPTY),
                claims=tuple(
                    NumberedClaim(*claim) for claim in ledger.claims.get(name, ())
                ),
            )
            for name in sorted(names)
        ),
    )


def ledger_of(document: LedgerDocument, empty: RowLedger) -> RowLedger:
    """Return the ledger of a document; `empty` is that of the run at its beginning.

    Raises:
        CorruptError: it does not fit the run.
    """
    sizes = {len(document.rounds), len(document.counted), len(document.refused)}
    if sizes != {empty.num_fragments}:
        raise CorruptError(
            f"A ledger of rows has {sorted(sizes)} fragments, and the run has "
            f"{empty.num_fragments}."
        )
    data = document.data or DataSpec(rows=None)
    ledger = replace(
        empty,
        is_open=document.data is not None,
        rows=data.rows,
        fingerprint=data.fingerprint,
        front=document.front,
        free=document.free,
        counted=document.counted,
        refused=document.refused,
        holdings={row.island: row.in_hand for row in document.islands if row.in_hand},
        partly={row.island: row.partly for row in document.islands if row.partly},
        claims={
            row.island: tuple((claim.number, claim.spans) for claim in row.claims)
            for row in document.islands
            if row.claims
        },
    )
    _require_sound(ledger)
    return ledger


def _require_sound(ledger: RowLedger) -> None:
    """Return if no turn is free and held, or held twice, or beyond the front.

    Raises:
        CorruptError: one is.
    """
    seen = ledger.free
    for name, turns in sorted(ledger.holdings.items()):
        if seen & turns:
            raise CorruptError(f"A ledger of rows has turns of {name!r} twice.")
        seen = seen | turns
    last = max(seen.last, union((*ledger.counted, *ledger.refused)).last)
    limit = MAX_TURN if ledger.total is None else ledger.total
    if not last <= ledger.front <= limit:
        raise CorruptError(
            f"A ledger of rows has turns up to {last}, {ledger.front} were dealt, and "
            f"there are {limit}."
        )


class _ReadRoster(NamedTuple):
    round: int
    claims: int
    roster: Roster


class RowLog:
    """The ledger after the entries and rosters that were read, in the order of rule 1.

    Add entries and rosters in their order, then `advance`. Those that follow others
    which were not added yet wait for them.
    """

    def __init__(self, empty: RowLedger) -> None:
        self._empty = self.ledger = empty
        self.number = 0
        """Of the last entry that the ledger has."""

        self._rounds = [0] * empty.num_fragments
        self.incarnations: dict[str, int] = {}
        """By island, that of its last entry."""

        self.move = ""
        """The nonce of the last move that has ended the log."""

        self._entries: deque[ClaimDocument | None] = deque()
        self._rosters: list[deque[_ReadRoster]] = []
        self._clear()

    def _clear(self) -> None:
        self._entries = deque()
        self._rosters = [deque() for _ in self._rounds]

    @property
    def rounds(self) -> tuple[int, ...]:
        """By fragment, the last round whose roster the ledger has."""
        return tuple(self._rounds)

    @property
    def num_waiting(self) -> int:
        """Rosters that were added, and that wait for an entry."""
        return sum(map(len, self._rosters))

    @property
    def next_entry(self) -> int:
        """The number of the first entry that was not added."""
        return self.number + len(self._entries) + 1

    def next_round(self, fragment: int) -> int:
        """Return the first round whose roster was not added."""
        return self._rounds[fragment] + len(self._rosters[fragment]) + 1

    def restore(self, document: LedgerDocument) -> None:
        """Begin with the ledger of a document; forget waiting entries and rosters.

        Raises:
            CorruptError: it does not fit the run.
        """
        self.ledger = ledger_of(document, self._empty)
        self.number, self._rounds = document.number, list(document.rounds)
        self.incarnations = {
            row.island: row.incarnation for row in document.islands if row.incarnation
        }
        self._clear()

    def document(self, run: str) -> LedgerDocument:
        """Return the ledger as a document."""
        return ledger_document(
            self.ledger,
            run=run,
            number=self.number,
            rounds=self.rounds,
            incarnations=self.incarnations,
        )

    def add_entry(self, document: ClaimDocument | None) -> None:
        """Add the next entry; None: it cannot be read."""
        self._entries.append(document)

    def add_roster(
        self, fragment: int, round: int, *, claims: int, roster: Roster
    ) -> None:
        """Add the next roster of a fragment; any other one is ignored."""
        if round == self.next_round(fragment):
            self._rosters[fragment].append(_ReadRoster(round, claims, roster))

    def advance(self) -> None:
        """Take all entries and rosters that can be taken."""
        while self._take_entry() or any(
            [self._take_roster(index) for index in range(len(self._rounds))]
        ):
            pass

    @property
    def awaited_rounds(self) -> dict[int, int]:
        """By fragment, the round of the roster that the next entry waits for."""
        entry = self._entries[0] if self._entries else None
        if entry is None or len(entry.rounds) != len(self._rounds):
            return {}
        pairs = enumerate(zip(entry.rounds, self._rounds, strict=True))
        return {index: last for index, (last, round) in pairs if last > round}

    @property
    def awaited_entry(self) -> int:
        """The highest entry that a roster waits for; 0: none waits."""
        waiting = (rosters[0].claims for rosters in self._rosters if rosters)
        return max(waiting, default=0)

    def _take_roster(self, fragment: int) -> bool:
        rosters = self._rosters[fragment]
        if not rosters or rosters[0].claims > self.number:
            return False
        read = rosters.popleft()
        self.ledger = self.ledger.settled(fragment, read.roster)
        self._rounds[fragment] = read.round
        return True

    def _take_entry(self) -> bool:
        if not self._entries or self.awaited_rounds:
            return False
        entry = self._entries.popleft()
        self.number += 1
        if entry is not None and self._is_valid(entry):
            self._apply(entry)
        return True

    def _is_valid(self, entry: ClaimDocument) -> bool:
        """Return whether an entry has an effect, by rule 2."""
        if len(entry.rounds) != len(self._rounds):
            return False
        total = self.ledger.total
        is_beyond = total is not None and entry.spans.last > total
        is_old = entry.incarnation < self.incarnations.get(entry.island, 0)
        return not (is_beyond or is_old)

    def _apply(self, entry: ClaimDocument) -> None:
        if entry.move is not None:
            self.move = entry.move
            return
        ledger = self.ledger
        for other in entry.released:
            if not self.has_returned(other.island, other.incarnation):
                ledger = ledger.released(other.island)
        if entry.data is not None:
            ledger = _opened(ledger, entry.data)
        is_claim = entry.number > ledger.last_claim(entry.island)
        if is_claim and entry.spans and ledger.is_open:
            others = union(
                spans
                for island, spans in ledger.holdings.items()
                if island != entry.island
            )
            free = entry.spans - others
            ledger = ledger.claimed(entry.island, entry.number, free)
        self.ledger = ledger
        self.incarnations[entry.island] = entry.incarnation

    def has_returned(self, island: str, incarnation: int) -> bool:
        """Return whether a later incarnation of an island has an entry."""
        return self.incarnations.get(island, 0) > incarnation


def _opened(ledger: RowLedger, data: DataSpec) -> RowLedger:
    """Return the ledger of a dataset; another one than the run's is ignored."""
    try:
        return ledger.opened(data)
    except UsageError:
        return ledger  # its island was refused before it put that
