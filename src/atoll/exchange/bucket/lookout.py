"""Reads a bucket, and tells a `Sight` what is there. Puts nothing.

Documents, members and updates are read as `reading`, `reading_members` and
`reading_updates` say; here is what is asked of rounds, open and closed.
"""

from __future__ import annotations

from atoll.errors import CorruptError, NoSuchObject, UsageError
from atoll.exchange.bucket import documents, keys
from atoll.exchange.bucket.documents import (
    RESTORE,
    RosterDocument,
    RosterHead,
    RunDocument,
    fetch,
    fetch_roster,
)
from atoll.exchange.bucket.keys import life_of
from atoll.exchange.bucket.reading import Reading, require_unchanged
from atoll.exchange.bucket.reading_members import MemberReading
from atoll.exchange.bucket.reading_updates import UNKNOWN_BYTES, UpdateReading
from atoll.exchange.bucket.sight import LEASE_S
from atoll.exchange.bucket.timing import Timing
from atoll.store import Item, Store
from atoll.wire import Header, Kind


class Lookout:
    """Keeps a `Sight` up to date. Any thread may call."""

    def __init__(self, reading: Reading) -> None:
        self._reading, self.run = reading, reading.run
        self.store, self.timing = reading.store, reading.timing
        self.sight, self.lock, self.tell = reading.sight, reading.lock, reading.tell
        self.known_updates, self.known_members = reading.updates, reading.members
        self.known_bases = reading.bases
        self.look_founding, self.look_controls = (
            reading.look_founding,
            reading.look_controls,
        )
        self.heed_controls = reading.heed_controls
        self.require_unfounded = reading.require_unfounded
        self.require_here = reading.require_here
        self.require_staying = reading.require_staying
        self.members = MemberReading(reading)
        self.updates = UpdateReading(reading, self.members)
        self.look_members = self.members.look
        self.seen_update, self.read_update = self.updates.seen, self.updates.read
        self._thawed: dict[tuple[int, int], int] = {}
        """Rounds that a move had frozen, and the last such move that was given up."""

    @classmethod
    def open(
        cls, store: Store, timing: Timing, *, url: str, lease_s: float = LEASE_S
    ) -> Lookout:
        """Return the lookout on the run at a URL, which may wait for its founder.

        Raises:
            UsageError: nobody has made a run there.
            CorruptError: its settings are not those that it was made with.
        """
        try:
            settings = fetch(store, documents.SETTINGS, keys.SETTINGS)
        except NoSuchObject as exc:
            require_no_remains(store, url=url)
            raise UsageError(
                f"There is no run at {url}. Make one first: "
                f"`atoll init {url} RUN.toml`."
            ) from exc
        except CorruptError as exc:
            raise CorruptError(
                f"{exc} What may change of a run's settings is changed by `atoll "
                "control`, and nothing by hand."
            ) from exc
        require_unchanged(settings, settings.fingerprint)
        self = cls(Reading(store, timing, settings, lease_s=lease_s))
        if not self.look_founding():
            self.require_unfounded()
        self.look_controls()
        return self

    @property
    def founded(self) -> RunDocument | None:
        """What the run was founded with, once that was read."""
        return self._reading.founded

    @property
    def founding_head(self) -> RosterHead:
        """What the first roster of each fragment names as the one before it."""
        head = self._reading.founding_head
        assert head is not None
        return head

    def look_round(self, fragment: int) -> None:
        """Read what is new in the open round of a fragment."""
        with self.lock:
            number = self.sight.number(fragment)
        items = self.store.items(keys.round_prefix(fragment, number))
        if any(item.key == keys.roster(fragment, number) for item in items):
            self.follow(fragment)
            if self.sight.number(fragment) != number:
                return  # else a move has frozen it, which may be given up
        prefix = keys.updates(fragment, number)
        self.updates.look(
            fragment, number, [item for item in items if item.key.startswith(prefix)]
        )

    def look_stands(self, fragment: int) -> None:
        """Read by their keys the updates that documents say stand in the open round."""
        with self.lock:
            number, lives = (
                self.sight.number(fragment),
                self.known_updates.unread(fragment),
            )
        if not lives:
            return
        prefix = keys.updates(fragment, number)
        items = [Item(f"{prefix}{life}", UNKNOWN_BYTES) for life in lives]
        self.updates.look(fragment, number, items)
        with self.lock:
            if self.sight.number(fragment) == number:
                left = set(self.known_updates.unread(fragment)).intersection(lives)
                self.known_updates.see_nothing(fragment, left)

    def ahead(self, fragment: int) -> list[Header]:
        """Return what departed for the round after the open one."""
        number = self.sight.number(fragment) + 1
        prefix = keys.updates(fragment, number)
        lives = {life for key in self._reading.listed(prefix) if (life := life_of(key))}
        with self.lock:
            lives.update(self.known_updates.standing(fragment, number))
        items = [Item(f"{prefix}{life}", UNKNOWN_BYTES) for life in sorted(lives)]
        self.updates.look(fragment, number, items)
        found = [
            header for header, _ in self.updates.by_round[fragment, number].values()
        ]
        return self.known_updates.speaking(
            header for header in found if header.kind is Kind.DEPARTING
        )

    def furthest(self) -> int:
        """Return the highest round that anybody has published for, as lists say now.

        Who leaves may have published for the round after the open one.
        """
        furthest = 0
        for fragment in range(len(self.sight.layout)):
            self.look_round(fragment)
            number = self.sight.number(fragment)
            published = [
                each
                for each in (number, number + 1)
                if any(map(life_of, self._reading.listed(keys.updates(fragment, each))))
            ]
            furthest = max(furthest, number - 1, *published)
        return furthest

    def follow(self, fragment: int) -> None:
        """Read the rosters of a fragment, from its open round to the last closed."""
        while True:
            with self.lock:
                number = self.sight.number(fragment)
                # Before the roster is asked for: they had read it then.
                readers = self._readers(fragment, number)
            try:
                found = self.roster(fragment, number)
            except NoSuchObject as exc:
                self._require_open(self.roster_key(fragment, number), readers, exc)
                return
            key = self.roster_key(fragment, number)
            if found.epoch > self.sight.state.epoch:
                self.heed_controls()  # what was in force there is in force here
            self._reading.require_controls(found.controls, named_by=key)
            with self.lock:
                names = {entry.island for entry in found.roster.entries}
                are_strange = not names <= self.sight.documents.keys()
                if self.sight.number(fragment) == number:
                    self._require_next(found, key)
                    self.known_updates.see_roster(found, self.timing.now_s())
            if are_strange:
                # Whoever does not know of them would not wait for them from now on.
                self.look_members()
            self.updates.forget(fragment, number - 1)

    def known_roster(self, fragment: int, round: int) -> RosterDocument:
        """Return the roster of a closed round, as it was read or is read now."""
        found = self.sight.rosters.get((fragment, round))
        return found if found is not None else self.roster(fragment, round)

    def roster(self, fragment: int, round: int) -> RosterDocument:
        """Return the roster of a round.

        Raises:
            NoSuchObject: the round is not closed.
            CorruptError: something else is there, and nobody can say how it went.
        """
        while True:
            key = self.roster_key(fragment, round)
            found = fetch_roster(self.store, key, run=self.run)
            if (found.fragment, found.round) != (fragment, round):
                raise CorruptError(
                    f"{key} holds the roster of round {found.round} of fragment "
                    f"{found.fragment}. {RESTORE}"
                )
            if not found.move:
                self._require_linked(found, key)
                return found
            if not self._was_given_up(found.move, key):
                raise NoSuchObject(f"{key} holds the round for a move.", key=key)
            self._thawed[fragment, round] = found.move

    def roster_key(self, fragment: int, round: int) -> str:
        """Return where a round is closed, as far as is known."""
        if (move := self._thawed.get((fragment, round))) is not None:
            return keys.roster_after(fragment, round, move)
        return keys.roster(fragment, round)

    def _was_given_up(self, move: int, key: str) -> bool:
        """Return whether a move that a roster names was given up since."""
        moves = self.sight.moves
        if move not in moves.begun or moves.is_under_way(move):
            self.heed_controls()
        if move not in moves.begun:
            raise CorruptError(
                f"{key} names operators' word {move} as a move, and it is none. "
                f"{RESTORE}"
            )
        return move in moves.given_up

    def _readers(self, fragment: int, round: int) -> list[tuple[str, RosterHead]]:
        """Return the islands whose documents say that they read a round's roster."""
        return [
            (name, document.heads[fragment])
            for name, document in sorted(self.sight.documents.items())
            if fragment < len(document.heads)
            and document.heads[fragment].round >= round
        ]

    def _require_open(
        self,
        key: str,
        readers: list[tuple[str, RosterHead]],
        missing: NoSuchObject,
    ) -> None:
        """Return if no island has read the missing roster.

        Raises:
            CorruptError: it was there, and closing the round again would make another.
        """
        if readers:
            raise CorruptError(
                f"{key} is gone: island {readers[0][0]!r} has read the roster of round "
                f"{readers[0][1].round}. {RESTORE}"
            ) from missing

    def _require_next(self, found: RosterDocument, key: str) -> None:
        """Return if a roster follows the last one that was read.

        Raises:
            CorruptError: it belongs to another history of the run, or an island has
                read another one at its key.
        """
        head = self.sight.heads[found.fragment]
        is_next = found.before == head.digest
        if not is_next and not (found.before == b"" and not head.is_chained):
            where = keys.roster(found.fragment, head.round) if head.round else keys.RUN
            raise CorruptError(
                f"{key} follows an object with digest {found.before.hex() or 'none'}, "
                f"and {where}, which was read before it, has {head.digest.hex()}: one "
                f"of them was changed. {RESTORE}"
            )
        for name, theirs in self._readers(found.fragment, found.round):
            if theirs.round == found.round and theirs.digest != found.digest:
                raise CorruptError(
                    f"{key} has digest {found.digest.hex()}, and island {name!r} has "
                    f"read {theirs.digest.hex()} there. {RESTORE}"
                )

    def _require_linked(self, found: RosterDocument, key: str) -> None:
        """Return unless the roster after this one, or the last one, names another.

        Raises:
            CorruptError: one does.
        """
        after = self.sight.rosters.get((found.fragment, found.round + 1))
        head = self.sight.heads.get(found.fragment)
        named = after.before if after is not None else b""
        if not named and head is not None and head.round == found.round:
            named = head.digest
        if named and named != found.digest:
            raise CorruptError(
                f"{key} has digest {found.digest.hex()}, and the run goes on from "
                f"{named.hex()}. {RESTORE}"
            )


def require_no_remains(store: Store, *, url: str) -> None:
    """Return unless a run is there whose settings are gone.

    Raises:
        CorruptError: `run.json` is there without the settings.
    """
    try:
        store.get(keys.RUN, 0, 1)
    except NoSuchObject:
        return
    raise CorruptError(
        f"{keys.SETTINGS} is gone from {url}, and {keys.RUN} is there. If a run is on "
        f"its way there, let `atoll move` finish. Otherwise: {RESTORE}"
    )
