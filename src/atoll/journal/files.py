"""The files beside the log: bodies of outcomes, states, departing updates, a key.

Frames are read piece by piece and verified before use.

Rule 1: a file is durable before the record that names it is written.
Rule 2: a large body has its own frame file, `means/<fragment>/<round>`. Small ones are
        appended to a file that they share, `bodies/<number>`, so that a small round
        costs two syncs: one for its body, one for its record.
Rule 3: a body that no record names does not count: unfinished bodies are skipped or
        removed.
Rule 4: a departing update is a file until its round is over. It may be drafted ahead,
        by any thread, before it is known whether it will be recorded. A draft takes a
        name that is free, and replaces nothing: a record that was withdrawn may name
        the existing file. One thread at a time works on a name, from its file to its
        record.
Rule 5: `states/<fragment>/<round>` is written once. The means after it lead to the
        present; the log has the digest of every state.

A file may be ahead of the log after a crash, but only by a little: the body of the next
round, and a departing update for the round after that. A state is written when its
round is durable. A file that is further ahead shows that the log has lost committed
rounds: it is reported and kept, not removed as unfinished.

`receipts.key` holds 32 random bytes, then 16 bytes of BLAKE3 over a tag and them. The
key is made once for a run. With it any state can be proven to this coordinator, so no
route, no export and no move takes it along.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from atoll import wire
from atoll.disk import (
    Disk,
    DiskSpace,
)
from atoll.errors import CorruptError, NoSuchFile
from atoll.journal.encoding import CHUNK_BYTES
from atoll.journal.records import (
    AgreedRecord,
    BodyLocation,
)
from atoll.journal.replay import RecordedFragment, RecordedRun, Update
from atoll.weights import FragmentLayout, FragmentState
from atoll.wire.digests import view_of
from atoll.wire.frame import KEY_BYTES

U8 = NDArray[np.uint8]
Framed = tuple[wire.Header, U8]
"""A header and the body it describes."""

Body = U8 | Iterable[U8]
"""A body, or its parts, which can be read repeatedly."""


@dataclass(frozen=True)
class StoredBody:
    """The body that `header` describes, at byte `first` of a file.

    Missing bytes, or bytes that do not match the header, are a CorruptError.
    """

    disk: Disk
    name: str
    header: wire.Header
    first: int

    def piece(self, index: int) -> bytes:
        """Return one piece of the body, verified."""
        start, end = self.header.piece_range(index)
        data = read_part(self.disk, self.name, self.first + start, end - start)
        try:
            wire.verify_piece(self.header, index, data)
        except CorruptError as exc:
            raise CorruptError(f"{self.name} is damaged: {exc}") from exc
        return data

    def verify(self) -> None:
        """Return if every piece verifies, holding one at a time."""
        for index in range(len(self.header.pieces)):
            self.piece(index)

    def read(self) -> U8:
        """Return the whole body, verified."""
        size = self.header.body_bytes
        # Memory is allocated only for bytes that the file has.
        if size and len(read_part(self.disk, self.name, self.first + size - 1, 1)) < 1:
            raise CorruptError(f"{self.name} is too short for the {self.header.name}.")
        body, position = np.empty(size, np.uint8), 0
        for index in range(len(self.header.pieces)):
            piece = self.piece(index)
            body[position : position + len(piece)] = np.frombuffer(piece, np.uint8)
            position += len(piece)
        return body


def stored_frame(disk: Disk, name: str) -> StoredBody:
    """Return the frame that a file holds: its header verified, its body not yet.

    Raises:
        CorruptError: the file is missing, or holds anything but one frame.
    """
    try:
        prefix = read_part(disk, name, 0, wire.PREFIX_BYTES)
        size = wire.header_length(prefix)
        header = wire.unpack(read_part(disk, name, 0, size))
    except CorruptError as exc:
        raise CorruptError(f"{name} is damaged: {exc}") from exc
    if read_part(disk, name, size + header.body_bytes, 1):
        raise CorruptError(f"{name} is damaged: bytes follow the {header.name}.")
    return StoredBody(disk, name, header, size)


class Drafts:
    """Writes frame files, and remembers those that no record names yet."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._names: set[str] = set()

    def write(self, name: str, header: wire.Header, body: Body) -> None:
        """Make a file of a frame, complete and durable; an unnamed one gives way."""
        if name in self._names:
            self._disk.remove(name)
        self._names.add(name)
        self._disk.write_new(name, chain([wire.pack(header)], views_of(body)))

    def give_way(self, name: str) -> None:
        """Let `write` replace an existing file that no record names."""
        self._names.add(name)

    def keep(self, name: str) -> None:
        """Note that a durable record names the file."""
        self._names.discard(name)


