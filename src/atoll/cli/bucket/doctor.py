"""What stands between this machine and a run in a store, step by step.

Every permission is asked for by itself, so that the one that is missing is named.
"""

from __future__ import annotations

import secrets
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

from atoll.cli.bucket.whole_reads import WholeReads
from atoll.errors import AtollError, CorruptError
from atoll.exchange.bucket import BucketReader, ThreadTiming
from atoll.exchange.bucket.create import require_able, require_there
from atoll.exchange.bucket.outcomes import Outcomes
from atoll.exchange.bucket.states import States
from atoll.store import ProbedStore, Store, open_store
from atoll.store.client import PROBES, TEXT
from atoll.telemetry.text import format_size as shown_size

ROUND_TRIPS = 5
UPLOAD_BYTES = 2**20
"""Enough to fill a line for a moment, little enough for a slow one."""

Looked = tuple[str, str, AtollError | None]
"""The name of a step, what it has shown, and what went wrong."""


class StoreExamination:
    """Looks at a store, each look on what the last one found."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._key = f"{PROBES}{secrets.token_hex(16)}"
        self._has_put_new = True
        self._is_put = False

    def looks(self) -> Iterator[Looked]:
        """Yield what each look shows, and end with the first that fails."""
        steps: tuple[tuple[str, Callable[[], str]], ...] = (
            ("store", self._open),
            ("list", self._list),
            ("write", self._write),
            ("read", self._read),
            ("put once", self._put_once),
            ("ranges", self._ranges),
            ("delete", self._delete),
            ("run", self._run),
            ("clock", self._clock),
            ("round trip", self._round_trip),
            ("upload", self._upload),
        )
        for name, look in steps:
            try:
                yield name, look(), None
            except AtollError as exc:
                self._clean_up()
                yield name, str(exc), exc
                return

    def _clean_up(self) -> None:
        """Leave nothing behind, as far as that is allowed."""
        if self._is_put:
            with suppress(AtollError):
                self._store.remove([self._key])

    def _open(self) -> str:
        require_there(self._url)
        self._store: Store = open_store(self._url)
        return f"{self._url}, by {type(self._store).__name__}"

    def _list(self) -> str:
        self._store.items(PROBES)
        return "allowed"

    def _write(self) -> str:
        self._store.put_new(self._key, [TEXT])
        self._is_put = True
        return "allowed"

    def _read(self) -> str:
        if self._store.get(self._key) != TEXT:
            raise CorruptError(
                f"{self._url} gives other bytes than were put at {self._key}. Do not "
                "use it."
            )
        return "allowed, and the bytes are those that were put"

    def _put_once(self) -> str:
        was_replaced = self._store.put_new(self._key, [TEXT[::-1]])
        self._has_put_new = not was_replaced and self._store.get(self._key) == TEXT
        if self._has_put_new:
            return "what was put first stays"
        return "a second object replaces the first: the run must name a store.decider"

    def _ranges(self) -> str:
        reader = WholeReads(self._store)
        reader.get(self._key, 2, 3)
        if reader.traits.has_ranges:
            return "a part can be read by itself"
        return "objects are read whole, which costs more bytes"

    def _delete(self) -> str:
        self._store.remove([self._key])
        return "allowed"

    def _run(self) -> str:
        timing = ThreadTiming()
        try:
            lookout = BucketReader.open(WholeReads(self._store), timing, url=self._url)
            lookout.look_members()
            lookout.look_controls()
            states = States(lookout, Outcomes(lookout, None))
            for fragment in range(len(lookout.sight.layout)):
                states.begin(fragment)
        finally:
            timing.close()
        if lookout.sight.moved_to is not None:
            return f"{lookout.run} has moved to {lookout.sight.moved_to}"
        settings = lookout.sight.settings
        if not self._has_put_new:
            require_able(ProbedStore(self._store), settings, url=self._url)
        founded = "not founded yet"
        if lookout.founded:
            closed = min(round.number for round in lookout.sight.state.rounds) - 1
            founded = f"founded, its rosters verified to round {closed}"
        return f"{lookout.run}, fingerprint {settings.fingerprint[:12]}, {founded}"

    def _clock(self) -> str:
        return "not compared: nothing here depends on one"

    def _round_trip(self) -> str:
        times = [_timed(lambda: self._store.items(PROBES)) for _ in range(ROUND_TRIPS)]
        return f"{statistics.median(times) * 1e3:.1f} ms, the median of {ROUND_TRIPS}"

    def _upload(self) -> str:
        data = secrets.token_bytes(UPLOAD_BYTES)
        try:
            seconds = _timed(lambda: self._store.put(self._key, [data]))
        finally:
            self._store.remove([self._key])
        per_s = shown_size(UPLOAD_BYTES / max(1e-4, seconds))
        return f"about {per_s}/s, by one of {shown_size(UPLOAD_BYTES)}"


def _timed(act: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    act()
    return time.perf_counter() - start_s
