"""The small objects of a run in a bucket: what each says, and how it is judged.

Rule 1: every document says which run it belongs to; one of another is refused.
Rule 2: whatever cannot be read raises `CorruptError` with the key: nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from atoll.errors import CorruptError, UsageError
from atoll.exchange.forms.constants import DIGESTS
from atoll.exchange.forms.fields import (
    FLAG,
    NAME,
    Field,
    hexed,
    listed,
    maybe,
    number,
    require_table,
    row,
    table,
    text,
    whole,
    words,
)
from atoll.exchange.forms.messages import BEAT, MAX_FRAGMENTS, MODEL
from atoll.exchange.forms.tables import read_settings, settings_form
from atoll.exchange.forms.text import MAX_LARGE_BYTES, dump, load
from atoll.protocol import Beat, ModelSpec
from atoll.settings import RunSettings
from atoll.store import Data, Store
from atoll.wire import OuterValues, Roster, pack_roster, unpack_roster
from atoll.wire.header import BASE_BYTES

FORMAT = 1
"""Raised when a document changes: an older Atoll then refuses the run by name."""

MAX_VALUES = 64
MAX_SHARDS = 4096

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class SettingsDocument:
    """What the run owns, as `atoll init` has put it."""

    run: str
    fingerprint: str
    """As it was when the run was made: settings edited since are found by it."""

    settings: RunSettings


@dataclass(frozen=True, kw_only=True)
class RunDocument:
    """That there is a run, and where its first weights are."""

    run: str
    fingerprint: str
    founding: str
    model: ModelSpec
    constants: tuple[str, ...] = ()
    """Digests of those that are there, whole, beside the first weights."""


@dataclass(frozen=True, kw_only=True)
class Stand:
    """An update of an earlier life that its successor has found, and that stands."""

    fragment: int
    round: int
    incarnation: int


@dataclass(frozen=True, kw_only=True)
class MemberDocument:
    """One life of an island, overwritten with each of its heartbeats."""

    run: str
    slot: int
    key: bytes
    nonce: bytes
    opened: tuple[int, ...]
    """The open rounds when it joined, which do not wait for it; empty: they all do."""

    stands: tuple[Stand, ...]
    beats: int
    has_left: bool
    beat: Beat


@dataclass(frozen=True, kw_only=True)
class ControlDocument:
    """What an operator has said; all of them form one sequence."""

    run: str
    action: str
    values: Mapping[str, Any]
    """With `set`: the values of the next epoch."""

    last_round: int | None = None
    """With `stop`."""

    island: str | None = None
    incarnation: int = 0
    """With `evict`."""

    target: str | None = None
    """With `move`, `moved` and `stay`: where the run goes, or would have gone."""

    nonce: str = ""
    """With them, too: made for this move."""


@dataclass(frozen=True, kw_only=True)
class RosterDocument:
    """That a round is closed, and all that its outcome depends on."""

    run: str
    fragment: int
    round: int
    epoch: int
    base: bytes
    outer: OuterValues
    shards: tuple[str, ...]
    """Who makes which part of the mean; empty: everybody reads every update."""

    roster: Roster
    move: int = 0
    """The word by which the run goes elsewhere: then the round is not closed at all,
    and nobody can close it here, unless that was given up. 0: the round is closed."""


@dataclass(frozen=True, kw_only=True)
class CountedProgress:
    """How far an island's work has counted in a fragment."""

    island: str
    round: int
    inner_steps: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class StateDocument:
    """That a state is complete; what a latecomer cannot learn from later rosters."""

    run: str
    fragment: int
    round: int
    parts: int
    head: bytes
    """The packed header of the state's frame."""

    counted: tuple[CountedProgress, ...]
    bases: tuple[bytes, ...]


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


def _scalars(value: object, where: str) -> dict[str, Any]:
    found = require_table(value, where)
    if len(found) > MAX_VALUES:
        raise UsageError(f"{where} has {len(found)} values, above {MAX_VALUES}.")
    return found


def _outer(optimizer: str, lr: float, momentum: float) -> OuterValues:
    return OuterValues(optimizer=optimizer, lr=lr, momentum=momentum)


