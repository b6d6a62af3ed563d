"""The records of a journal: one frozen value per kind.

Rule 1: a record that exists is right; building a wrong one raises UsageError.
Rule 2: a record has one encoding (`encoding.encode`), and holds the data that can be
        verified without any other file: names, numbers, digests, the roster.
Rule 3: large bodies are separate files; a record names the file, and comes after it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from atoll.data import Spans
from atoll.data.spans import MAX_TURN, is_packed
from atoll.errors import CorruptError, UsageError
from atoll.protocol import ModelSpec
from atoll.wire import Header, Roster, pack, unpack, unpack_roster
from atoll.wire.frame import FIXED, FIXED_BYTES, PREFIX_BYTES, FixedFields
from atoll.wire.header import MAX_FRAGMENT
from atoll.wire.roster import name_fault, reason_fault

U64_MAX = 2**64 - 1
STATE_DIGEST_BYTES = 16
UPDATE_DIGEST_BYTES = 32
CONSTANT_DIGEST_BYTES = 32
MAX_KEY_BYTES = 64
MAX_FRAGMENTS = 65536
MAX_BASES = 1024


@dataclass(frozen=True, kw_only=True)
class CreatedRecord:
    """A run exists; always the first record."""

    run: str
    settings: Mapping[str, object]
    """Every value that is set, as tables of a run file."""

    fingerprint: str

    def __post_init__(self) -> None:
        _require(_name(self.run, "run"), _reason(self.fingerprint, "fingerprint"))


@dataclass(frozen=True, kw_only=True)
class FoundedRecord:
    """The run has weights: `states/<fragment>/0` holds each fragment's."""

    model: ModelSpec
    digests: tuple[bytes, ...]
    """The state digest of each fragment."""

    def __post_init__(self) -> None:
        if not 1 <= len(self.digests) <= MAX_FRAGMENTS:
            raise UsageError(
                f"{len(self.digests)} fragments must be from 1 to {MAX_FRAGMENTS}."
            )
        for digest in self.digests:
            _require(_exactly(digest, STATE_DIGEST_BYTES, "a state digest"))


@dataclass(frozen=True, kw_only=True)
class ArrivedRecord:
    """The run has come with its weights: `states/<fragment>/<round>` holds each."""

    model: ModelSpec
    rounds: tuple[int, ...]
    """Of each fragment, the last one that was over elsewhere."""

    digests: tuple[bytes, ...]
    """The state digest after it."""

    def __post_init__(self) -> None:
        if not 1 <= len(self.digests) <= MAX_FRAGMENTS:
            raise UsageError(
                f"{len(self.digests)} fragments must be from 1 to {MAX_FRAGMENTS}."
            )
        if len(self.rounds) != len(self.digests):
            raise UsageError(
                f"{len(self.rounds)} rounds are not those of {len(self.digests)} "
                "fragments."
            )
        for round, digest in zip(self.rounds, self.digests, strict=True):
            _require(
                _number(round, "round"),
                _exactly(digest, STATE_DIGEST_BYTES, "a state digest"),
            )


@dataclass(frozen=True, kw_only=True)
class JoinedRecord:
    """One life of an island began."""

    island: str
    incarnation: int
    slot: int
    key_digest: bytes = b""
    nonce: bytes = b""
    """Random value of this incarnation, which makes a repeated join idempotent."""

    def __post_init__(self) -> None:
        _require(
            _name(self.island, "island"),
            _number(self.incarnation, "incarnation"),
            _number(self.slot, "slot"),
            _at_most(self.key_digest, MAX_KEY_BYTES, "key_digest"),
            _at_most(self.nonce, MAX_KEY_BYTES, "nonce"),
        )


@dataclass(frozen=True, kw_only=True)
class LeftRecord:
    """An incarnation has left, and no round waits for it."""

    island: str
    incarnation: int
    reason: str = ""

    def __post_init__(self) -> None:
        _require(
            _name(self.island, "island"),
            _number(self.incarnation, "incarnation"),
            _reason(self.reason, "reason"),
        )


