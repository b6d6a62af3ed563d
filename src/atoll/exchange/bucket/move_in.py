"""Moves a run from a coordinator into a bucket.

Rule 1: everything is put before `settings/0`, which is put last and once: without it
        there is no run here, and with it there is. That is the moment of the move.
Rule 2: `run.json` names the move. Objects with another name, or none, did not come
        with it.
Rule 3: every put is safe to repeat, so that an interrupted move starts again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

from atoll.errors import CorruptError, NoSuchObject, UsageError
from atoll.exchange.api.fields import NAME, JsonField, listed, row, table, whole
from atoll.exchange.api.messages import MAX_FRAGMENTS
from atoll.exchange.base import Constants, Frame
from atoll.exchange.bucket import documents, keys
from atoll.exchange.bucket.documents import (
    BASE,
    COUNTED,
    ControlDocument,
    CountedProgress,
    MemberDocument,
    RosterDocument,
    RunDocument,
    SettingsDocument,
    SlotDocument,
    StateDocument,
    digest_of,
    fetch,
    packed,
)
from atoll.exchange.bucket.large_objects import (
    anonymous,
    constants_of,
    put_constant,
    put_parts,
)
from atoll.exchange.bucket.runtime import Timing
from atoll.store import Data, Store
from atoll.wire import blake3_digest, pack

MOST = 65_536
"""Members, rosters or updates that come along."""


@dataclass(frozen=True, kw_only=True)
class FragmentProgress:
    """What a fragment's state does not say itself."""

    round: int
    counted: tuple[CountedProgress, ...]
    bases: tuple[bytes, ...]


@dataclass(frozen=True, kw_only=True)
class UnclaimedUpdate:
    """An update of the open round that nobody is left to publish again."""

    fragment: int
    round: int
    island: str


@dataclass(frozen=True, kw_only=True)
class MovedRun:
    """All that a run takes along, apart from weights and updates."""

    settings: SettingsDocument
    run: RunDocument
    controls: tuple[ControlDocument, ...]
    members: tuple[MemberDocument, ...]
    fragments: tuple[FragmentProgress, ...]
    rosters: tuple[RosterDocument, ...]
    """The last ones of each fragment, for who has not taken their outcomes."""

    left: tuple[UnclaimedUpdate, ...]


_PROGRESS = table(
    FragmentProgress,
    {
        "round": whole(),
        "counted": listed(COUNTED, max_items=MOST),
        "bases": listed(BASE, max_items=1024),
    },
)
_LEFT = row(UnclaimedUpdate, {"fragment": whole(), "round": whole(), "island": NAME})
MOVED_RUN: JsonField[MovedRun] = table(
    MovedRun,
    {
        "settings": documents.SETTINGS,
        "run": documents.RUN,
        "controls": listed(documents.CONTROL, max_items=MOST),
        "members": listed(documents.MEMBER, max_items=MOST),
        "fragments": listed(_PROGRESS, min_items=1, max_items=MAX_FRAGMENTS),
        "rosters": listed(documents.ROSTER, max_items=MOST),
        "left": listed(_LEFT, max_items=MOST),
    },
)


