"""Reads updates in a bucket: their headers, and small ones whole. Puts nothing."""

from __future__ import annotations

from functools import partial

import numpy as np

from atoll.errors import NoSuchObject, Refused
from atoll.exchange.bucket import keys
from atoll.exchange.bucket.keys import Life, life_of
from atoll.exchange.bucket.means import DIRECT_ISLANDS
from atoll.exchange.bucket.reading import Reading
from atoll.exchange.bucket.reading_members import MemberReading
from atoll.store import Item
from atoll.weights.verify import require_terms
from atoll.wire import Header, frame_bytes, header_length, piece_count, unpack
from atoll.wire.layout import MAX_HEADER_BYTES

SMALL_BYTES = 2**20
"""An update of at most this size is read whole, with one request."""

UNKNOWN_BYTES = 2**62
"""The size of an update that no list has told: its header is read first."""

_HEAD_BYTES = 16_384
"""What a header takes beside its pieces, and more."""


class UpdateReading:
    """Tells what islands have published. Any thread may call."""

    def __init__(self, reading: Reading, members: MemberReading) -> None:
        self._reading, self._members = reading, members
        self._sight, self._lock = reading.sight, reading.lock
        self._store, self._timing = reading.store, reading.timing
        self.by_round: dict[tuple[int, int], dict[Life, tuple[Header, np.ndarray]]] = {}
        """What was read of each one, with its body if that is small."""

        self._strange: set[Item] = set()
        """What was read where updates are, and is none."""

    def has(self, fragment: int, round: int, life: Life) -> bool:
        """Return whether a life has published for a round, by the update's key."""
        return self.header(fragment, round, life) is not None

    def header(self, fragment: int, round: int, life: Life) -> Header | None:
        """Return what a life has published for a round, by the update's key."""
        item = Item(f"{keys.updates(fragment, round)}{life}", UNKNOWN_BYTES)
        found = self._found(fragment, round, life, item)
        return found[0] if found else None

    def read(self, key: str, size: int) -> tuple[Header, np.ndarray]:
        """Return the header of an update, and its body if it came along.

        Raises:
            NoSuchObject: there is none, or no more.
            CorruptError: it is no frame.
        """
        elements = max([layout.elements for layout in self._sight.layout])
        first = min(_HEAD_BYTES + 32 * piece_count(elements), MAX_HEADER_BYTES)
        # Of more islands nobody needs whole updates, nor has room for all of them.
        is_direct = len(self._sight.documents) <= DIRECT_ISLANDS
        if is_direct and size <= SMALL_BYTES:
            first = max(first, size)
        data = self._store.get(key, 0, first)
        length = header_length(data)
        header = unpack(data[:length])
        body = data[length:] if len(data) == size else memoryview(b"")
        return header, np.frombuffer(bytearray(body), np.uint8)

    def keep(self, header: Header) -> None:
        """Take note of an update that this island has put: nobody needs to read it."""
        life = Life(keys.slug(header.island), header.incarnation)
        known = self.by_round.setdefault((header.fragment, header.round), {})
        known.setdefault(life, (header, np.empty(0, np.uint8)))
        with self._lock:
            self._reading.updates.see(header, self._timing.now_s())

    def seen(
        self, fragment: int, round: int, life: Life
    ) -> tuple[Header, np.ndarray] | None:
        """Return what was read of an update, if it was."""
        return self.by_round.get((fragment, round), {}).get(life)

    def objection(self, header: Header) -> str:
        """Return why an update cannot count by the run's terms."""
        if header.refused:
            return ""
        layout = self._sight.layout[header.fragment]
        try:
            require_terms(header, layout, self._sight.terms(header.fragment))
        except Refused as exc:
            return f"terms: {exc}"[:400]
        return ""

    def look(self, fragment: int, round: int, items: list[Item]) -> None:
        """Read those of a round's updates that were not read before."""
        known = self.by_round.setdefault((fragment, round), {})
        fresh = [
            (life, item)
            for item in items
            if (life := life_of(item.key))
            and life not in known
            and item not in self._strange
        ]
        if not all(self._reading.members.knows(life) for life, _ in fresh):
            self._members.look()
        reads = [
            partial(self._found, fragment, round, life, item) for life, item in fresh
        ]
        for life, found in zip(
            [life for life, _ in fresh], self._timing.together(reads), strict=True
        ):
            if found is not None:
                known[life] = found
        for header, _ in list(known.values()):
            with self._lock:
                self._reading.updates.see(
                    header, self._timing.now_s(), objection=self.objection(header)
                )

    def _found(
        self, fragment: int, round: int, life: Life, item: Item
    ) -> tuple[Header, np.ndarray] | None:
        """Return an update's header, and its body if that is small."""
        read = partial(self.read, item.key, item.size)
        try:
            found = self._reading.tolerant(item.key, read)
        except NoSuchObject:
            return None  # collected since it was listed
        if found is None:
            self._strange.add(item)
            return None
        header = found[0]
        if item.size not in (UNKNOWN_BYTES, frame_bytes(header)):
            self._reading.tell(
                f"{item.key} has {item.size} bytes, and its header says "
                f"{frame_bytes(header)}: it is cut off, and is passed over."
            )
            self._strange.add(item)
            return None
        whose = (header.run, header.fragment, header.round, header.incarnation)
        is_its = whose == (self._reading.run, fragment, round, life.incarnation)
        if not (
            is_its and header.kind.is_update and keys.slug(header.island) == life.slug
        ):
            self._reading.tell(
                f"{item.key} holds the {header.name}, and is passed over."
            )
            self._strange.add(item)
            return None
        return found

    def forget(self, fragment: int, before: int) -> None:
        """Let go what was read of rounds that are over."""
        for where in list(self.by_round):
            if where[0] == fragment and where[1] < before:
                self.by_round.pop(where, None)