@dataclass(frozen=True, kw_only=True)
class EpochRecord:
    """Settings that may change at run time have changed."""

    number: int
    values: Mapping[str, object]
    """Dotted keys and their new values."""

    def __post_init__(self) -> None:
        _require(_number(self.number, "number"))


@dataclass(frozen=True, kw_only=True)
class ConstantRecord:
    """A constant is stored: `constants/<digest>` holds it, complete and verified."""

    digest: bytes
    size: int

    def __post_init__(self) -> None:
        _require(
            _exactly(self.digest, CONSTANT_DIGEST_BYTES, "a constant's digest"),
            _number(self.size, "size"),
        )


@dataclass(frozen=True, kw_only=True)
class PauseRecord:
    """An operator has stopped rounds from closing, or lets them close again."""

    is_paused: bool


@dataclass(frozen=True, kw_only=True)
class MoveRecord:
    """The run is being moved or has moved; without a target it stays."""

    target: str = ""
    nonce: str = ""
    is_over: bool = False

    def __post_init__(self) -> None:
        _require(_reason(self.target, "target"), _reason(self.nonce, "nonce"))
        if not self.target and (self.nonce or self.is_over):
            raise UsageError("a move has a target.")


@dataclass(frozen=True, kw_only=True)
class StagedRecord:
    """A departing update is durable in its own file."""

    fragment: int
    round: int
    island: str
    digest: bytes
    """The update digest."""

    def __post_init__(self) -> None:
        _require(
            _fragment(self.fragment),
            _number(self.round, "round"),
            _name(self.island, "island"),
            _exactly(self.digest, UPDATE_DIGEST_BYTES, "digest"),
        )


@dataclass(frozen=True, kw_only=True)
class BodyLocation:
    """Where the body of an agreed frame is.

    `file` 0 is a separate file, and any other is shared with other small bodies; the
    body starts at byte `first`.
    """

    file: int = 0
    first: int = 0

    def __post_init__(self) -> None:
        _require(_number(self.file, "file"), _number(self.first, "first"))


@dataclass(frozen=True)
class AgreedRecord:
    """The packed header of an agreed frame, parsed on demand.

    A journal holds one for every round of a run's life; unpacking them all would make
    opening it slow. `header` verifies everything.
    """

    packed: bytes

    def __post_init__(self) -> None:
        if len(self.packed) < FIXED_BYTES:
            raise UsageError(
                f"a header of {len(self.packed)} bytes must have {FIXED_BYTES} or more."
            )

    @classmethod
    def of(cls, header: Header) -> AgreedRecord:
        """Return a header as a journal holds it, and remember it unpacked."""
        agreed = cls(pack(header))
        agreed.__dict__["header"] = header
        return agreed

    @cached_property
    def fixed(self) -> FixedFields:
        return FixedFields._make(FIXED.unpack_from(self.packed, PREFIX_BYTES))

    @property
    def roster(self) -> Roster:
        """The roster; CorruptError if the bytes are none."""
        header: Header | None = self.__dict__.get("header")
        if header is not None and header.roster is not None:
            return header.roster
        fixed = self.fixed
        first = FIXED_BYTES + sum(
            (
                fixed.run_bytes,
                fixed.island_bytes,
                fixed.cursor_bytes,
                fixed.refused_bytes,
            )
        )
        return unpack_roster(self.packed[first : first + fixed.roster_bytes])

    @cached_property
    def header(self) -> Header:
        """The whole header, verified; CorruptError if it is not one of a round."""
        header = unpack(self.packed)
        if header.roster is None:
            raise CorruptError(f"the journal names the {header.name} as an outcome.")
        return header


@dataclass(frozen=True, kw_only=True)
class CommittedRecord:
    """A round is over: this is its outcome."""

    agreed: AgreedRecord
    digest_after: bytes
    """The fragment's state digest after the outer step."""

    epoch: int
    location: BodyLocation | None
    """None: the round is void, there is no body."""

    def __post_init__(self) -> None:
        _require(
            _exactly(self.digest_after, STATE_DIGEST_BYTES, "digest_after"),
            _number(self.epoch, "epoch"),
            _location_faults(self.agreed, self.location),
        )


