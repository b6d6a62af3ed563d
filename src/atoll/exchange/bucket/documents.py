"""The small objects of a run in a bucket: their fields, and how they are checked.

Rule 1: every document names the run it belongs to; one of another run is refused.
Rule 2: an object that cannot be read raises `CorruptError` with its key.
Rule 3: an object begins with the BLAKE3 digest of all its other bytes, and names its
        key: a changed bit and an object that was copied over another are noticed.
Rule 4: rosters are a chain. Each names the digest of the one before it, the first one
        that of `run.json`; states and means name the roster that they follow.

Objects of Atoll 0.1.0 (format 1) have no digest. They are read, and the first roster
that is chained names the bytes of the last one that is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from atoll.errors import CorruptError, NoSuchObject, UsageError
from atoll.exchange.api import bodies as fields
from atoll.exchange.api.messages import (
    BEAT,
    MAX_FRAGMENTS,
    MODEL,
    WINDOW,
    read_stored_settings,
    settings_form,
)
from atoll.exchange.api.replies import DIGESTS
from atoll.exchange.bucket import keys
from atoll.fields import JsonField
from atoll.protocol import Heartbeat, ModelSpec
from atoll.settings import RunSettings
from atoll.store import Data, Store
from atoll.wire import OuterValues, Roster, blake3_digest, pack_roster, unpack_roster
from atoll.wire.digests import view_of
from atoll.wire.header import BASE_BYTES

FORMAT = 2
"""Raised when a document changes: an older Atoll then refuses the run by name."""

UNSEALED_FORMAT = 1
"""Of Atoll 0.1.0: without a digest, and without the object's key."""

DIGEST_BYTES = 32

RESTORE = (
    "Restore this object from a copy or an earlier version of the bucket, and do not "
    "remove it: `atoll inspect URL/KEY` shows its fields, and `atoll doctor URL` "
    "whether the run can be read again."
)

_OPENING = b'{"digest":"'
_SEALED_FROM = len(_OPENING) + 2 * DIGEST_BYTES

MAX_VALUES = 64
MAX_SHARDS = 4096
MAX_WANTS = 1024

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class SettingsDocument:
    """The settings that the run owns, as `atoll init` has put them."""

    run: str
    fingerprint: str
    """Of the settings when the run was made: later edits are detected by it."""

    settings: RunSettings


@dataclass(frozen=True, kw_only=True)
class RunDocument:
    """Founds the run, and names its first weights."""

    run: str
    fingerprint: str
    founding: str
    model: ModelSpec
    constants: tuple[str, ...] = ()
    """Digests of the constants that were put in full beside the first weights."""

    states: tuple[bytes, ...] = ()
    """BLAKE3 of the header of each first state. Empty: of 0.1.0, or none was put."""


@dataclass(frozen=True, kw_only=True)
class RosterHead:
    """The last closed round of a fragment, and the digest that its successor names."""

    round: int
    digest: bytes
    is_chained: bool = True
    """False: written by 0.1.0, so that its successor may be unchained as well."""


@dataclass(frozen=True, kw_only=True)
class Want:
    """A counted update that an island cannot verify, and needs another copy of."""

    fragment: int
    round: int
    island: str
    incarnation: int
    age: int = 0
    """By how much that is after the round that the update was sealed for."""

    @property
    def label(self) -> int:
        """The round that the update was sealed for, which is in its key."""
        return self.round - self.age


@dataclass(frozen=True, kw_only=True)
class SlotDocument:
    """The island that has a slot."""

    run: str
    island: str


@dataclass(frozen=True, kw_only=True)
class StandingUpdate:
    """An uncounted update that a member document names, so that it may count.

    It is of an earlier incarnation, or of one that has left. `round` is the round that
    it was sealed for.
    """

    fragment: int
    round: int
    incarnation: int