def views_of(body: Body) -> Iterator[memoryview]:
    """Yield the bytes of a body, or of its parts, without copying them."""
    parts = [body] if isinstance(body, np.ndarray) else body
    for part in parts:
        yield view_of(part)


def read_part(disk: Disk, name: str, first: int, size: int) -> bytes:
    """Return bytes of an existing file; fewer at its end."""
    try:
        return disk.read(name, first, size)
    except NoSuchFile as exc:
        raise CorruptError(
            f"{name} is missing, and the journal needs it. Restore it from a copy."
        ) from exc


SMALL_BYTES = 2**16
SHARED_BYTES = 2**22
"""When a shared file is this long, compaction begins the next."""

MEANS, SHARED = "means/", "bodies/"


def is_large(header: wire.Header) -> bool:
    """Return whether a body gets its own file."""
    return header.body_bytes > SMALL_BYTES


class BodyFiles:
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
        lost = set()
        for index, fragment in enumerate(fragments):
            for round, location in list(fragment.locations.items()):
                self._highest = max(self._highest, location.file)
                name = _name(index, round, location)
                if name not in present:
                    lost.add((index, round))
                    del fragment.locations[round]
        shared = [name for name in present if name.startswith(SHARED)]
        if latest := max(map(_number, shared), default=0):
            self._shared, self._size = latest, None
            self._highest = max(self._highest, latest)
        return lost

    def sweep(
        self, fragments: Sequence[RecordedFragment], retained: Collection[str] = ()
    ) -> None:
        """Remove the bodies that no record names, except those in `retained`."""
        named = {
            _name(index, round, location)
            for index, fragment in enumerate(fragments)
            for round, location in fragment.locations.items()
        }
        present = {*self._disk.names(MEANS), *self._disk.names(SHARED)}
        named |= {_shared_name(self._shared), *retained}
        for name in sorted(present - named):
            self._disk.remove(name)

    def prepare(self) -> None:
        """Have a file for small bodies, so that no round pays for making it."""
        if not self._shared:
            self._shared, self._size = self._begin_shared(), 0

    def keep(
        self, header: wire.Header, body: Body
    ) -> tuple[BodyLocation | None, str | None]:
        """Make a body durable; return its place, and the draft to keep if it has one.

        A void round has no place. On an error nothing is kept; safe to repeat.
        """
        if not header.elements:
            return None, None
        if not is_large(header):
            return self._share(body), None
        name = _name(header.fragment, header.round, BodyLocation())
        self._drafts.write(name, header, body)
        return BodyLocation(), name

    def stored(self, agreed: AgreedRecord, location: BodyLocation | None) -> StoredBody:
        """Return the body of an outcome, not yet verified; None is the place of none.

        Raises:
            CorruptError: its file is missing or begins with another header.
        """
        header = agreed.header
        if location is None:
            return StoredBody(self._disk, "", header, 0)
        name = _name(header.fragment, header.round, location)
        if location.file:
            return StoredBody(self._disk, name, header, location.first)
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
        locations = fragments[index].locations
        for round in rounds:
            # Forgotten first: a reader that misses the file learns that it is gone.
            location = locations.pop(round)
            if not location.file:
                self._disk.remove(_name(index, round, location))
        used = {
            location.file
            for fragment in fragments
            for location in list(fragment.locations.values())
        }
        for name in self._disk.names(SHARED):
            if _number(name) not in used | {self._shared, self._next}:
                self._disk.remove(name)
        if not self._next and (self._size or 0) >= SHARED_BYTES:
            self._next = self._begin_shared()

    def _share(self, body: Body) -> BodyLocation:
        if self._next:
            self._shared, self._next, self._size = self._next, 0, 0
        self.prepare()
        name = _shared_name(self._shared)
        first = self._measure(name) if self._size is None else self._size
        self._size = None
        data = b"".join(views_of(body))
        self._disk.append(name, data)
        self._disk.sync(name)
        self._size = first + len(data)
        return BodyLocation(file=self._shared, first=first)

    def _begin_shared(self) -> int:
        self._highest += 1  # a number is used once, even if its file is gone
        self._disk.write_new(_shared_name(self._highest), [])
        return self._highest

    def _measure(self, name: str) -> int:
        size = 0
        while data := read_part(self._disk, name, size, CHUNK_BYTES):
            size += len(data)
        return size


def _name(fragment: int, round: int, location: BodyLocation) -> str:
    if location.file:
        return _shared_name(location.file)
    return f"{MEANS}{fragment}/{round}"


def _shared_name(number: int) -> str:
    return f"{SHARED}{number}"


def _number(name: str) -> int:
    text = name.removeprefix(SHARED)
    return int(text) if text.isdecimal() else 0


STATES = "states/"


def state_name(fragment: int, round: int) -> str:
    """Return the name of the file that holds a state."""
    return f"{STATES}{fragment}/{round}"


