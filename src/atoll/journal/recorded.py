"""What the records of a journal add up to.

Rule 1: `require` says whether a record may follow the ones before it, and `apply` adds
        it. A record that is refused is never written; in a log that is read, the same
        refusal is damage.
Rule 2: this file knows no disk. It remembers where a round's record stands, so that its
        roster can be read again for the life of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

from atoll.errors import UsageError
from atoll.journal.log import Where
from atoll.journal.records import (
    Agreed,
    Arrived,
    Committed,
    ConstantKept,
    CountedSet,
    Created,
    Ended,
    EpochSet,
    Founded,
    Joined,
    Left,
    MoveSet,
    Passed,
    PauseSet,
    Place,
    Record,
    Recovered,
    Staged,
)
from atoll.protocol import ModelSpec
from atoll.wire import Roster

MAX_LOST_ROUNDS = 2**20
"""More than twelve days of rounds of one second: a jump beyond was never trained."""

Update = tuple[int, int, str]
"""Fragment, round and island: what an update is counted by."""


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


class Counted(NamedTuple):
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

    where: dict[int, Where] = field(default_factory=dict)
    """Where the record with a round's outcome stands."""

    places: dict[int, Place] = field(default_factory=dict)
    """Where the body of a round's outcome is, while it is kept."""

    void: set[int] = field(default_factory=set)
    """Rounds that have no body."""

    @property
    def digest(self) -> bytes:
        """That of the present state."""
        return self.digests[self.round]

    def leads_from(self, round: int) -> bool:
        """Return whether the means after the state of `round` are all kept."""
        return round in self.digests and all(
            number in self.places or number in self.void
            for number in range(round + 1, self.round + 1)
        )


