"""Reads the updates that islands have put into a bucket, and stages them.

Rule 1: of an update the header is read; a small update is read in full, with one
        request. None is read twice.
Rule 2: an object that is no update of its key is reported once and ignored.
Rule 3: in an asynchronous run an update stands until a roster lists it, so those of a
        fragment are listed together. One that a roster has listed is not read again.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from atoll import wire
from atoll.errors import NoSuchObject, Refused
from atoll.exchange.bucket.keys import IncarnationKey, UpdateKey
from atoll.exchange.bucket.means import DIRECT_ISLANDS
from atoll.store import Item
from atoll.weights.verify import require_terms
from atoll.wire.frame import MAX_HEADER_BYTES

if TYPE_CHECKING:
    from atoll.exchange.bucket.reader import BucketReader, MemberReader

RECENT_LABELS = 32
"""How many rounds back an update of an asynchronous run is looked for by its key."""

SMALL_BYTES = 2**20
"""An update of at most this size is read in full, with one request."""

UNKNOWN_BYTES = 2**62
"""The size of an update that no list has shown: its header is read first."""

_HEAD_BYTES = 16_384
"""Upper bound of a header without its piece digests."""


class UpdateReader:
    """Reads the updates that islands have published. Any thread may call."""

    def __init__(self, reader: BucketReader, members: MemberReader) -> None:
        self._reader, self._members = reader, members
        self._view, self._lock = reader.view, reader.lock
        self._store, self._runtime = reader.store, reader.runtime
        self.by_round: dict[
            tuple[int, int], dict[IncarnationKey, tuple[wire.Header, np.ndarray]]
        ] = {}
        """Header of each update that was read, with its body if that is small."""

        self._ignored: set[Item] = set()
        """Objects under the keys of updates that are none."""

    def has(self, fragment: int, update: UpdateKey) -> bool:
        """Return whether an incarnation has published an update, by its key."""
        return self.header(fragment, update) is not None

    def header(self, fragment: int, update: UpdateKey) -> wire.Header | None:
        """Return the header of an update, by its key; None if there is none."""
        read = self._read_checked(fragment, update, self._unlisted(fragment, update))
        return read[0] if read else None

    def _unlisted(self, fragment: int, update: UpdateKey) -> Item:
        """Return the object of an update, as if a list had shown it."""
        return Item(self._view.key_of(fragment, update), UNKNOWN_BYTES)

    def read(self, key: str, size: int) -> tuple[wire.Header, np.ndarray]:
        """Return the header of an update, and its body if that was read.

        Raises:
            NoSuchObject: there is none, or it was collected.
            CorruptError: it is no frame.
        """
        elements = max([layout.elements for layout in self._view.layout])
        first = min(_HEAD_BYTES + 32 * wire.piece_count(elements), MAX_HEADER_BYTES)
        # With more islands, each reads a part of every update, and all of them in full
        # would not fit in memory.
        is_direct = len(self._view.documents) <= DIRECT_ISLANDS
        if is_direct and size <= SMALL_BYTES:
            first = max(first, size)
        data = self._store.get(key, 0, first)
        length = wire.header_length(data)
        header = wire.unpack(data[:length])
        body = data[length:] if len(data) == size else memoryview(b"")
        return header, np.frombuffer(bytearray(body), np.uint8)

    def add(self, header: wire.Header) -> None:
        """Stage an update that this island has put, so that it is not read."""
        update = UpdateKey.of(header.round, header.island, header.incarnation)
        updates = self.by_round.setdefault((header.fragment, header.round), {})
        updates.setdefault(update.publisher, (header, np.empty(0, np.uint8)))
        with self._lock:
            self._reader.update_view.stage(header, self._runtime.now_s())

    def cached(
        self, fragment: int, update: UpdateKey
    ) -> tuple[wire.Header, np.ndarray] | None:
        """Return an update's header and body as they were read, if they were."""
        return self.by_round.get((fragment, update.round), {}).get(update.publisher)

    def is_over(self, fragment: int, update: UpdateKey) -> bool:
        """Return whether a listed object of an asynchronous run need not be read.

        A roster has listed it, or a later one of its island.
        """
        with self._lock:
            name = self._reader.member_view.name_of_slug(update.publisher.slug)
            return name is not None and self._view.is_over(fragment, name, update)

    def objection(self, header: wire.Header) -> str:
        """Return why an update cannot count by the run's terms."""
        if header.refused:
            return ""
        layout = self._view.layout[header.fragment]
        try:
            require_terms(header, layout, self._view.terms(header.fragment))
        except Refused as exc:
            return f"terms: {exc}"[:400]
        return ""

    def read_named(self, fragment: int, updates: Iterable[UpdateKey]) -> None:
        """Read and stage updates by their keys, as `read_new` does."""
        objects = [(update, self._unlisted(fragment, update)) for update in updates]
        self.read_new(fragment, objects)

    def read_new(self, fragment: int, objects: list[tuple[UpdateKey, Item]]) -> None:
        """Read those of a fragment's updates that were not read before; stage them."""
        fresh = [
            (update, item)
            for update, item in objects
            if self.cached(fragment, update) is None and item not in self._ignored
        ]
        has_read = self._reader.member_view.has_read
        if not all(has_read(update.publisher) for update, _ in fresh):
            self._members.read()
        reads = [partial(self._read_checked, fragment, *pair) for pair in fresh]
        headers = []
        for (update, _), read in zip(fresh, self._runtime.gather(reads), strict=True):
            if read is not None:
                updates = self.by_round.setdefault((fragment, update.round), {})
                updates[update.publisher] = read
                headers.append(read[0])
        if before := self._before_departures(fragment, headers):
            self.read_named(fragment, before)
        self._stage_all(fragment, {update.round for update, _ in objects})

    def _before_departures(
        self, fragment: int, headers: Iterable[wire.Header]
    ) -> list[UpdateKey]:
        """Return the updates that may stand before departing ones that were just read.

        An asynchronous island that leaves may have two of them. A list that lags behind
        may show the second one only, and rosters list the first one first.
        """
        if not self._view.is_async:
            return []
        with self._lock:
            return [
                UpdateKey.of(label, header.island, header.incarnation)
                for header in headers
                if header.kind is wire.FrameKind.DEPARTING
                for label in self._labels_before(header)
            ]

    def _labels_before(self, header: wire.Header) -> range:
        """Return the labels of updates that may stand before one of the same island."""
        if not self._view.stands(header):
            return range(0)
        last = self._view.listed(header)
        is_own = last is not None and last.incarnation == header.incarnation
        first = last.round + 1 if last is not None and is_own else 1
        return range(max(first, header.round - RECENT_LABELS), header.round)

    def _stage_all(self, fragment: int, rounds: Iterable[int]) -> None:
        """Stage the updates of these rounds; in an asynchronous run, all that stand."""
        if self._view.is_async:
            rounds = [key[1] for key in list(self.by_round) if key[0] == fragment]
        for round in rounds:
            for header, _ in list(self.by_round.get((fragment, round), {}).values()):
                self._stage(header)

    def _stage(self, header: wire.Header) -> None:
        with self._lock:
            if self._view.is_async and not self._view.stands(header):
                return
            self._reader.update_view.stage(
                header, self._runtime.now_s(), objection=self.objection(header)
            )

    def _read_checked(
        self, fragment: int, update: UpdateKey, item: Item
    ) -> tuple[wire.Header, np.ndarray] | None:
        """Return an update's header, and its body if small; None: it is no update."""
        read = partial(self.read, item.key, item.size)
        try:
            content = self._reader.ignore_corrupt(item.key, read)
        except NoSuchObject:
            return None  # collected since it was listed
        if content is None:
            self._ignored.add(item)
            return None
        header = content[0]
        if item.size not in (UNKNOWN_BYTES, wire.frame_bytes(header)):
            self._reader.warn_once(
                f"{item.key} has {item.size} bytes, and its header says "
                f"{wire.frame_bytes(header)}: it is cut off, and is ignored."
            )
            self._ignored.add(item)
            return None
        named = UpdateKey.of(header.round, header.island, header.incarnation)
        is_here = (header.run, header.fragment) == (self._reader.run, fragment)
        if not (is_here and named == update and header.kind.is_update):
            self._reader.warn_once(
                f"{item.key} holds the {header.name}, and is ignored."
            )
            self._ignored.add(item)
            return None
        return content

    def forget(self, fragment: int, before: int) -> None:
        """Drop the cached updates of a fragment's rounds before one.

        Of an asynchronous run: those that rosters before that round list.
        """
        for key, updates in list(self.by_round.items()):
            if key[0] != fragment:
                continue
            for publisher, (header, _) in list(updates.items()):
                if self._is_past(header, before):
                    updates.pop(publisher, None)
            if not updates:
                self.by_round.pop(key, None)

    def _is_past(self, header: wire.Header, before: int) -> bool:
        if not self._view.is_async:
            return header.round < before
        last = self._view.listed(header)
        is_listed = last is not None and last.covers(header)
        return is_listed and last is not None and last.round < before
