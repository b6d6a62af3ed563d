"""The state of a run that the records of its journal add up to.

Rule 1: `require` checks that a record may follow the ones before it, and `apply` adds
        it. A record that is refused is never written; in a log that is read, the same
        refusal is damage.
Rule 2: this file uses no disk. It remembers the position of each round's record, so
        that its roster can be read again at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from operator import ge
from typing import NamedTuple

from atoll.data import DataSpec, RowLedger, Spans
from atoll.errors import UsageError
from atoll.journal import records
from atoll.journal.log import (
    RecordPosition,
)
from atoll.protocol import ModelSpec
from atoll.protocol.coordinator_state import Windows
from atoll.protocol.rounds import ListedUpdate, listed_updates
from atoll.settings.sections import DataSection
from atoll.wire import Header, Roster

MAX_LOST_ROUNDS = 2**20
"""More than twelve days of rounds of one second: a jump beyond was never trained."""

Update = tuple[int, int, str]
"""Fragment, round and island of an update."""


@dataclass(frozen=True, kw_only=True)
class JournalledMember:
    """The latest life of an island, as the journal knows it."""

    island: str
    incarnation: int
    slot: int
    key_digest: bytes
    nonce: bytes
    has_left: bool = False
    reason: str = ""
    """Why it left."""


class CountedUpdate(NamedTuple):
    """The last update of an island that counted in a fragment."""

    round: int
    inner_steps: int
    tokens: int


@dataclass
class RecordedFragment:
    """The committed rounds of one fragment."""

    round: int = 0
    """The last one; 0 is the founding."""

    arrived: int | None = None
    """The last one when the run came here."""

    digests: dict[int, bytes] = field(default_factory=dict)
    """The state digest after each round, in order."""

    positions: dict[int, RecordPosition] = field(default_factory=dict)
    """Where the record with a round's outcome stands."""

    locations: dict[int, records.BodyLocation] = field(default_factory=dict)
    """Where the body of a round's outcome is, while it is kept."""

    void: set[int] = field(default_factory=set)
    """Rounds that have no body."""

    lost_through: int = 0
    """The last round of an asynchronous run whose roster is lost."""

    @property
    def digest(self) -> bytes:
        """That of the present state."""
        return self.digests[self.round]

    def leads_from(self, round: int) -> bool:
        """Return whether the means after the state of `round` are all kept."""
        return round in self.digests and all(
            number in self.locations or number in self.void
            for number in range(round + 1, self.round + 1)
        )


