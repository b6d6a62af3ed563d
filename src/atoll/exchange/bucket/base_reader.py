"""Reads the documents of a run and the controls of operators. Puts nothing.

Rule 1: the lock is held for a `RunView`, never for a request.
Rule 2: an object that cannot be read as its key promises is reported once and ignored,
        unless the run cannot continue without it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from atoll.errors import CorruptError, NoSuchObject
from atoll.exchange.api.fields import JsonField
from atoll.exchange.bucket import documents, keys
from atoll.exchange.bucket.documents import (
    RESTORE,
    RosterHead,
    RunDocument,
    SettingsDocument,
    fetch,
    fetch_read,
)
from atoll.exchange.bucket.runtime import Timing
from atoll.exchange.bucket.view import (
    LEASE_S,
    BaseView,
    ControlView,
    MemberView,
    RunView,
    UpdateView,
)
from atoll.protocol.operators import require_here
from atoll.store import Store

WORD_S = 2.0
"""Between two looks whether a run that is on its way has come or stays."""

log = logging.getLogger("atoll")


class BaseReader:
    """Tells a `RunView` what a run is. Any thread may call."""

    def __init__(
        self,
        store: Store,
        timing: Timing,
        settings: SettingsDocument,
        *,
        lease_s: float = LEASE_S,
    ) -> None:
        self.store, self.timing = store, timing
        self.run = settings.run
        self.founded: RunDocument | None = None
        self.founding_head: RosterHead | None = None
        """What the first roster of each fragment names: the digest of `run.json`."""

        self.sight = RunView(settings.run, settings.settings, lease_s=lease_s)
        self.bases, self.updates = BaseView(self.sight), UpdateView(self.sight)
        self.members = MemberView(self.sight, self.updates)
        self.words = ControlView(self.sight, self.members)
        self.lock = threading.RLock()
        self._fingerprint = settings.fingerprint
        self._told: set[str] = set()

    def look_founding(self) -> bool:
        """Return whether the run has its first weights."""
        if self.founded is None:
            # Before it is asked for: they had read it then.
            reader = self._reader_of_founding()
            try:
                read = fetch_read(self.store, documents.RUN, keys.RUN, run=self.run)
            except NoSuchObject:
                if reader is not None:
                    raise self._unfounded(reader) from None
                return False
            found = read.document
            if found.fingerprint != self._fingerprint:
                raise CorruptError(
                    f"{keys.SETTINGS} has fingerprint {self._fingerprint}, and "
                    f"{keys.RUN} says that the run was founded with "
                    f"{found.fingerprint}: somebody has edited one of them. Restore "
                    "that object from a copy or an earlier version of the bucket."
                )
            with self.lock:
                self.founded = found
                self.founding_head = RosterHead(
                    round=0, digest=read.digest, is_chained=read.is_sealed
                )
                self.sight.found(found.model, self.timing.now_s(), self.founding_head)
        return True

    def require_unfounded(self) -> None:
        """Return if a run without `run.json` has never had one.

        Raises:
            CorruptError: it has, by a roster, a state or an island that has read it.
        """
        there = self._reader_of_founding() or self._trace_of_founding()
        if there is not None and not self.look_founding():
            raise self._unfounded(there)

    def _unfounded(self, there: str) -> CorruptError:
        return CorruptError(
            f"{keys.RUN} is gone, and the run had been founded: there is {there}. "
            f"{RESTORE}"
        )

    def _reader_of_founding(self) -> str | None:
        """Return the key of an island's document that knows of the founding."""
        with self.lock:
            for document in self.sight.documents.values():
                if document.heads:
                    return keys.member(document.beat.island, document.beat.incarnation)
        return None

    def _trace_of_founding(self) -> str | None:
        """Return the key of an object that only a founded run has."""
        traces: list[tuple[str, JsonField[Any]]] = [
            (keys.roster(0, 1), documents.ROSTER)
        ]
        for key in self.listed(keys.states(0)):
            if key.endswith(f"/{keys.COMPLETE}"):
                traces.append((key, documents.STATE))
        for key, field in traces:
            # What is not ours may lie there, and says nothing of the run.
            with suppress(NoSuchObject, CorruptError):
                fetch(self.store, field, key, run=self.run)
                return key
        return None

    def look_controls(self) -> None:
        """Read what operators have said since."""
        while True:
            number = len(self.sight.controls) + 1
            key, readers = keys.control(number), self._readers(number)
            try:
                said = fetch(self.store, documents.CONTROL, key, run=self.run)
            except NoSuchObject as exc:
                if readers:
                    raise CorruptError(
                        f"{key} is gone: island {readers[0]!r} has read it. {RESTORE}"
                    ) from exc
                return
            with self.lock:
                if key == keys.control(len(self.sight.controls) + 1):
                    self.words.see(said, self.timing.now_s())

    def _readers(self, number: int) -> list[str]:
        """Return the islands whose documents say that they read this control word."""
        with self.lock:
            return sorted(
                name
                for name, document in self.sight.documents.items()
                if document.controls >= number
            )

    def require_controls(self, count: int, *, named_by: str) -> None:
        """Return when as many control words are read as an object names.

        Raises:
            CorruptError: one of them is gone or damaged.
        """
        if len(self.sight.controls) < count:
            self.look_controls()
        if (number := len(self.sight.controls)) < count:
            raise CorruptError(
                f"{keys.control(number + 1)} is gone: {named_by} was written by an "
                f"island that had read it. {RESTORE}"
            )

    def heed_controls(self) -> None:
        """Read what operators have said since; what is nobody's word is passed over."""
        with suppress(NoSuchObject):
            self.tolerant(keys.CONTROL, self.look_controls)

    def require_here(self) -> None:
        """Return unless the run is known to be elsewhere.

        Raises:
            RunMoved: it is, and where.
        """
        require_here(self.sight.state)

    def require_staying(self) -> None:
        """Return when the run is not on its way, however long that may take.

        Raises:
            RunMoved: it has come where it goes.
        """
        self.heed_controls()
        while self.sight.state.move is not None:
            self.require_here()
            self.timing.pause(WORD_S)
            self.heed_controls()

    def tolerant(self, key: str, read: Callable[[], documents.T]) -> documents.T | None:
        """Return what was read; None: it is not what its key promises, and was told."""
        try:
            return read()
        except CorruptError as exc:
            self.tell(f"{key} is passed over: {exc}")
            return None

    def tell(self, what: str) -> None:
        """Tell people something, once."""
        if what not in self._told:
            self._told.add(what)
            log.warning("%s", what)

    def listed(self, prefix: str) -> list[str]:
        """Return the keys that begin with a prefix, as a list has them now."""
        return [item.key for item in self.store.items(prefix)]


def require_unchanged(document: SettingsDocument, fingerprint: str) -> None:
    """Return if settings are those that a run was made with."""
    if document.settings.fingerprint != fingerprint:
        raise CorruptError(
            f"{keys.SETTINGS} says fingerprint {fingerprint}, and its settings "
            f"have {document.settings.fingerprint}: somebody has edited them. "
            "Put the old ones back; what may change is changed by `atoll control`."
        )