BASE = hexed(BASE_BYTES, BASE_BYTES)
_SETTINGS: Field[RunSettings] = Field(settings_form, read_settings)
_OUTER = row(_outer, {"optimizer": text(32), "lr": number(), "momentum": number()})
_ROSTER = Field(
    lambda roster: pack_roster(roster).hex(),
    lambda value, where: unpack_roster(hexed(0, MAX_LARGE_BYTES).read(value, where)),
)
_NUMBER = {"fragment": whole(), "round": whole()}

SETTINGS: Field[SettingsDocument] = table(
    SettingsDocument, {"run": NAME, "fingerprint": text(128), "settings": _SETTINGS}
)
RUN: Field[RunDocument] = table(
    RunDocument,
    {
        "run": NAME,
        "fingerprint": text(128),
        "founding": text(64),
        "model": MODEL,
        "constants": DIGESTS,
    },
)
MEMBER: Field[MemberDocument] = table(
    MemberDocument,
    {
        "run": NAME,
        "slot": whole(),
        "key": hexed(0, 64, is_secret=True),
        "nonce": hexed(0, 64, is_secret=True),
        "opened": listed(whole(), most=MAX_FRAGMENTS),
        "stands": listed(
            row(Stand, {**_NUMBER, "incarnation": whole()}), most=MAX_FRAGMENTS
        ),
        "beats": whole(),
        "has_left": FLAG,
        "beat": BEAT,
    },
)
CONTROL: Field[ControlDocument] = table(
    ControlDocument,
    {
        "run": NAME,
        "action": words(*ACTIONS),
        "values": Field(dict, _scalars),
        "last_round": maybe(whole()),
        "island": maybe(NAME),
        "incarnation": whole(),
        "target": maybe(text(2048)),
        "nonce": text(64),
    },
)
ROSTER: Field[RosterDocument] = table(
    RosterDocument,
    {
        "run": NAME,
        **_NUMBER,
        "epoch": whole(),
        "base": BASE,
        "outer": _OUTER,
        "shards": listed(NAME, most=MAX_SHARDS),
        "roster": _ROSTER,
        "move": whole(),
    },
)
COUNTED = row(
    CountedProgress,
    {"island": NAME, "round": whole(), "inner_steps": whole(), "tokens": whole()},
)
STATE: Field[StateDocument] = table(
    StateDocument,
    {
        "run": NAME,
        **_NUMBER,
        "parts": whole(1, 2**20),
        "head": hexed(1, MAX_LARGE_BYTES),
        "counted": listed(COUNTED, most=65_536),
        "bases": listed(BASE, most=1024),
    },
)


def packed(field: Field[T], document: T) -> list[Data]:
    """Return a document as the bytes of its object."""
    said = {"format": FORMAT, "document": field.write(document)}
    return [dump(said, what="document", most=MAX_LARGE_BYTES)]


def parse(field: Field[T], data: Data, *, key: str, run: str | None = None) -> T:
    """Return the document in an object's bytes.

    Raises:
        CorruptError: these are not the bytes of such a document, or of another run's.
    """
    try:
        said = require_table(load(data, what=key, most=MAX_LARGE_BYTES), key)
        if said.get("format") != FORMAT:
            raise UsageError(
                f"format={said.get('format')!r} is not {FORMAT}, the one that this "
                "version of Atoll reads"
            )
        document = field.read(said.get("document"), key)
    except (UsageError, CorruptError) as exc:
        raise CorruptError(
            f"{key} cannot be read: {exc} If something else has written it, remove "
            "it; the run's own documents are never changed."
        ) from exc
    belongs = getattr(document, "run", run)
    if run is not None and belongs != run:
        raise CorruptError(
            f"{key} belongs to run {belongs!r}, and this is {run!r}. "
            "Two runs cannot share a URL: move one of them to another."
        )
    return document


def fetch(store: Store, field: Field[T], key: str, *, run: str | None = None) -> T:
    """Return the document at a key.

    Raises:
        NoSuchObject: there is none.
        CorruptError: it is not what it must be.
    """
    return parse(field, store.get(key, 0, MAX_LARGE_BYTES + 1), key=key, run=run)
