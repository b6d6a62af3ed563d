"""Updates of islands that have gone, and that a roster on its way did not list.

Who closes a round may have listed it before an island published, and its roster may
come after that island's farewell. Nobody else would ever count that work: so whoever
looks at the next round puts it there, as the same island's departing update.

Rule 1: only what a farewell names, and only if no roster since has listed it. Rosters
        are put once, so that all who look agree about that.
Rule 2: everybody puts the same bytes, once: two that do change nothing.
Rule 3: a new life of the island speaks for itself: it brings what is left before it
        enters, and names it; after that nothing is put.
"""

from __future__ import annotations

from dataclasses import replace

from atoll.errors import CorruptError, NoSuchObject
from atoll.exchange.bucket import keys
from atoll.exchange.bucket.documents import Stand
from atoll.exchange.bucket.keys import Life
from atoll.exchange.bucket.lookout import Lookout
from atoll.exchange.bucket.luggage import whole_update
from atoll.protocol.island_state import CARRIED_ROUNDS
from atoll.wire import Header, Kind, Verdict, frame_bytes, pack, update_digest


class Leftovers:
    """Brings what was left in closed rounds into the open ones."""

    def __init__(self, lookout: Lookout) -> None:
        self._lookout, self._store = lookout, lookout.store
        self._settled: set[tuple[str, Stand]] = set()
        self._brought: dict[tuple[str, Stand], int] = {}
        """Into which round: there it counts, or in none before the next."""

    def bring(self, fragment: int) -> None:
        """Put what the last rounds have left out into the open one. Safe to repeat."""
        with self._lookout.lock:
            number, left = self._lookout.sight.number(fragment), self.unseen(fragment)
        for island, stand in left:
            self._bring(island, stand, number)

    def unseen(self, fragment: int) -> list[tuple[str, Stand]]:
        """Return what the last rounds may have left out, and `bring` has not seen."""
        sight = self._lookout.sight
        number = sight.number(fragment)
        if sight.never_opens(number):
            return []
        return [
            each
            for each in self._lookout.known_updates.left_out(
                fragment, within=CARRIED_ROUNDS
            )
            if each not in self._settled and self._brought.get(each) != number
        ]

    def _bring(self, island: str, stand: Stand, number: int) -> None:
        try:
            header = (
                None if self._is_listed(island, stand) else self._left(island, stand)
            )
            if header is None or self._is_counted(header, number):
                self._settled.add((island, stand))
            else:
                self._put(header, number)
                self._brought[island, stand] = number
        except NoSuchObject:
            self._settled.add((island, stand))  # collected meanwhile
        except CorruptError as exc:
            self._settled.add((island, stand))
            self._lookout.tell(f"What {island!r} has left stays where it is: {exc}")

    def _is_listed(self, island: str, stand: Stand) -> bool:
        """Return whether the update's own round has listed it."""
        roster = self._lookout.known_roster(stand.fragment, stand.round).roster
        entry = roster.entry(island)
        return (
            entry is not None
            and entry.verdict is not Verdict.LATE
            and entry.incarnation == stand.incarnation
        )

    def _left(self, island: str, stand: Stand) -> Header | None:
        """Return what an island has left, if that can count."""
        life = Life(keys.slug(island), stand.incarnation)
        header = self._lookout.updates.header(stand.fragment, stand.round, life)
        if header is None or header.refused or self._lookout.updates.objection(header):
            return None
        return header

    def _is_counted(self, header: Header, number: int) -> bool:
        """Return whether a later round has listed it, since somebody put it there."""
        for round in range(header.round + 1, number):
            roster = self._lookout.known_roster(header.fragment, round).roster
            entry = roster.entry(header.island)
            digest = update_digest(_moved(header, round))
            if entry is not None and entry.digest == digest:
                return True
        return False

    def _put(self, header: Header, number: int) -> None:
        fragment, island = header.fragment, header.island
        body = whole_update(self._lookout, header).body
        last = self._lookout.sight.documents[island].beat.incarnation
        moved = replace(_moved(header, number), incarnation=last)
        key = keys.update(fragment, number, island, last)
        if self._store.put_new(key, [pack(moved), body.data]):
            self._lookout.tell(
                f"Round {header.round} of fragment {fragment} was closed while "
                f"{island!r} left: its last update is put into round {number}."
            )
        standing, _ = self._lookout.read_update(key, frame_bytes(moved))
        if update_digest(standing) == update_digest(moved):
            self._lookout.updates.keep(moved)


def _moved(header: Header, round: int) -> Header:
    return replace(header, kind=Kind.DEPARTING, round=round)
