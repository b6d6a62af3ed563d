"""Reads what a run takes along that leaves its bucket, late lists or not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from atoll.errors import CorruptError, NoSuchObject, OutcomeLost
from atoll.exchange.base import Frame
from atoll.exchange.bucket import documents, keys
from atoll.exchange.bucket.arriving import Left, Progress
from atoll.exchange.bucket.documents import (
    RESTORE,
    MemberDocument,
    RosterDocument,
    parse,
)
from atoll.exchange.bucket.keys import Life
from atoll.exchange.bucket.lookout import Lookout
from atoll.exchange.bucket.outcomes import Outcomes
from atoll.exchange.bucket.progress import BASES, ROSTERS, counted_progress
from atoll.exchange.bucket.sight import Sight
from atoll.wire import Header, frame_bytes, header_length, verify_body

_SLOT_BYTES = 4096


def look_everybody(lookout: Lookout) -> None:
    """Read the latest life of everybody by its key: a list may be late."""
    lookout.look_members()
    slots = {name: each.slot for name, each in lookout.sight.documents.items()}
    slot = 0
    while slot <= max(slots.values(), default=-1) + 1:  # there may be gaps
        try:
            slots.setdefault(_name_in(lookout, keys.slot(slot)), slot)
        except NoSuchObject:
            pass
        except CorruptError as exc:
            lookout.tell(str(exc))
        slot += 1
    for name in slots:
        _look_lives(lookout, name)


def _name_in(lookout: Lookout, key: str) -> str:
    """Return which island has a slot.

    Raises:
        NoSuchObject: none has.
        CorruptError: the object is damaged.
    """
    data = bytes(lookout.store.get(key, 0, _SLOT_BYTES))
    if data.startswith(b"{"):
        return parse(documents.SLOT, data, key=key, run=lookout.run).island
    try:
        return data.decode()  # of 0.1.0: the name alone
    except UnicodeDecodeError as exc:
        raise CorruptError(f"{key} holds no island's name. {RESTORE}") from exc


def _look_lives(lookout: Lookout, name: str) -> None:
    """Read the lives of an island that come after the last known one."""
    while True:
        known = lookout.sight.documents.get(name)
        after = known.beat.incarnation + 1 if known else 1
        lookout.members.look_life(Life(keys.slug(name), after))
        if lookout.sight.documents.get(name) is known:
            return


def progress(sight: Sight, fragment: int) -> Progress:
    """Return what a fragment's state does not say itself."""
    state = sight.state
    round = state.rounds[fragment]
    return Progress(
        round=round.number - 1,
        counted=counted_progress(state.counted, fragment),
        bases=round.bases[-BASES:],
    )


def last_rosters(lookout: Lookout, fragment: int) -> Iterator[RosterDocument]:
    """Yield the last rosters of a fragment, for who has not taken their outcomes."""
    number = lookout.sight.number(fragment)
    for round in range(max(1, number - ROSTERS), number):
        try:
            roster = lookout.known_roster(fragment, round)
            # Where they go they are chained anew.
            yield replace(roster, before=b"", controls=0, digest=b"")
        except NoSuchObject:
            continue  # from before the run came here


def members(sight: Sight) -> tuple[MemberDocument, ...]:
    """Return the last life of everybody; who was evicted has left."""
    known = sight.state.members.known
    return tuple(
        replace(document, has_left=known[name].has_left)
        for name, document in sorted(sight.documents.items())
    )


def standing(lookout: Lookout, fragment: int) -> dict[Left, Header]:
    """Return what stands in the open round, and what departed ahead of it."""
    staged = lookout.sight.state.rounds[fragment].staged.values()
    return {
        Left(fragment=fragment, round=header.round, island=header.island): header
        for header in [*staged, *lookout.ahead(fragment)]
        if not (header.refused or lookout.updates.objection(header))
    }


def agreed(outcomes: Outcomes, fragment: int, round: int) -> Frame:
    """Return what a round came to.

    Raises:
        OutcomeLost: its means are not kept any more.
    """
    frame = outcomes.frame(fragment, round)
    if not frame.header.is_sealed:
        raise OutcomeLost(
            f"The means of round {round} of fragment {fragment} have been removed. "
            "The state has all of it."
        )
    verify_body(frame.header, frame.body)
    return frame


def whole_update(lookout: Lookout, header: Header) -> Frame:
    """Return an update with its body.

    Raises:
        CorruptError: its bytes do not verify.
    """
    where = (header.fragment, header.round)
    key = keys.update(*where, header.island, header.incarnation)
    data = lookout.store.get(key, 0, frame_bytes(header))
    try:
        body = np.frombuffer(bytearray(data[header_length(data) :]), np.uint8)
        verify_body(header, body)
    except CorruptError as exc:
        raise CorruptError(f"{key} is damaged: {exc} {RESTORE}") from exc
    return Frame(header, body)