@dataclass(frozen=True, kw_only=True)
class PassedRecord:
    """Outcomes of a fragment from before the move, which islands may still request."""

    fragment: int
    bases: tuple[bytes, ...]
    """The state digests before that of `ArrivedRecord`, one per round, oldest first."""

    outcomes: tuple[AgreedRecord, ...] = ()
    """Of the last rounds, in order."""

    locations: tuple[BodyLocation | None, ...] = ()
    """Where their bodies are."""

    def __post_init__(self) -> None:
        _require(_fragment(self.fragment))
        for base in self.bases:
            _require(_exactly(base, STATE_DIGEST_BYTES, "a state digest"))
        if len(self.bases) > MAX_BASES:
            raise UsageError(f"{len(self.bases)} bases must be at most {MAX_BASES}.")
        if len(self.outcomes) > 2 or len(self.locations) != len(self.outcomes):
            raise UsageError(
                f"{len(self.outcomes)} outcomes must be at most 2, with a place each, "
                f"not {len(self.locations)}."
            )
        for outcome, location in zip(self.outcomes, self.locations, strict=True):
            _require(_location_faults(outcome, location))


@dataclass(frozen=True, kw_only=True)
class CountedRecord:
    """How far an island's work had counted in a fragment when the run came here."""

    fragment: int
    island: str
    round: int
    inner_steps: int
    tokens: int

    def __post_init__(self) -> None:
        _require(
            _fragment(self.fragment),
            _name(self.island, "island"),
            _number(self.round, "round"),
            _number(self.inner_steps, "inner_steps"),
            _number(self.tokens, "tokens"),
        )


@dataclass(frozen=True, kw_only=True)
class WindowRecord:
    """The inner steps per window of an island when the run came here."""

    fragment: int
    """Whose last roster lists the island with this window."""

    island: str
    window: int

    def __post_init__(self) -> None:
        _require(
            _fragment(self.fragment),
            _name(self.island, "island"),
            _number(self.window, "window"),
        )


@dataclass(frozen=True, kw_only=True)
class RecoveredRecord:
    """The state of a later round was taken from an island; rounds between are lost."""

    fragment: int
    round: int
    digest: bytes
    """The state digest of `states/<fragment>/<round>`."""

    outcomes: tuple[AgreedRecord, ...] = ()
    """The last outcomes that islands still held, for their rosters."""

    def __post_init__(self) -> None:
        _require(
            _fragment(self.fragment),
            _number(self.round, "round"),
            _exactly(self.digest, STATE_DIGEST_BYTES, "digest"),
        )
        if len(self.outcomes) > 2:
            raise UsageError(f"{len(self.outcomes)} outcomes must be at most 2.")


@dataclass(frozen=True, kw_only=True)
class DataRecord:
    """An island has described the data of a run that deals out rows."""

    rows: int
    """0: a stream whose end is unknown."""

    fingerprint: str = ""

    def __post_init__(self) -> None:
        _require(
            _turn(self.rows, "rows"), _reason(self.fingerprint, "data fingerprint")
        )


@dataclass(frozen=True, kw_only=True)
class ClaimRecord:
    """A claim of an island has got turns, wherever they were."""

    island: str
    number: int
    packed: bytes
    """The turns, as in a roster."""

    def __post_init__(self) -> None:
        _require(
            _name(self.island, "island"),
            _number(self.number, "number"),
            _packed_turns(self.packed),
        )

    @cached_property
    def spans(self) -> Spans:
        return Spans.unpack(self.packed)


@dataclass(frozen=True, kw_only=True)
class ReleasedRecord:
    """The turns of an island that has gone are free."""

    island: str

    def __post_init__(self) -> None:
        _require(_name(self.island, "island"))