class RecordedRun:
    """A run up to the last record."""

    def __init__(self, read_roster: Callable[[int, int], Roster]) -> None:
        self.created: records.CreatedRecord | None = None
        self.model: ModelSpec | None = None
        self.members: dict[str, JournalledMember] = {}
        """Every island that joined and is not forgotten, in its latest life."""

        self._slots: dict[int, str] = {}
        """The island of each slot: read for every replayed incarnation."""

        self.constants: dict[str, int] = {}
        """The size of every constant that was ever here, by its digest in hex."""

        self.epochs: list[records.EpochRecord] = []
        self.is_paused = False
        self.move: records.MoveRecord | None = None
        self.fragments: list[RecordedFragment] = []
        self.rosters: Mapping[tuple[int, int], Roster] = Rosters(self, read_roster)
        """By fragment and round, for every outcome that is known."""

        self.counted: dict[tuple[int, str], CountedUpdate] = {}
        """By fragment and island."""

        self.windows = Windows()
        """Of the islands, with dynamic local updates."""

        self.ledger: RowLedger | None = None
        """Of a run that deals out rows, once it has weights."""

        self.staged: dict[Update, records.StagedRecord] = {}
        """Departing updates whose round is not over."""

        self.listed: dict[tuple[int, str], ListedUpdate] = {}
        """By fragment and island; empty in a synchronous run."""

        self.last_rounds: tuple[int, ...] | None = None
        """Of each fragment, once the end of an asynchronous run is decided."""

        self.ended: records.EndedRecord | None = None

    @property
    def is_async(self) -> bool:
        """Whether an update stands until a roster lists it."""
        return self._sync.get("mode") == "async"

    @property
    def _has_windows(self) -> bool:
        """Whether the run has dynamic local updates."""
        return bool(self._sync.get("dynamic_local_updates"))

    @property
    def _sync(self) -> Mapping[str, object]:
        sync = self.created.settings.get("sync") if self.created else None
        return sync if isinstance(sync, dict) else {}

    def require(self, record: records.Record) -> None:
        """Return if `record` may come next; UsageError says why it may not."""
        if (self.created is None) != isinstance(record, records.CreatedRecord):
            raise UsageError(
                f"A journal starts with one record that creates the run; "
                f"{type(record).__name__} cannot be record "
                f"{'1' if self.created is None else '2 or later'}."
            )
        match record:
            case records.FoundedRecord() | records.ArrivedRecord():
                self.require_no_weights()
            case records.PassedRecord():
                self._require_passed(record)
            case records.CountedRecord(fragment=fragment, round=round):
                self._require_over(fragment, round)
            case records.WindowRecord(fragment=fragment):
                self.fragment(fragment)
            case records.JoinedRecord():
                self._require_joined(record)
            case records.LeftRecord():
                self._require_left(record)
            case records.EpochRecord(number=number) if number != len(self.epochs) + 1:
                raise UsageError(
                    f"Epoch {number} cannot follow epoch {len(self.epochs)}."
                )
            case records.StagedRecord(fragment=fragment) if self.is_async:
                self.fragment(fragment)
            case records.StagedRecord(fragment=fragment, round=round):
                self._require_open(fragment, round)
            case records.CommittedRecord():
                self._require_next(record)
            case records.RecoveredRecord():
                self._require_recovered(record)
            case (
                records.DataRecord()
                | records.ClaimRecord()
                | records.ReleasedRecord()
                | records.LedgerRecord()
                | records.HoldingRecord()
            ):
                self._with_rows(record)
            case records.EndSetRecord(rounds=rounds):
                self._require_end(rounds)
            case records.EndedRecord() if self.ended is not None:
                raise UsageError(f"The run has ended already: {self.ended.reason!r}.")

    def apply(self, record: records.Record, position: RecordPosition) -> None:
        """Add a record that `require` lets pass."""
        match record:
            case records.CreatedRecord():
                self.created = record
            case records.FoundedRecord(model=model, digests=digests):
                self.model = model
                self.fragments = [
                    RecordedFragment(digests={0: digest}) for digest in digests
                ]
                self._begin_ledger()
            case records.ArrivedRecord():
                self._arrive(record)
            case records.PassedRecord():
                self._pass(record, position)
            case records.CountedRecord(fragment=fragment, island=island):
                counted = CountedUpdate(record.round, record.inner_steps, record.tokens)
                self.counted[fragment, island] = counted
            case records.WindowRecord(fragment=fragment, island=island):
                round = self.fragments[fragment].round
                self._add_windows({island: record.window}, fragment, round)
            case records.JoinedRecord():
                self._join(record)
            case records.LeftRecord(island=island, reason=reason):
                departed = replace(self.members[island], has_left=True, reason=reason)
                self.members[island] = departed
            case records.ConstantRecord(digest=digest, size=size):
                self.constants[digest.hex()] = size
            case records.EpochRecord():
                self.epochs.append(record)
            case records.PauseRecord(is_paused=is_paused):
                self.is_paused = is_paused
            case records.MoveRecord():
                self.move = record if record.target else None
            case records.StagedRecord():
                self.staged[record.fragment, record.round, record.island] = record
            case records.CommittedRecord():
                self._commit(record, position)
            case records.RecoveredRecord():
                self._recover(record, position)
            case records.EndSetRecord(rounds=rounds):
                self.last_rounds = rounds or None
            case records.EndedRecord():
                self.ended = record
            case (
                records.DataRecord()
                | records.ClaimRecord()
                | records.ReleasedRecord()
                | records.LedgerRecord()
                | records.HoldingRecord()
            ):
                self.ledger = self._with_rows(record)

    def fragment(self, index: int) -> RecordedFragment:
        """Return the rounds of a fragment.

        Raises:
            UsageError: the run has no such fragment, or no weights yet.
        """
        if not 0 <= index < len(self.fragments):
            raise UsageError(
                f"Fragment {index} does not exist: the journal knows "
                f"{len(self.fragments)}. Found the run first."
            )
        return self.fragments[index]

    def require_no_weights(self) -> None:
        """Return if the run can be given its first weights; UsageError if it cannot."""
        if self.model is not None:
            raise UsageError("The run has been founded already. Join it instead.")

    def _require_joined(self, record: records.JoinedRecord) -> None:
        before = self.members.get(record.island)
        latest = before.incarnation if before else 0
        if record.incarnation <= latest:
            raise UsageError(
                f"Incarnation {record.incarnation} of island {record.island!r} cannot "
                f"follow incarnation {latest}."
            )
        owner = self._in_slot(record.slot)
        slot = before.slot if before else record.slot
        is_own = owner in (None, record.island) and slot == record.slot
        if not is_own and not self._may_take_slot(record, before):
            raise UsageError(
                f"Slot {record.slot} cannot be island {record.island!r}'s: a slot "
                "belongs to one name for life if anything of it counted, and the "
                f"journal has {owner!r} there, and the island in slot {slot}."
            )

    def _may_take_slot(
        self, record: records.JoinedRecord, before: JournalledMember | None
    ) -> bool:
        """Return whether a new name takes the slot of one that nothing refers to."""
        other = self._in_slot(record.slot)
        if before is not None or other is None:
            return False
        counted = any(island == other for _, island in self.counted)
        return not counted and all(key[2] != other for key in self.staged)

    def _in_slot(self, slot: int) -> str | None:
        return self._slots.get(slot)

    def _require_left(self, record: records.LeftRecord) -> None:
        member = self.members.get(record.island)
        if member is None or (member.incarnation, member.has_left) != (
            record.incarnation,
            False,
        ):
            raise UsageError(
                f"Incarnation {record.incarnation} of island {record.island!r} cannot "
                f"leave: the journal knows {member}."
            )

    def _require_open(self, fragment: int, round: int) -> RecordedFragment:
        recorded = self.fragment(fragment)
        if round <= recorded.round:
            raise UsageError(
                f"Round {round} of fragment {fragment} is over: round "
                f"{recorded.round} is committed."
            )
        return recorded

    def _require_over(self, fragment: int, round: int) -> None:
        recorded = self.fragment(fragment)
        if round > recorded.round:
            raise UsageError(
                f"Round {round} of fragment {fragment} is not over: round "
                f"{recorded.round} is the last."
            )

    def _require_end(self, rounds: tuple[int, ...]) -> None:
        """Return if these can be the last rounds of the fragments."""
        committed = [recorded.round for recorded in self.fragments]
        is_right = len(rounds) == len(committed) and all(map(ge, rounds, committed))
        has_them = self.is_async or self.ledger is not None
        if not has_them or (rounds and not is_right):
            raise UsageError(
                f"The last rounds {list(rounds)} are not those of an asynchronous run "
                f"that has committed the rounds {committed}."
            )

    def _require_passed(self, record: records.PassedRecord) -> None:
        recorded = self.fragment(record.fragment)
        if recorded.arrived != recorded.round or len(recorded.digests) > 1:
            raise UsageError(
                f"The earlier rounds of fragment {record.fragment} are recorded once, "
                "right after the run has moved here."
            )
        first = recorded.round - len(record.outcomes) + 1
        bases = [outcome.fixed.base for outcome in record.outcomes]
        expected = [
            (record.fragment, first + index) for index in range(len(record.outcomes))
        ]
        actual = [
            (outcome.fixed.fragment, outcome.fixed.round) for outcome in record.outcomes
        ]
        is_right = (
            len(record.bases) <= recorded.round
            and actual == expected
            and tuple(bases) == record.bases[len(record.bases) - len(bases) :]
        )
        if not is_right:
            raise UsageError(
                f"{len(record.bases)} bases and the outcomes of {actual} do not lead "
                f"to round {recorded.round} of fragment {record.fragment}."
            )

    def _require_next(self, record: records.CommittedRecord) -> None:
        fixed = record.agreed.fixed
        recorded = self._require_open(fixed.fragment, fixed.round)
        if (fixed.round, fixed.base) != (recorded.round + 1, recorded.digest):
            raise UsageError(
                f"Round {fixed.round} of fragment {fixed.fragment} on state "
                f"{fixed.base.hex()} cannot be committed: next is round "
                f"{recorded.round + 1} on state {recorded.digest.hex()}."
            )
        if record.location is None and record.digest_after != fixed.base:
            raise UsageError(
                f"Round {fixed.round} of fragment {fixed.fragment} is void, and cannot "
                f"change the state to {record.digest_after.hex()}."
            )

    def _require_recovered(self, record: records.RecoveredRecord) -> None:
        recorded = self._require_open(record.fragment, record.round)
        if record.round - recorded.round > MAX_LOST_ROUNDS:
            raise UsageError(
                f"Fragment {record.fragment} cannot be recovered from round "
                f"{recorded.round} to {record.round}: no run loses more than "
                f"{MAX_LOST_ROUNDS} rounds in one crash. Release 0.1.0 took such a "
                "state from any island that invented it. Restore the journal from a "
                "copy that is older than this record, or begin a new run."
            )
        rounds = [outcome.fixed.round for outcome in record.outcomes]
        bounds = [recorded.round, *rounds, record.round + 1]
        is_right = all(before < after for before, after in pairwise(bounds)) and all(
            outcome.fixed.fragment == record.fragment for outcome in record.outcomes
        )
        if not is_right:
            raise UsageError(
                f"The outcomes of rounds {rounds} do not belong to the recovery of "
                f"fragment {record.fragment} from round {recorded.round} to "
                f"{record.round}."
            )

    def _arrive(self, record: records.ArrivedRecord) -> None:
        self.model = record.model
        self.fragments = [
            RecordedFragment(round=round, arrived=round, digests={round: digest})
            for round, digest in zip(record.rounds, record.digests, strict=True)
        ]
        self._begin_ledger()

    def _pass(self, record: records.PassedRecord, position: RecordPosition) -> None:
        recorded = self.fragments[record.fragment]
        first = recorded.round - len(record.bases)
        recorded.digests = dict(enumerate(record.bases, start=first)) | recorded.digests
        for outcome, location in zip(record.outcomes, record.locations, strict=True):
            self._set_location(recorded, outcome.fixed.round, location)
            recorded.positions[outcome.fixed.round] = position

    def _join(self, record: records.JoinedRecord) -> None:
        other = self._in_slot(record.slot)
        if other is not None and other != record.island:
            del self.members[other]  # forgotten: see `_require_joined`
            self.windows = self.windows.without(other)
        self._slots[record.slot] = record.island
        self.members[record.island] = JournalledMember(
            island=record.island,
            incarnation=record.incarnation,
            slot=record.slot,
            key_digest=record.key_digest,
            nonce=record.nonce,
        )

    def _commit(
        self, record: records.CommittedRecord, position: RecordPosition
    ) -> None:
        fixed = record.agreed.fixed
        recorded = self.fragments[fixed.fragment]
        recorded.round = fixed.round
        recorded.digests[fixed.round] = record.digest_after
        self._set_location(recorded, fixed.round, record.location)
        self._outcome(record.agreed, position)
        self._remove_over(fixed.fragment)

    def _set_location(
        self,
        recorded: RecordedFragment,
        round: int,
        location: records.BodyLocation | None,
    ) -> None:
        if location is None:
            recorded.void.add(round)
        else:
            recorded.locations[round] = location

    def _recover(
        self, record: records.RecoveredRecord, position: RecordPosition
    ) -> None:
        recorded = self.fragments[record.fragment]
        for outcome in record.outcomes:
            recorded.digests[outcome.fixed.round - 1] = outcome.fixed.base
            self._outcome(outcome, position)
        lost = (
            set(range(recorded.round + 1, record.round + 1)) - recorded.positions.keys()
        )
        recorded.lost_through = max(lost, default=recorded.lost_through)
        recorded.round = record.round
        recorded.digests[record.round] = record.digest
        self._remove_over(record.fragment)

    def _outcome(self, agreed: records.AgreedRecord, position: RecordPosition) -> None:
        fragment, round = agreed.fixed.fragment, agreed.fixed.round
        self.fragments[fragment].positions[round] = position
        roster = agreed.roster
        for entry in roster.counted:
            counted = CountedUpdate(round, entry.inner_steps, entry.tokens)
            self.counted[fragment, entry.island] = counted
        if self.is_async:
            self.listed |= listed_updates(roster, fragment=fragment, round=round)
            self._remove_listed(roster, fragment)
        self._add_windows(roster.windows, fragment, round)
        if self.ledger is not None:
            self.ledger = self.ledger.settled(fragment, roster)

    def _add_windows(
        self, windows: Mapping[str, int], fragment: int, round: int
    ) -> None:
        if self._has_windows:
            self.windows = self.windows.adding(windows, fragment=fragment, round=round)

    def _begin_ledger(self) -> None:
        """Begin the ledger of a run that deals out rows."""
        tables = self.created.settings if self.created else {}
        table = tables.get("data")
        data = DataSection(**table) if isinstance(table, dict) else DataSection()
        if data.is_dealt:
            self.ledger = RowLedger(
                unit_rows=data.unit_rows,
                passes=data.passes,
                num_fragments=len(self.fragments),
            )

    def _with_rows(self, record: RowRecord) -> RowLedger:
        """Return the ledger after a record of rows; UsageError if it cannot follow."""
        if self.ledger is None:
            raise UsageError(
                f"{type(record).__name__} cannot follow: this run deals out no rows, "
                "or has no weights yet."
            )
        match record:
            case records.DataRecord(rows=rows, fingerprint=fingerprint):
                data = DataSpec(rows=rows or None, fingerprint=fingerprint)
                return self.ledger.opened(data)
            case records.ClaimRecord(island=island, number=number):
                return self.ledger.claimed(island, number, record.spans)
            case records.ReleasedRecord(island=island):
                return self.ledger.released(island)
            case records.LedgerRecord():
                return _moved(self.ledger, record)
            case records.HoldingRecord():
                return _with_holding(self.ledger, record)

    def is_over(self, header: Header) -> bool:
        """Return whether a departing update can no longer count."""
        recorded = self.fragment(header.fragment)
        if not self.is_async:
            return header.round <= recorded.round
        listed = self.listed.get((header.fragment, header.island))
        is_listed = listed is not None and listed.covers(header)
        return header.round <= recorded.lost_through or is_listed

    def _remove_listed(self, roster: Roster, fragment: int) -> None:
        """Remove the staged updates that a roster of an asynchronous run lists."""
        digests = {entry.digest for entry in roster.entries}
        for key, record in list(self.staged.items()):
            if key[0] == fragment and record.digest in digests:
                del self.staged[key]

    def _remove_over(self, fragment: int) -> None:
        """Remove the staged updates whose rounds are over, or whose roster is lost."""
        recorded = self.fragments[fragment]
        through = recorded.lost_through if self.is_async else recorded.round
        for key in [key for key in self.staged if key[0] == fragment]:
            if key[1] <= through:
                del self.staged[key]


