"""Where the bodies of agreed frames are kept, until compaction collects them.

Rule 1: a body is durable before the record that names its place is written.
Rule 2: a large body is a frame file of its own, `means/<fragment>/<round>`. Small ones
        are appended to a file that they share, `bodies/<number>`, so that a small round
        costs two syncs: one for its body, one for its record.
Rule 3: what no record names is not there: unfinished bodies are skipped or removed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from atoll.disk import Disk
from atoll.errors import CorruptError
from atoll.journal.recorded import RecordedFragment
from atoll.journal.records import Agreed, Place
from atoll.journal.segments import CHUNK_BYTES
from atoll.journal.stored import U8, Drafts, StoredBody, read_part
from atoll.wire import Header
from atoll.wire.digests import view_of

SMALL_BYTES = 2**16
SHARED_BYTES = 2**22
"""When a shared file is this long, compaction begins the next."""

MEANS, SHARED = "means/", "bodies/"


def is_large(header: Header) -> bool:
    """Return whether a body gets a file of its own."""
    return header.body_bytes > SMALL_BYTES


class Bodies:
    """Keeps bodies by their places; `fragments` remembers which."""

    def __init__(self, disk: Disk, drafts: Drafts) -> None:
        self._disk, self._drafts = disk, drafts
        self._shared = self._next = self._highest = 0
        """Numbers of shared files: the one in use, the one that compaction has begun
        (0 if none), and the highest that was ever used."""

        self._size: int | None = 0
        """Of the shared file in use; None when it must be measured."""

    def open(self, fragments: Sequence[RecordedFragment]) -> set[tuple[int, int]]:
        """Forget the places of bodies that are gone; return fragment and round of each.

        Removes nothing: `sweep` does.
        """
        present = {*self._disk.names(MEANS), *self._disk.names(SHARED)}
        gone = set()
        for index, fragment in enumerate(fragments):
            for round, place in list(fragment.places.items()):
                self._highest = max(self._highest, place.file)
                name = _name(index, round, place)
                if name not in present:
                    gone.add((index, round))
                    del fragment.places[round]
        shared = [name for name in present if name.startswith(SHARED)]
        if latest := max(map(_number, shared), default=0):
            self._shared, self._size = latest, None
            self._highest = max(self._highest, latest)
        return gone

    def sweep(
        self, fragments: Sequence[RecordedFragment], kept: Collection[str] = ()
    ) -> None:
        """Remove the bodies that no record names, but for those of `kept`."""
        named = {
            _name(index, round, place)
            for index, fragment in enumerate(fragments)
            for round, place in fragment.places.items()
        }
        present = {*self._disk.names(MEANS), *self._disk.names(SHARED)}
        named |= {_shared_name(self._shared), *kept}
        for name in sorted(present - named):
            self._disk.remove(name)

    def prepare(self) -> None:
        """Have a file for small bodies, so that no round pays for making it."""
        if not self._shared:
            self._shared, self._size = self._begin_shared(), 0

    def keep(self, header: Header, body: U8) -> tuple[Place | None, str | None]:
        """Make a body durable; return its place, and the draft to keep if it has one.

        A void round has no place. On an error nothing is kept; safe to repeat.
        """
        if not header.elements:
            return None, None
        if not is_large(header):
            return self._share(body), None
        name = _name(header.fragment, header.round, Place())
        self._drafts.write(name, header, body)
        return Place(), name

    def stored(self, agreed: Agreed, place: Place | None) -> StoredBody:
        """Return the body of an outcome, not yet verified; None is the place of none.

        Raises:
            CorruptError: its file is missing or begins with another header.
        """
        header = agreed.header
        if place is None:
            return StoredBody(self._disk, "", header, 0)
        name = _name(header.fragment, header.round, place)
        if place.file:
            return StoredBody(self._disk, name, header, place.first)
        size = len(agreed.packed)
        if read_part(self._disk, name, 0, size) != agreed.packed:
            raise CorruptError(
                f"{name} is damaged: its header is not the one that the log has. "
                "Restore it from a copy."
            )
        return StoredBody(self._disk, name, header, size)

    def collect(
        self, fragments: Sequence[RecordedFragment], index: int, rounds: Collection[int]
    ) -> None:
        """Remove the bodies of some rounds of a fragment."""
        places = fragments[index].places
        for round in rounds:
            # Forgotten first: a reader that misses the file learns that it is gone.
            place = places.pop(round)
            if not place.file:
                self._disk.remove(_name(index, round, place))
        used = {
            place.file for each in fragments for place in list(each.places.values())
        }
        for name in self._disk.names(SHARED):
            if _number(name) not in used | {self._shared, self._next}:
                self._disk.remove(name)
        if not self._next and (self._size or 0) >= SHARED_BYTES:
            self._next = self._begin_shared()

    def _share(self, body: U8) -> Place:
        if self._next:
            self._shared, self._next, self._size = self._next, 0, 0
        self.prepare()
        name = _shared_name(self._shared)
        first = self._measure(name) if self._size is None else self._size
        self._size = None
        data = view_of(body)
        self._disk.append(name, data)
        self._disk.sync(name)
        self._size = first + len(data)
        return Place(file=self._shared, first=first)

    def _begin_shared(self) -> int:
        self._highest += 1  # a number is used once, whatever became of its file
        self._disk.write_new(_shared_name(self._highest), [])
        return self._highest

    def _measure(self, name: str) -> int:
        size = 0
        while data := read_part(self._disk, name, size, CHUNK_BYTES):
            size += len(data)
        return size


def _name(fragment: int, round: int, place: Place) -> str:
    if place.file:
        return _shared_name(place.file)
    return f"{MEANS}{fragment}/{round}"


def _shared_name(number: int) -> str:
    return f"{SHARED}{number}"


def _number(name: str) -> int:
    text = name.removeprefix(SHARED)
    return int(text) if text.isdecimal() else 0