class Recorded:
    """A run up to the last record."""

    def __init__(self, read_roster: Callable[[int, int], Roster]) -> None:
        self.created: Created | None = None
        self.model: ModelSpec | None = None
        self.members: dict[str, JournalledMember] = {}
        """Every island that joined and is not forgotten, in its latest life."""

        self._slots: dict[int, str] = {}
        """Whose each slot is: looked up for every life that is read back."""

        self.constants: dict[str, int] = {}
        """The size of every constant that was ever here, by its digest in hex."""

        self.epochs: list[EpochSet] = []
        self.is_paused = False
        self.move: MoveSet | None = None
        self.fragments: list[RecordedFragment] = []
        self.rosters: Mapping[tuple[int, int], Roster] = Rosters(self, read_roster)
        """By fragment and round, for every outcome that is known."""

        self.counted: dict[tuple[int, str], Counted] = {}
        """By fragment and island."""

        self.staged: dict[Update, Staged] = {}
        """Departing updates whose round is not over."""

        self.ended: Ended | None = None

    def require(self, record: Record) -> None:
        """Return if `record` may come next; UsageError says why it may not."""
        if (self.created is None) != isinstance(record, Created):
            raise UsageError(
                f"A journal starts with one record that creates the run; "
                f"{type(record).__name__} cannot be record "
                f"{'1' if self.created is None else '2 or later'}."
            )
        match record:
            case Founded() | Arrived():
                self.require_no_weights()
            case Passed():
                self._require_passed(record)
            case CountedSet(fragment=fragment, round=round):
                self._require_over(fragment, round)
            case Joined():
                self._require_joined(record)
            case Left():
                self._require_left(record)
            case EpochSet(number=number) if number != len(self.epochs) + 1:
                raise UsageError(
                    f"Epoch {number} cannot follow epoch {len(self.epochs)}."
                )
            case Staged(fragment=fragment, round=round):
                self._require_open(fragment, round)
            case Committed():
                self._require_next(record)
            case Recovered():
                self._require_recovered(record)
            case Ended() if self.ended is not None:
                raise UsageError(f"The run has ended already: {self.ended.reason!r}.")

    def apply(self, record: Record, where: Where) -> None:
        """Add a record that `require` lets pass."""
        match record:
            case Created():
                self.created = record
            case Founded(model=model, digests=digests):
                self.model = model
                self.fragments = [
                    RecordedFragment(digests={0: digest}) for digest in digests
                ]
            case Arrived():
                self._arrive(record)
            case Passed():
                self._pass(record, where)
            case CountedSet(fragment=fragment, island=island):
                counted = Counted(record.round, record.inner_steps, record.tokens)
                self.counted[fragment, island] = counted
            case Joined():
                self._join(record)
            case Left(island=island, reason=reason):
                left = replace(self.members[island], has_left=True, reason=reason)
                self.members[island] = left
            case ConstantKept(digest=digest, size=size):
                self.constants[digest.hex()] = size
            case EpochSet():
                self.epochs.append(record)
            case PauseSet(is_paused=is_paused):
                self.is_paused = is_paused
            case MoveSet():
                self.move = record if record.target else None
            case Staged():
                self.staged[record.fragment, record.round, record.island] = record
            case Committed():
                self._commit(record, where)
            case Recovered():
                self._recover(record, where)
            case Ended():
                self.ended = record

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

    def _require_joined(self, record: Joined) -> None:
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

    def _may_take_slot(self, record: Joined, before: JournalledMember | None) -> bool:
        """Return whether a new name takes the slot of one that nothing refers to."""
        other = self._in_slot(record.slot)
        if before is not None or other is None:
            return False
        counted = any(island == other for _, island in self.counted)
        return not counted and all(key[2] != other for key in self.staged)

    def _in_slot(self, slot: int) -> str | None:
        return self._slots.get(slot)

    def _require_left(self, record: Left) -> None:
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
        known = self.fragment(fragment)
        if round <= known.round:
            raise UsageError(
                f"Round {round} of fragment {fragment} is over: round {known.round} is "
                "committed."
            )
        return known

    def _require_over(self, fragment: int, round: int) -> None:
        known = self.fragment(fragment)
        if round > known.round:
            raise UsageError(
                f"Round {round} of fragment {fragment} is not over: round "
                f"{known.round} is the last."
            )

    def _require_passed(self, record: Passed) -> None:
        known = self.fragment(record.fragment)
        if known.arrived != known.round or len(known.digests) > 1:
            raise UsageError(
                f"What fragment {record.fragment} went through is said once, right "
                "after the run has come here."
            )
        first = known.round - len(record.outcomes) + 1
        bases = [each.fixed.base for each in record.outcomes]
        expected = [
            (record.fragment, first + index) for index in range(len(record.outcomes))
        ]
        found = [(each.fixed.fragment, each.fixed.round) for each in record.outcomes]
        is_right = (
            len(record.bases) <= known.round
            and found == expected
            and tuple(bases) == record.bases[len(record.bases) - len(bases) :]
        )
        if not is_right:
            raise UsageError(
                f"{len(record.bases)} bases and the outcomes of {found} do not lead "
                f"to round {known.round} of fragment {record.fragment}."
            )

    def _require_next(self, record: Committed) -> None:
        fixed = record.agreed.fixed
        known = self._require_open(fixed.fragment, fixed.round)
        if (fixed.round, fixed.base) != (known.round + 1, known.digest):
            raise UsageError(
                f"Round {fixed.round} of fragment {fixed.fragment} on state "
                f"{fixed.base.hex()} cannot be committed: next is round "
                f"{known.round + 1} on state {known.digest.hex()}."
            )
        if record.place is None and record.digest_after != fixed.base:
            raise UsageError(
                f"Round {fixed.round} of fragment {fixed.fragment} is void, and cannot "
                f"change the state to {record.digest_after.hex()}."
            )

    def _require_recovered(self, record: Recovered) -> None:
        known = self._require_open(record.fragment, record.round)
        if record.round - known.round > MAX_LOST_ROUNDS:
            raise UsageError(
                f"Fragment {record.fragment} cannot be recovered from round "
                f"{known.round} to {record.round}: no run loses more than "
                f"{MAX_LOST_ROUNDS} rounds at once. Release 0.1.0 took such a state "
                "from any island that invented it. Restore the journal from a copy "
                "that is older than this record, or begin a new run."
            )
        rounds = [each.fixed.round for each in record.outcomes]
        bounds = [known.round, *rounds, record.round + 1]
        is_right = all(before < after for before, after in pairwise(bounds)) and all(
            each.fixed.fragment == record.fragment for each in record.outcomes
        )
        if not is_right:
            raise UsageError(
                f"The outcomes of rounds {rounds} do not belong to the recovery of "
                f"fragment {record.fragment} from round {known.round} to "
                f"{record.round}."
            )

    def _arrive(self, record: Arrived) -> None:
        self.model = record.model
        self.fragments = [
            RecordedFragment(round=round, arrived=round, digests={round: digest})
            for round, digest in zip(record.rounds, record.digests, strict=True)
        ]

    def _pass(self, record: Passed, where: Where) -> None:
        known = self.fragments[record.fragment]
        first = known.round - len(record.bases)
        known.digests = dict(enumerate(record.bases, start=first)) | known.digests
        for outcome, place in zip(record.outcomes, record.places, strict=True):
            self._keep_place(known, outcome.fixed.round, place)
            known.where[outcome.fixed.round] = where

    def _join(self, record: Joined) -> None:
        other = self._in_slot(record.slot)
        if other is not None and other != record.island:
            del self.members[other]  # forgotten: see `_require_joined`
        self._slots[record.slot] = record.island
        self.members[record.island] = JournalledMember(
            island=record.island,
            incarnation=record.incarnation,
            slot=record.slot,
            key_digest=record.key_digest,
            nonce=record.nonce,
        )

    def _commit(self, record: Committed, where: Where) -> None:
        fixed = record.agreed.fixed
        known = self.fragments[fixed.fragment]
        known.round = fixed.round
        known.digests[fixed.round] = record.digest_after
        self._keep_place(known, fixed.round, record.place)
        self._outcome(record.agreed, where)
        self._over(fixed.fragment, fixed.round)

    def _keep_place(
        self, known: RecordedFragment, round: int, place: Place | None
    ) -> None:
        if place is None:
            known.void.add(round)
        else:
            known.places[round] = place

    def _recover(self, record: Recovered, where: Where) -> None:
        known = self.fragments[record.fragment]
        for outcome in record.outcomes:
            known.digests[outcome.fixed.round - 1] = outcome.fixed.base
            self._outcome(outcome, where)
        known.round = record.round
        known.digests[record.round] = record.digest
        self._over(record.fragment, record.round)

    def _outcome(self, agreed: Agreed, where: Where) -> None:
        fragment, round = agreed.fixed.fragment, agreed.fixed.round
        self.fragments[fragment].where[round] = where
        for entry in agreed.roster.counted:
            counted = Counted(round, entry.inner_steps, entry.tokens)
            self.counted[fragment, entry.island] = counted

    def _over(self, fragment: int, round: int) -> None:
        for key in [key for key in self.staged if key[0] == fragment]:
            if key[1] <= round:
                del self.staged[key]


class Rosters(Mapping[tuple[int, int], Roster]):
    """The roster of every known outcome, read from the log when it is asked for."""

    def __init__(
        self, recorded: Recorded, read_roster: Callable[[int, int], Roster]
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
                known = self._recorded.fragments
                return 0 <= fragment < len(known) and round in known[fragment].where
        return False

    def __iter__(self) -> Iterator[tuple[int, int]]:
        for fragment, known in enumerate(self._recorded.fragments):
            for round in known.where:
                yield fragment, round

    def __len__(self) -> int:
        return sum(len(known.where) for known in self._recorded.fragments)