class Rosters(Mapping[tuple[int, int], Roster]):
    """The roster of every recorded outcome, read from the log on demand."""

    def __init__(
        self, recorded: RecordedRun, read_roster: Callable[[int, int], Roster]
    ) -> None:
        self._recorded, self._read = recorded, read_roster

    def __getitem__(self, key: tuple[int, int]) -> Roster:
        fragment, round = key
        if key not in self:
            raise KeyError(key)
        return self._read(fragment, round)

    def __contains__(self, key: object) -> bool:
        match key:
            case (int(fragment), int(round)):
                fragments = self._recorded.fragments
                return (
                    0 <= fragment < len(fragments)
                    and round in fragments[fragment].positions
                )
        return False

    def __iter__(self) -> Iterator[tuple[int, int]]:
        for fragment, recorded in enumerate(self._recorded.fragments):
            for round in recorded.positions:
                yield fragment, round

    def __len__(self) -> int:
        return sum(len(recorded.positions) for recorded in self._recorded.fragments)


RowRecord = (
    records.DataRecord
    | records.ClaimRecord
    | records.ReleasedRecord
    | records.LedgerRecord
    | records.HoldingRecord
)


def _moved(ledger: RowLedger, record: records.LedgerRecord) -> RowLedger:
    """Return the ledger of a run that was moved here; UsageError if it cannot be."""
    sizes = {len(record.counted), len(record.refused)}
    if ledger.is_open or ledger.front or sizes != {ledger.num_fragments}:
        raise UsageError(
            f"A ledger of {sorted(sizes)} fragments cannot follow: the run has "
            f"{ledger.num_fragments}, and {ledger.front} turns were dealt."
        )
    return replace(
        ledger,
        is_open=record.is_open,
        rows=record.rows or None,
        fingerprint=record.fingerprint,
        front=record.front,
        free=Spans.unpack(record.free),
        counted=tuple(map(Spans.unpack, record.counted)),
        refused=tuple(map(Spans.unpack, record.refused)),
    )


def _with_holding(ledger: RowLedger, record: records.HoldingRecord) -> RowLedger:
    """Return the ledger with the rows of one island."""
    in_hand, partly = Spans.unpack(record.in_hand), Spans.unpack(record.partly)
    answers = map(Spans.unpack, record.claims)
    claims = tuple(zip(record.numbers, answers, strict=True))
    island = record.island
    return replace(
        ledger,
        holdings={**ledger.holdings, island: in_hand} if in_hand else ledger.holdings,
        partly={**ledger.partly, island: partly} if partly else ledger.partly,
        claims={**ledger.claims, island: claims} if claims else ledger.claims,
    )