@dataclass(frozen=True, kw_only=True)
class LedgerRecord:
    """The ledger of rows of a run that was moved here, without its islands."""

    is_open: bool
    rows: int
    """0: a stream whose end is unknown, or data that no island has described."""

    fingerprint: str
    front: int
    free: bytes
    counted: tuple[bytes, ...]
    refused: tuple[bytes, ...]
    """By fragment, packed."""

    def __post_init__(self) -> None:
        _require(
            _turn(self.rows, "rows"),
            _reason(self.fingerprint, "data fingerprint"),
            _turn(self.front, "front"),
            *map(_turn_set, (self.free, *self.counted, *self.refused)),
        )


@dataclass(frozen=True, kw_only=True)
class HoldingRecord:
    """The rows of one island of a run that was moved here."""

    island: str
    in_hand: bytes
    partly: bytes
    numbers: tuple[int, ...]
    claims: tuple[bytes, ...]
    """Packed, by the numbers."""

    def __post_init__(self) -> None:
        _require(
            _name(self.island, "island"),
            *map(_turn_set, (self.in_hand, self.partly, *self.claims)),
        )
        if len(self.numbers) != len(self.claims):
            raise UsageError(
                f"{len(self.numbers)} claims have {len(self.claims)} answers."
            )


@dataclass(frozen=True, kw_only=True)
class EndSetRecord:
    """The end of an asynchronous run is decided; without rounds it is not."""

    rounds: tuple[int, ...] = ()
    """The last round of each fragment."""

    def __post_init__(self) -> None:
        if len(self.rounds) > MAX_FRAGMENTS:
            raise UsageError(
                f"{len(self.rounds)} last rounds must be at most {MAX_FRAGMENTS}."
            )
        for round in self.rounds:
            _require(_number(round, "round"))


@dataclass(frozen=True, kw_only=True)
class EndedRecord:
    """The run is over."""

    reason: str = ""

    def __post_init__(self) -> None:
        _require(_reason(self.reason, "reason"))


Record = (
    CreatedRecord
    | FoundedRecord
    | ArrivedRecord
    | ConstantRecord
    | JoinedRecord
    | LeftRecord
    | EpochRecord
    | PauseRecord
    | MoveRecord
    | StagedRecord
    | CommittedRecord
    | RecoveredRecord
    | PassedRecord
    | CountedRecord
    | WindowRecord
    | DataRecord
    | ClaimRecord
    | ReleasedRecord
    | LedgerRecord
    | HoldingRecord
    | EndSetRecord
    | EndedRecord
)


def _require(*checks: Iterator[str]) -> None:
    for faults in checks:
        for fault in faults:
            raise UsageError(f"{fault}.")


def _name(value: str, field: str) -> Iterator[str]:
    if fault := name_fault(value, field=field):
        yield fault


def _reason(value: str, field: str) -> Iterator[str]:
    if fault := reason_fault(value, field=field):
        yield fault


def _number(value: int, field: str) -> Iterator[str]:
    if not 0 <= value <= U64_MAX:
        yield f"{field}={value} must be from 0 to {U64_MAX}"


def _turn(value: int, field: str) -> Iterator[str]:
    if not 0 <= value <= MAX_TURN:
        yield f"{field}={value} must be from 0 to {MAX_TURN}"


def _packed_turns(packed: bytes) -> Iterator[str]:
    if not packed or not is_packed(packed):
        yield f"{packed[:32].hex()} are no packed turns"


def _turn_set(packed: bytes) -> Iterator[str]:
    if packed and not is_packed(packed):
        yield f"{packed[:32].hex()} are no packed turns"


def _location_faults(
    agreed: AgreedRecord, location: BodyLocation | None
) -> Iterator[str]:
    if (location is None) != (agreed.fixed.elements == 0):
        yield "a round has a place for its body unless it is void"


def _fragment(value: int) -> Iterator[str]:
    if not 0 <= value <= MAX_FRAGMENT:
        yield f"fragment={value} must be from 0 to {MAX_FRAGMENT}"


def _exactly(value: bytes, size: int, field: str) -> Iterator[str]:
    if len(value) != size:
        yield f"{field} has {len(value)} bytes; it must have {size}"


def _at_most(value: bytes, size: int, field: str) -> Iterator[str]:
    if len(value) > size:
        yield f"{field} has {len(value)} bytes, above the limit of {size}"