def state_rounds(disk: Disk, fragment: int) -> list[int]:
    """Return the rounds whose states are on the disk, latest first."""
    prefix = f"{STATES}{fragment}/"
    texts = (name.removeprefix(prefix) for name in disk.names(prefix))
    rounds = (
        int(text) for text in texts if text.isdecimal() and text == f"{int(text)}"
    )
    return sorted(rounds, reverse=True)


def stored_state(disk: Disk, fragment: int, round: int, digest: bytes) -> StoredBody:
    """Return a state whose header is the one that the log asks for.

    Raises:
        CorruptError: the file is missing, or is not that state.
    """
    name = state_name(fragment, round)
    stored = stored_frame(disk, name)
    header = stored.header
    if header.kind is not wire.FrameKind.STATE:
        raise CorruptError(f"{name} is damaged: it holds the {header.name}.")
    identity = (header.fragment, header.round, header.base)
    if identity != (fragment, round, digest):
        raise CorruptError(
            f"{name} is damaged: it holds fragment {header.fragment}, round "
            f"{header.round}, digest {header.base.hex()}, and the log has digest "
            f"{digest.hex()}."
        )
    return stored


def begin(stored: StoredBody) -> FragmentState:
    """Return the state that a file holds, every bit verified."""
    return FragmentState.from_frame(stored.header, stored.read())


def rebuild(
    state: FragmentState,
    header: wire.Header,
    means: Sequence[tuple[StoredBody, bytes]],
    layout: FragmentLayout | None = None,
) -> None:
    """Apply means to a state, and compare each result with the digest beside it.

    Only gathered radial means need `layout`.

    Raises:
        CorruptError: bytes do not verify, or a digest differs; the state is spoilt.
    """
    require_same_optimizer(header, (mean.header for mean, _ in means))
    for mean, digest in means:
        state.apply(mean.header, mean.read(), layout=layout)
        require_digest(mean.header, state.digest, digest)


def require_same_optimizer(state: wire.Header, means: Iterator[wire.Header]) -> None:
    """Return if every mean can be applied to a state of this kind."""
    assert state.outer is not None
    for mean in means:
        assert mean.outer is not None
        if wire.MOMENTS[mean.outer.optimizer] != wire.MOMENTS[state.outer.optimizer]:
            raise CorruptError(
                f"the {mean.name} is for {mean.outer.optimizer}, and the state of "
                f"round {state.round} for {state.outer.optimizer}."
            )


def require_digest(mean: wire.Header, actual: bytes, recorded: bytes) -> None:
    """Return if the state after a mean is the one that was recorded."""
    if actual != recorded:
        raise CorruptError(
            f"Round {mean.round} of fragment {mean.fragment} replays to state "
            f"{actual.hex()}, and the log has {recorded.hex()}. "
            "Restore the journal from a copy, or recover the run from its islands."
        )


DEPARTING = "departing/"


class DepartingFiles:
    """The files of departing updates on a disk."""

    def __init__(self, disk: Disk, drafts: Drafts, room: DiskSpace) -> None:
        self._disk, self._drafts, self._room = disk, drafts, room
        self._written: dict[str, wire.Header | None] = {}
        """Headers of the files of open rounds; None for files of an earlier process."""

        self._busy: set[str] = set()
        self._freed = threading.Condition()

    def open(self, staged: Iterable[Update], retained: Collection[str] = ()) -> None:
        """Adopt the files that records name; remove others not in `retained`."""
        self._written = dict.fromkeys(map(departing_name, staged))
        for name in self._disk.names(DEPARTING):
            if name not in self._written and name not in retained:
                self._disk.remove(name)

    def draft(self, header: wire.Header, body: U8) -> None:
        """Have a durable file of an update, if there is none by its name."""
        with self._holding(departing_name(key_of(header))) as name:
            if name not in self._written:
                self._write(name, header, body)

    @contextmanager
    def staging(self, header: wire.Header, body: U8) -> Iterator[str]:
        """Give the name of an update's durable file, to be recorded meanwhile.

        Nothing that was withdrawn may still be behind the log's end.
        """
        with self._holding(departing_name(key_of(header))) as name:
            if self._written.get(name) != header:
                self._written.pop(name, None)
                self._write(name, header, body)
            yield name

    def collect(self, fragment: int, is_over: Callable[[str], bool]) -> None:
        """Remove the files of updates that are over; some may be drafted even then."""
        for name in self._disk.names(f"{DEPARTING}{fragment}/"):
            with self._holding(name):
                if is_over(name):
                    self._written.pop(name, None)
                    self._disk.remove(name)

    def _write(self, name: str, header: wire.Header, body: U8) -> None:
        with self._room.claiming(len(body), purpose="an update that departs"):
            self._drafts.write(name, header, body)
        self._written[name] = header

    @contextmanager
    def _holding(self, name: str) -> Iterator[str]:
        with self._freed:
            self._freed.wait_for(lambda: name not in self._busy)
            self._busy.add(name)
        try:
            yield name
        finally:
            with self._freed:
                self._busy.discard(name)
                self._freed.notify_all()