@dataclass(frozen=True, kw_only=True)
class MemberDocument:
    """One incarnation of an island, overwritten with each of its heartbeats."""

    run: str
    slot: int
    key: bytes
    nonce: bytes
    opened: tuple[int, ...]
    """The open rounds when it joined, which do not wait for it; empty: they all do."""

    stands: tuple[StandingUpdate, ...]
    beats: int
    has_left: bool
    beat: Heartbeat
    heads: tuple[RosterHead, ...] = ()
    """The last roster of each fragment that it has read: a reader that finds none at
    that key, or another, knows that the bucket is damaged."""

    controls: int = 0
    """The number of controls that it has read."""

    wants: tuple[Want, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ControlDocument:
    """A command of an operator; all of them form one sequence."""

    run: str
    action: str
    values: Mapping[str, Any]
    """With `set`: the values of the next epoch."""

    last_round: int | None = None
    """With `stop`."""

    last_rounds: tuple[int, ...] | None = None
    """With `stop` in an asynchronous run: the last round of each fragment."""

    island: str | None = None
    incarnation: int = 0
    """With `evict`."""

    target: str | None = None
    """With `move`, `moved` and `stay`: the URL that the run moves to."""

    nonce: str = ""
    """With the same actions: made for this move."""


@dataclass(frozen=True, kw_only=True)
class RosterDocument:
    """Closes a round, with all values that its outcome depends on."""

    run: str
    fragment: int
    round: int
    epoch: int
    base: bytes
    outer: OuterValues
    shards: tuple[str, ...]
    """The island that makes each part of the mean; empty: all read every update."""

    roster: Roster
    move: int = 0
    """Not 0 only in buckets of 0.1.0, where a move froze the round."""

    before: bytes = b""
    """Digest of the roster before it, or of `run.json`. Empty: of 0.1.0."""

    controls: int = 0
    """The number of controls that its writer had read."""

    claims: int | None = None
    """The number of claims that its writer had read; None: there are none."""

    digest: bytes = b""
    """Of the object that it was read from; not one of its fields."""


@dataclass(frozen=True, kw_only=True)
class CountedProgress:
    """The counted work of an island in a fragment."""

    island: str
    round: int
    inner_steps: int
    tokens: int
    window: int = 0
    """The island's inner steps per window from the state on; 0: `sync_every`."""


@dataclass(frozen=True, kw_only=True)
class ListedRow:
    """The last update of an island that a roster of an asynchronous run lists."""

    island: str
    round: int
    """Of the roster."""

    label: int
    incarnation: int


@dataclass(frozen=True, kw_only=True)
class StateDocument:
    """Completes a state, with the facts that later rosters do not contain."""

    run: str
    fragment: int
    round: int
    parts: int
    head: bytes
    """The packed header of the state's frame."""

    counted: tuple[CountedProgress, ...]
    bases: tuple[bytes, ...]
    roster: bytes = b""
    """Digest of the roster of its round, or of `run.json` if there is none here.
    Empty: of 0.1.0."""

    listed: tuple[ListedRow, ...] | None = None
    """The last update of each island that the rosters up to the state list; None in a
    synchronous run."""


ACTIONS = (
    "set",
    "pause",
    "resume",
    "save",
    "stop",
    "evict",
    "move",
    "moved",
    "stay",
)


def _scalars(value: object, field: str) -> dict[str, Any]:
    values = fields.require_table(value, field)
    if len(values) > MAX_VALUES:
        raise UsageError(f"{field} has {len(values)} values, above {MAX_VALUES}.")
    return values


def _outer(
    optimizer: str, lr: float, momentum: float, share: float = 0.0, buffer: int = 0
) -> OuterValues:
    return OuterValues(
        optimizer=optimizer, lr=lr, momentum=momentum, share=share, buffer=buffer
    )


BASE = fields.hexed(BASE_BYTES, BASE_BYTES)
DIGEST = fields.hexed(DIGEST_BYTES, DIGEST_BYTES)
_MAYBE_DIGEST = fields.hexed(0, DIGEST_BYTES)
_SETTINGS: JsonField[RunSettings] = JsonField(settings_form, read_stored_settings)
_OUTER = fields.row(
    _outer,
    {"optimizer": fields.text(32), "lr": fields.number(), "momentum": fields.number()},
    last={"share": fields.number(0.0, 1.0), "buffer": fields.integer(1, 2**32 - 1)},
)
_ROSTER = JsonField(
    lambda roster: pack_roster(roster).hex(),
    lambda value, field: unpack_roster(
        fields.hexed(0, fields.MAX_LARGE_BYTES).read(value, field)
    ),
)
_NUMBER = {"fragment": fields.integer(), "round": fields.integer()}

SETTINGS: JsonField[SettingsDocument] = fields.table(
    SettingsDocument,
    {"run": fields.NAME, "fingerprint": fields.text(128), "settings": _SETTINGS},
)
RUN: JsonField[RunDocument] = fields.table(
    RunDocument,
    {
        "run": fields.NAME,
        "fingerprint": fields.text(128),
        "founding": fields.text(64),
        "model": MODEL,
        "constants": DIGESTS,
    },
    optional={"states": fields.listed(_MAYBE_DIGEST, max_items=MAX_FRAGMENTS)},
)
SLOT: JsonField[SlotDocument] = fields.table(
    SlotDocument, {"run": fields.NAME, "island": fields.NAME}
)
MEMBER: JsonField[MemberDocument] = fields.table(
    MemberDocument,
    {
        "run": fields.NAME,
        "slot": fields.integer(),
        "key": fields.hexed(0, 64, is_secret=True),
        "nonce": fields.hexed(0, 64, is_secret=True),
        "opened": fields.listed(fields.integer(), max_items=MAX_FRAGMENTS),
        "stands": fields.listed(
            fields.row(StandingUpdate, {**_NUMBER, "incarnation": fields.integer()}),
            max_items=MAX_FRAGMENTS,
        ),
        "beats": fields.integer(),
        "has_left": fields.FLAG,
        "beat": BEAT,
    },
    optional={
        "heads": fields.listed(
            fields.row(RosterHead, {"round": fields.integer(), "digest": DIGEST}),
            max_items=MAX_FRAGMENTS,
        ),
        "controls": fields.integer(),
        "wants": fields.listed(
            fields.row(
                Want,
                {**_NUMBER, "island": fields.NAME, "incarnation": fields.integer()},
                last={"age": fields.integer(1, 2**32 - 1)},
            ),
            max_items=MAX_WANTS,
        ),
    },
)
CONTROL: JsonField[ControlDocument] = fields.table(
    ControlDocument,
    {
        "run": fields.NAME,
        "action": fields.option(*ACTIONS),
        "values": JsonField(dict, _scalars),
        "last_round": fields.maybe(fields.integer()),
        "island": fields.maybe(fields.NAME),
        "incarnation": fields.integer(),
        "target": fields.maybe(fields.text(2048)),
        "nonce": fields.text(64),
    },
    optional={"last_rounds": fields.listed(fields.integer(), max_items=MAX_FRAGMENTS)},
)
ROSTER: JsonField[RosterDocument] = fields.table(
    RosterDocument,
    {
        "run": fields.NAME,
        **_NUMBER,
        "epoch": fields.integer(),
        "base": BASE,
        "outer": _OUTER,
        "shards": fields.listed(fields.NAME, max_items=MAX_SHARDS),
        "roster": _ROSTER,
        "move": fields.integer(),
    },
    optional={
        "before": _MAYBE_DIGEST,
        "controls": fields.integer(),
        "claims": fields.integer(1),
    },
)
COUNTED = fields.row(
    CountedProgress,
    {
        "island": fields.NAME,
        "round": fields.integer(),
        "inner_steps": fields.integer(),
        "tokens": fields.integer(),
    },
    last={"window": WINDOW},
)
_LISTED = fields.row(
    ListedRow,
    {
        "island": fields.NAME,
        "round": fields.integer(),
        "label": fields.integer(),
        "incarnation": fields.integer(),
    },
)
STATE: JsonField[StateDocument] = fields.table(
    StateDocument,
    {
        "run": fields.NAME,
        **_NUMBER,
        "parts": fields.integer(1, 2**20),
        "head": fields.hexed(1, fields.MAX_LARGE_BYTES),
        "counted": fields.listed(COUNTED, max_items=65_536),
        "bases": fields.listed(BASE, max_items=1024),
    },
    optional={
        "roster": _MAYBE_DIGEST,
        "listed": fields.listed(_LISTED, max_items=65_536),
    },
)


@dataclass(frozen=True)
class ReadDocument(Generic[T]):
    """A document, and the digest of the object that it was read from."""

    document: T
    digest: bytes
    is_sealed: bool
    """False: the object is of 0.1.0, and only this digest names its bytes."""


def packed(field: JsonField[T], document: T, key: str) -> list[Data]:
    """Return a document as the bytes of the object at `key`."""
    content = {"format": FORMAT, "key": key, "document": field.write(document)}
    max_bytes = fields.MAX_LARGE_BYTES - _SEALED_FROM - 1
    rest = b'",' + fields.dump(content, name="document", max_bytes=max_bytes)[1:]
    return [_OPENING + blake3_digest(rest).hex().encode() + rest]


def digest_of(parts: list[Data]) -> bytes:
    """Return the digest that `packed` has put into an object."""
    return bytes.fromhex(
        bytes(view_of(parts[0])[len(_OPENING) : _SEALED_FROM]).decode()
    )


def parse(
    field: JsonField[T],
    data: Data,
    *,
    key: str,
    run: str | None = None,
    is_placed: bool = True,
) -> T:
    """Return the document in an object's bytes.

    Raises:
        CorruptError: these are not the bytes of such a document, or it belongs to
            another run, or (if `is_placed`) to another key.
    """
    return _parsed(field, data, key=key, run=run, is_placed=is_placed).document


def _parsed(
    field: JsonField[T],
    data: Data,
    *,
    key: str,
    run: str | None = None,
    is_placed: bool = True,
) -> ReadDocument[T]:
    try:
        read = _opened(field, view_of(data), key, is_placed=is_placed)
    except (UsageError, CorruptError) as exc:
        raise CorruptError(f"{key} cannot be read: {exc} {RESTORE}") from exc
    belongs = getattr(read.document, "run", run)
    if run is not None and belongs != run:
        raise CorruptError(
            f"{key} belongs to run {belongs!r}, and this is {run!r}. "
            "Two runs cannot share a URL: move one of them to another."
        )
    return read


def _opened(
    field: JsonField[T], data: memoryview, key: str, *, is_placed: bool
) -> ReadDocument[T]:
    """Return the document in an object, after its digest is verified."""
    is_sealed = bytes(data[: len(_OPENING)]) == _OPENING
    if is_sealed:
        digest = blake3_digest(data[_SEALED_FROM:])
        if bytes(data[len(_OPENING) : _SEALED_FROM]) != digest.hex().encode():
            raise CorruptError("its bytes do not match the digest that it begins with.")
    else:
        digest = blake3_digest(data)
    content = fields.require_table(
        fields.load(data, name=key, max_bytes=fields.MAX_LARGE_BYTES), key
    )
    names = {"format", "document"} | ({"digest", "key"} if is_sealed else set())
    expected = FORMAT if is_sealed else UNSEALED_FORMAT
    if not is_sealed and content.get("format") == FORMAT:
        raise CorruptError(
            "it does not begin with its digest: something has edited it."
        )
    if content.get("format") != expected:
        raise UsageError(
            f"format={content.get('format')!r} is not {UNSEALED_FORMAT} or {FORMAT}: "
            "this version of Atoll reads no others. Use the one that has written it."
        )
    if content.keys() != names:
        raise UsageError(
            f"an object of format {expected} has {', '.join(sorted(names))}, and this "
            f"has {', '.join(sorted(map(str, content)))[:100]}."
        )
    if is_sealed and is_placed and content["key"] != key:
        raise CorruptError(f"it is the object of {str(content['key'])[:200]!r}.")
    return ReadDocument(field.read(content["document"], key), digest, is_sealed)


def fetch(store: Store, field: JsonField[T], key: str, *, run: str | None = None) -> T:
    """Return the document at a key.

    Raises:
        NoSuchObject: there is none.
        CorruptError: it cannot be read as that document.
    """
    return fetch_read(store, field, key, run=run).document


def fetch_read(
    store: Store, field: JsonField[T], key: str, *, run: str | None = None
) -> ReadDocument[T]:
    """Return the document at a key, and the digest of its object; else as `fetch`."""
    return _parsed(
        field, store.get(key, 0, fields.MAX_LARGE_BYTES + 1), key=key, run=run
    )


def fetch_roster(store: Store, key: str, *, run: str | None = None) -> RosterDocument:
    """Return the roster at a key with its digest; else as `fetch`."""
    read = fetch_read(store, ROSTER, key, run=run)
    if read.is_sealed and len(read.document.before) != DIGEST_BYTES:
        raise CorruptError(f"{key} does not name the roster before it. {RESTORE}")
    return replace(read.document, digest=read.digest)


def require_follows(roster: RosterDocument, head: RosterHead, *, key: str) -> None:
    """Return if the roster at `key` follows the last one that was read, by Rule 4.

    Raises:
        CorruptError: it belongs to another history of the run.
    """
    if roster.before == head.digest or not (roster.before or head.is_chained):
        return
    previous = keys.roster(roster.fragment, head.round) if head.round else keys.RUN
    raise CorruptError(
        f"{key} follows an object with digest {roster.before.hex() or 'none'}, and "
        f"{previous}, which was read before it, has {head.digest.hex()}: one of them "
        f"was changed. {RESTORE}"
    )


def fetch_settings(store: Store, *, url: str) -> SettingsDocument:
    """Return the settings of the run at a URL.

    Raises:
        UsageError: there is no run at the URL.
        CorruptError: the settings are not those that the run was made with.
    """
    try:
        document = fetch(store, SETTINGS, keys.SETTINGS)
    except NoSuchObject as exc:
        require_no_remains(store, url=url)
        raise UsageError(
            f"There is no run at {url}. Make one first: `atoll init {url} RUN.toml`."
        ) from exc
    except CorruptError as exc:
        raise CorruptError(
            f"{exc} Change settings with `atoll control`, never by hand."
        ) from exc
    if document.settings.fingerprint != document.fingerprint:
        raise CorruptError(
            f"{keys.SETTINGS} says fingerprint {document.fingerprint}, and its "
            f"settings have {document.settings.fingerprint}: a user has edited them. "
            "Put the old settings back, and change settings with `atoll control`."
        )
    return document


def require_no_remains(store: Store, *, url: str) -> None:
    """Return unless a URL holds a run whose settings are gone.

    Raises:
        CorruptError: `run.json` exists without the settings.
    """
    try:
        store.get(keys.RUN, 0, 1)
    except NoSuchObject:
        return
    raise CorruptError(
        f"{keys.SETTINGS} is gone from {url}, and {keys.RUN} is still there. If a move "
        f"to this URL is in progress, let `atoll move` finish. Otherwise: {RESTORE}"
    )