class MoveIn:
    """Puts a run into a store. `bring` what it has, then `settle` it there."""

    def __init__(self, store: Store, timing: Timing, belongings: MovedRun) -> None:
        self._store, self._timing, self._has = store, timing, belongings

    def bring(
        self,
        state: Callable[[int], Frame],
        update: Callable[[UnclaimedUpdate], Frame],
        constants: Constants,
    ) -> None:
        """Put all but the word that the run is here. Safe to repeat."""
        has = self._has
        for constant in constants_of(has.run):
            parts = constants.parts(constant)
            put_constant(self._store.put, has.run.founding, constant, parts)
        begun = [at for at, progress in enumerate(has.fragments) if progress.round]
        firsts = [
            b"" if at in begun else self._put_first(state(at))
            for at in range(len(has.fragments))
        ]
        run = packed(documents.RUN, replace(has.run, states=tuple(firsts)), keys.RUN)
        rosters, heads = self._chained(digest_of(run))
        for fragment in begun:
            frame, progress = state(fragment), has.fragments[fragment]
            self._put_state(frame, progress, heads.get(fragment, digest_of(run)))
        for left in has.left:
            self._put_update(update(left))
        self._put_small([*self._small(), *rosters])
        self._store.put_new(keys.RUN, run)

    def _chained(
        self, run: bytes
    ) -> tuple[list[tuple[str, list[Data]]], dict[int, bytes]]:
        """Return the objects of the rosters, chained anew, and each fragment's last.

        The first one names `run.json`, as in a run that began here.
        """
        objects, heads = [], dict[int, bytes]()
        for roster in sorted(self._has.rosters, key=lambda each: each.round):
            key = keys.roster(roster.fragment, roster.round)
            before = heads.get(roster.fragment, run)
            linked = replace(roster, before=before, controls=0)
            data = packed(documents.ROSTER, linked, key)
            heads[roster.fragment] = digest_of(data)
            objects.append((key, data))
        return objects, heads

    def settle(self) -> None:
        """Say that the run is here: the moment of the move.

        Raises:
            UsageError: something else is here, or the move was given up.
        """
        settings = packed(documents.SETTINGS, self._has.settings, keys.SETTINGS)
        if self._store.put_new(keys.SETTINGS, settings):
            return
        if not is_here(self._store, self._has.run):
            raise UsageError(
                "Another run has come here first, or this move was given up. Say "
                "`atoll move --back`, then choose another URL."
            )

    def _put_first(self, frame: Frame) -> bytes:
        """Put a fragment's first state; return the digest of its header."""
        _require_round(frame, 0)
        key = keys.founding(self._has.run.founding, frame.header.fragment)
        head = pack(frame.header)
        self._store.put(key, [head, frame.body.data])
        return blake3_digest(head)

    def _put_state(
        self, frame: Frame, progress: FragmentProgress, roster: bytes
    ) -> None:
        _require_round(frame, progress.round)
        header = frame.header
        parts = put_parts(self._store.put, self._timing, frame)
        document = StateDocument(
            run=header.run,
            fragment=header.fragment,
            round=header.round,
            parts=parts,
            head=pack(anonymous(header)),
            counted=progress.counted,
            bases=progress.bases,
            roster=roster,
        )
        key = keys.state_complete(header.fragment, header.round)
        self._store.put(key, packed(documents.STATE, document, key))

    def _put_update(self, frame: Frame) -> None:
        header = frame.header
        where = (header.fragment, header.round)
        key = keys.update(*where, header.island, header.incarnation)
        self._store.put_new(key, [pack(header), frame.body.data])

    def _small(self) -> Iterable[tuple[str, list[Data]]]:
        has = self._has
        for number, control in enumerate(has.controls, start=1):
            key = keys.control(number)
            yield key, packed(documents.CONTROL, control, key)
        for member in has.members:
            beat, key = member.beat, keys.slot(member.slot)
            slot = SlotDocument(run=has.run.run, island=beat.island)
            yield key, packed(documents.SLOT, slot, key)
            key = keys.member(beat.island, beat.incarnation)
            # What it has read elsewhere has other digests and numbers here.
            said = replace(member, heads=(), controls=0, wants=())
            yield key, packed(documents.MEMBER, said, key)

    def _put_small(self, objects: Iterable[tuple[str, list[Data]]]) -> None:
        puts = [partial(self._store.put, key, parts) for key, parts in objects]
        self._timing.together(puts)


def _require_round(frame: Frame, round: int) -> None:
    if frame.header.round != round:
        raise CorruptError(
            f"The {frame.header.name} was brought, and the run is at round {round}. "
            "Move it again."
        )


def is_here(store: Store, run: RunDocument) -> bool:
    """Return whether a run has come here by the move that its document names."""
    try:
        settings = fetch(store, documents.SETTINGS, keys.SETTINGS)
        there = fetch(store, documents.RUN, keys.RUN)
    except (NoSuchObject, CorruptError):
        return False
    # The nonce names the move, and nothing else has it.
    return settings.run == there.run == run.run and there.founding == run.founding


def require_free(store: Store, *, url: str) -> None:
    """Return if a run can come to a store.

    Raises:
        UsageError: something is there, or the store cannot decide what is first.
    """
    # Before the traits: asking a store for them may leave something for a moment.
    if there := next(iter(store.items("")), None):
        raise UsageError(
            f"There is something at {url} already: {there.key}. A run moves only to "
            "where nothing is. Choose another URL."
        )
    if not store.traits.has_put_new:
        raise UsageError(
            f"The store at {url} lets a second object replace the first, so that a "
            "move could be done and given up at once. Choose another store."
        )


ABANDONED = b"A run was on its way here, and has stayed where it was."
"""Where the settings would be: no run can ever come here by that move."""


def give_up(store: Store, run: RunDocument) -> bool:
    """Make sure that a run never comes here; False: it has come."""
    store.put_new(keys.SETTINGS, [ABANDONED])
    return not is_here(store, run)