def key_of(header: wire.Header) -> Update:
    """Return the key of an update in the journal."""
    return header.fragment, header.round, header.island


def departing_name(key: Update) -> str:
    """Return the name of the file that holds a departing update."""
    fragment, round, island = key
    digest = wire.blake3_digest(island.encode()).hex()
    return f"{DEPARTING}{fragment}/{round}-{digest[:32]}"


def over_files(recorded: RecordedRun, fragment: int) -> Callable[[str], bool]:
    """Return whether the file of a departing update is over, by its name.

    In an asynchronous run a draft is over that no record names, and whose island has an
    update of this or a later round in a roster.
    """
    its = recorded.fragment(fragment)
    if not recorded.is_async:
        return lambda name: _round(name) <= its.round
    labels = {
        departing_name((fragment, listed.label, island)).rpartition("-")[2]: (
            listed.label
        )
        for (index, island), listed in list(recorded.listed.items())
        if index == fragment
    }

    def is_over(name: str) -> bool:
        listed = max(labels.get(name.rpartition("-")[2], 0), its.lost_through)
        return _round(name) <= listed and name not in set(
            map(departing_name, list(recorded.staged))
        )

    return is_over


def _round(name: str) -> int:
    digits = name.rpartition("/")[2].partition("-")[0]
    return int(digits) if digits.isdecimal() else 0


FOLDERS = {STATES: 0, MEANS: 1, DEPARTING: 2}
"""By how many rounds a file may be ahead of the log."""

REMEDY = (
    "Islands that still have the lost rounds bring them back; otherwise stop the "
    "coordinator and restore the journal from a copy."
)


class FileAhead(NamedTuple):
    """A file that is later than the log."""

    name: str
    fragment: int
    round: int
    last: int
    """The last round that the log has of the fragment."""

    def __str__(self) -> str:
        return (
            f"{self.name} is later than the log, which ends with round {self.last} of "
            f"fragment {self.fragment}: rounds that were committed are lost. It is "
            f"kept, and not used. {REMEDY}"
        )


def files_ahead(disk: Disk, fragments: Sequence[RecordedFragment]) -> list[FileAhead]:
    """Return the files that are later than the log, in order of their names."""
    files = []
    for folder, ahead in FOLDERS.items():
        for name in disk.names(folder):
            key = _fragment_and_round(name.removeprefix(folder))
            if key is None or key[0] >= len(fragments):
                continue
            fragment, round = key
            last = fragments[fragment].round
            if round > last + ahead:
                files.append(FileAhead(name, fragment, round, last))
    return files


def require_not_founded(disk: Disk) -> None:
    """Return if nothing on the disk shows that a run without weights had some.

    Raises:
        CorruptError: naming what shows it.
    """
    for folder, ahead in FOLDERS.items():
        for name in disk.names(folder):
            key = _fragment_and_round(name.removeprefix(folder))
            if key is not None and (folder != STATES or key[1] > ahead):
                raise CorruptError(
                    f"{name} exists, and the log has no weights that it could "
                    "belong to: the log has lost its end. Restore the journal from a "
                    "copy."
                )


def _fragment_and_round(text: str) -> tuple[int, int] | None:
    """Return what `<fragment>/<round>` or `<fragment>/<round>-<island>` names."""
    fragment, _, rest = text.partition("/")
    round = rest.partition("-")[0]
    if not (fragment.isdecimal() and round.isdecimal()):
        return None
    return int(fragment), int(round)


NAME = "receipts.key"
CHECK_BYTES = 16
_TAG = b"atoll receipts.key v1"


def load_receipt_key(disk: Disk) -> bytes:
    """Return the key of the run on a disk, made and durable if there was none.

    A journal written before there were receipts has none: it gets one here.

    Raises:
        CorruptError: the file does not hold a key; it is left unchanged.
        DiskError: the key cannot be read or written.
    """
    try:
        data = disk.read(NAME)
    except NoSuchFile:
        key = secrets.token_bytes(KEY_BYTES)
        disk.write_new(NAME, [key, _check(key)])
        return key
    key, check = data[:KEY_BYTES], data[KEY_BYTES:]
    if check != _check(key):
        raise CorruptError(
            f"{NAME} is damaged: its {len(data)} bytes do not verify. Restore it from "
            "a copy. Or remove it: the next start makes another key, which does not "
            "know the receipts that islands hold now."
        )
    return key


def _check(key: bytes) -> bytes:
    return wire.blake3_digest(_TAG + key)[:CHECK_BYTES]
